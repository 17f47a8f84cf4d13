//go:build !wasm

package balancer

// Serve makes this the component's policy; call it once, in a function init. Tests use NewHost.
func Serve(Policy) {}
