// Package evictor makes evictors: `eviction` in sdk/wit/evictor.wit.
package evictor

import "kvasir"

// Policy is an evictor. It may also have the method of TierUser.
type Policy interface {
	kvasir.Policy
	// Open empties the policy; block slots are below slots. Allocate here.
	Open(slots uint32)
	// OnEvent gets known kinds, and slots below the number given to Open, only.
	OnEvent(event *Event)
	// SelectVictims appends at most want victims to victims, the most expendable block first.
	SelectVictims(nowMs uint64, want int, victims []Victim) []Victim
}

// TierUser hears what the tiers hold and what bringing blocks up from them costs.
type TierUser interface{ UpdateTiers(tiers []Tier) }

// Kind says what happened to a block.
type Kind uint8

const (
	Insert Kind = iota + 1
	Hit
	Remove
	Keep
	Pin
	Unpin
)

// Event is one event; the same one is filled again for the next.
type Event struct {
	Kind     Kind
	Replayed bool
	Class    uint32
	Slot     uint32
	Parent   uint32 // of an insert: the parent's slot, or None; of a hit: how many uses it stands for
	Depth    uint32
	Size     uint32 // bytes
	TimeMs   uint64
	Identity uint64
	Tenant   uint32
}

// Where a victim's bytes go.
type Where uint32

const (
	HostDecides Where = 0
	HBM         Where = 1
	NVMe        Where = 3
	Remote      Where = 4
	Drop        Where = 15
)

// Victim is a block slot and where its bytes go.
type Victim uint32

// To makes a victim whose bytes go there.
func To(slot uint32, where Where) Victim {
	return Victim(slot | uint32(where)<<28)
}

// Tier is a tier that blocks can go to and come back from.
type Tier struct {
	Tier         int // 1 HBM, 2 DRAM, 3 NVMe, 4 remote
	CapacityMiB  float32
	UsedMiB      float32
	LoadFixedMs  float32
	LoadMsPerMiB float32
	TakesCopies  bool
}
