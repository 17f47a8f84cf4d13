// Package balancer makes balancers: `balancing` in sdk/wit/balancer.wit.
package balancer

import "kvasir"

// Policy is a balancer.
type Policy interface {
	kvasir.Policy
	// Tick returns the thresholds to have from now on; none = keep.
	Tick(tick *Tick) []float32
}

// Tick is what the host knows of the whole cluster.
type Tick struct {
	NowMs              uint64
	HitPercent         float32   // of the blocks referenced since the last tick
	Rejected, Accepted float32   // requests since the last tick
	PrefillQueue       []float32 // work queued, ms, by slot; negative = unavailable
	DecodeStep         []float32 // step time, ms, by slot; negative = unavailable
}

// Host calls a balancer as the host does, with the lists of the WIT text.
type Host struct {
	policy Policy
}

// NewHost is for tests; a component has one already.
func NewHost(policy Policy) *Host {
	return &Host{policy}
}

func (h *Host) Tick(nowMs uint64, cluster, prefillQueue, decodeStep []float32) []float32 {
	return h.policy.Tick(&Tick{nowMs, cluster[0], cluster[1], cluster[2], prefillQueue, decodeStep})
}
