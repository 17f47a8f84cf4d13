package scheduler

import (
	"kvasir/internal/guest"
	"unsafe"
)

var host *Host

// Serve makes this the component's policy; call it once, in a function init.
func Serve(policy Policy) {
	host = NewHost(policy)
	guest.Serve(policy, "scheduler")
}

// The decision lies here until the next call; its fields have the places and sizes of the canonical ABI.
var decision Decision

//go:wasmexport kvasir:policy/scheduling@0.1.0#open
func open(layout unsafe.Pointer, length uint32) {
	defer guest.Done()
	host.Open(guest.Words(layout, length))
}

//go:wasmexport kvasir:policy/scheduling@0.1.0#update-prefill
func updatePrefill(values unsafe.Pointer, length uint32) {
	defer guest.Done()
	host.UpdatePrefill(guest.Floats(values, length))
}

//go:wasmexport kvasir:policy/scheduling@0.1.0#update-decode
func updateDecode(values unsafe.Pointer, length uint32) {
	defer guest.Done()
	host.UpdateDecode(guest.Floats(values, length))
}

//go:wasmexport kvasir:policy/scheduling@0.1.0#update-links
func updateLinks(values unsafe.Pointer, length uint32) {
	defer guest.Done()
	host.UpdateLinks(guest.Floats(values, length))
}

//go:wasmexport kvasir:policy/scheduling@0.1.0#set-thresholds
func setThresholds(values unsafe.Pointer, length uint32) {
	defer guest.Done()
	host.SetThresholds(guest.Floats(values, length))
}

//go:wasmexport kvasir:policy/scheduling@0.1.0#schedule
func schedule(now float32, question unsafe.Pointer, length uint32) unsafe.Pointer {
	defer guest.Done()
	decision = host.Schedule(now, guest.Words(question, length))
	return unsafe.Pointer(&decision)
}

//go:wasmexport kvasir:policy/scheduling@0.1.0#explain
func explain(now float32, question unsafe.Pointer, length uint32) unsafe.Pointer {
	defer guest.Done()
	return guest.List(host.Explain(now, guest.Words(question, length)))
}
