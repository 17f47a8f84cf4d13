package evictor

import (
	"kvasir/internal/guest"
	"unsafe"
)

var host *Host

// Serve makes this the component's policy; call it once, in a function init.
func Serve(policy Policy) {
	host = NewHost(policy)
	guest.Serve(policy, "evictor")
}

//go:wasmexport kvasir:policy/eviction@0.1.0#open
func open(layout unsafe.Pointer, length uint32) {
	defer guest.Done()
	host.Open(guest.Words(layout, length))
}

//go:wasmexport kvasir:policy/eviction@0.1.0#update-tiers
func updateTiers(values unsafe.Pointer, length uint32) {
	defer guest.Done()
	host.UpdateTiers(guest.Floats(values, length))
}

//go:wasmexport kvasir:policy/eviction@0.1.0#on-events
func onEvents(baseMs uint64, words unsafe.Pointer, length uint32) {
	defer guest.Done()
	host.OnEvents(baseMs, guest.Words(words, length))
}

//go:wasmexport kvasir:policy/eviction@0.1.0#select-victims
func selectVictims(nowMs uint64, want uint32) unsafe.Pointer {
	defer guest.Done()
	return guest.List(host.SelectVictims(nowMs, want))
}
