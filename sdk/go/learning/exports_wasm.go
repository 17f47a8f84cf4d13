package learning

import (
	"kvasir/internal/guest"
	"unsafe"
)

var host *Host

// Serve makes this the component's learner; call it once, in a function init.
func Serve(learner Learner) {
	host = NewHost(learner)
}

//go:wasmexport kvasir:policy/learning@0.1.0#observe
func observe(stride uint32, words unsafe.Pointer, length uint32) {
	defer guest.Done()
	host.Observe(stride, guest.Words(words, length))
}

//go:wasmexport kvasir:policy/learning@0.1.0#publish
func publish() unsafe.Pointer {
	defer guest.Done()
	return guest.List(host.learner.Publish())
}

//go:wasmexport kvasir:policy/learning@0.1.0#adopt
func adopt(knowledge unsafe.Pointer, length uint32) {
	defer guest.Done()
	host.learner.Adopt(guest.Bytes(knowledge, length))
}
