package admitter

import (
	"kvasir/internal/guest"
	"unsafe"
)

var host *Host

// Serve makes this the component's policy; call it once, in a function init.
func Serve(policy Policy) {
	host = NewHost(policy)
	guest.Serve(policy, "admitter")
}

//go:wasmexport kvasir:policy/admission@0.1.0#update-load
func updateLoad(values unsafe.Pointer, length uint32) {
	defer guest.Done()
	host.UpdateLoad(guest.Floats(values, length))
}

//go:wasmexport kvasir:policy/admission@0.1.0#admit-request
func admitRequest(words unsafe.Pointer, length uint32, values unsafe.Pointer, count uint32) uint64 {
	defer guest.Done()
	return uint64(host.AdmitRequest(guest.Words(words, length), guest.Floats(values, count)))
}

//go:wasmexport kvasir:policy/admission@0.1.0#admit-blocks
func admitBlocks(tier, stride uint32, words unsafe.Pointer, length uint32) unsafe.Pointer {
	defer guest.Done()
	return guest.List(host.AdmitBlocks(tier, stride, guest.Words(words, length)))
}
