//go:build !wasm

package learning

// Serve makes this the component's learner; call it once, in a function init. Tests use NewHost.
func Serve(Learner) {}
