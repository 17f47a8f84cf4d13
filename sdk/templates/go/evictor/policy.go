// Evicts the block used longest ago; within one prompt the deepest block first.
package main

import (
	"kvasir"
	"kvasir/evictor"
)

type policy struct {
	order  evictor.Order // resident blocks, the one used longest ago first
	parent []uint32
	pinned []bool
}

func init() { evictor.Serve(&policy{}) }
func main() {}

func (p *policy) Describe() kvasir.Description {
	return kvasir.Description{Name: "my-lru", Version: "0.1.0"}
}

func (p *policy) Open(slots uint32) {
	*p = policy{evictor.NewOrder(slots), make([]uint32, slots), make([]bool, slots)}
}

func (p *policy) OnEvent(event *evictor.Event) {
	slot := event.Slot
	switch event.Kind {
	case evictor.Insert:
		p.parent[slot] = event.Parent
	case evictor.Pin:
		p.pinned[slot] = true
	case evictor.Unpin, evictor.Remove:
		p.pinned[slot] = false
	}
	if event.Kind == evictor.Pin || event.Kind == evictor.Remove {
		p.order.Remove(slot)
	} else if !p.pinned[slot] {
		// To the end; but if the parent stands in the order, in front of it, so that leaves go first.
		p.order.Put(slot, p.parent[slot])
	}
}

func (p *policy) SelectVictims(nowMs uint64, want int, victims []evictor.Victim) []evictor.Victim {
	for len(victims) < want {
		slot := p.order.First()
		if slot == kvasir.None {
			break
		}
		p.order.Remove(slot)
		victims = append(victims, evictor.To(slot, evictor.HostDecides))
	}
	return victims
}
