package balancer

import (
	"kvasir/internal/guest"
	"unsafe"
)

var host *Host

// Serve makes this the component's policy; call it once, in a function init.
func Serve(policy Policy) {
	host = NewHost(policy)
	guest.Serve(policy, "balancer")
}

//go:wasmexport kvasir:policy/balancing@0.1.0#tick
func tick(nowMs uint64, cluster unsafe.Pointer, clusterLength uint32, prefill unsafe.Pointer, prefillLength uint32,
	decode unsafe.Pointer, decodeLength uint32) unsafe.Pointer {
	defer guest.Done()
	return guest.List(host.Tick(nowMs, guest.Floats(cluster, clusterLength), guest.Floats(prefill, prefillLength),
		guest.Floats(decode, decodeLength)))
}
