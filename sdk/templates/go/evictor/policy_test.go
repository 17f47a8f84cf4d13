package main

import (
	"kvasir"
	"kvasir/evictor"
	"slices"
	"testing"
)

const words = 10 // one more than documented, as a later host may send

type host struct {
	*evictor.Host
	*testing.T
}

func open(t *testing.T) host {
	h := host{evictor.NewHost(&policy{}), t}
	h.Open([]uint32{4, words, 7})
	return h
}

func (h host) event(kind evictor.Kind, slot, parent uint32) {
	h.OnEvents(0, []uint32{uint32(kind), slot, parent, 0, 1 << 20, 0, 0, 0, 0, 77})
}

func (h host) expectVictims(want uint32, expected ...evictor.Victim) {
	h.Helper()
	if victims := h.SelectVictims(0, want); !slices.Equal(victims, expected) {
		h.Errorf("victims %v, not %v", victims, expected)
	}
}

func TestTheBlockUsedLongestAgoGoesFirstAndLeavesBeforeParents(t *testing.T) {
	h := open(t)
	h.expectVictims(1)
	h.event(evictor.Insert, 0, kvasir.None) // a prompt of two blocks, 0 and 1, and another, 2
	h.event(evictor.Insert, 1, 0)
	h.event(evictor.Insert, 2, kvasir.None)
	h.event(evictor.Hit, 0, 1)
	h.event(evictor.Hit, 1, 1)
	h.expectVictims(1, 2)
	h.event(evictor.Keep, 2, 0)
	h.expectVictims(1, 1)
}

func TestPinnedAndRemovedBlocksAreNoVictims(t *testing.T) {
	h := open(t)
	h.event(evictor.Insert, 0, kvasir.None)
	h.event(evictor.Pin, 0, 0)
	h.event(evictor.Hit, 0, 1)
	h.event(99, 3, 0) // a kind of a later host
	h.event(evictor.Insert, 3, kvasir.None)
	h.event(evictor.Remove, 3, 0)
	h.expectVictims(2)
	h.event(evictor.Unpin, 0, 0)
	h.expectVictims(2, 0)
}
