package evictor

import "kvasir"

// Order is a list of block slots, in the order that the policy gives them.
type Order struct {
	next, prev []uint32 // the last element is both ends; a slot that stands nowhere follows itself
}

// NewOrder is an empty order for that many slots.
func NewOrder(slots uint32) Order {
	order := Order{make([]uint32, slots+1), make([]uint32, slots+1)}
	for slot := range order.next {
		order.next[slot], order.prev[slot] = uint32(slot), uint32(slot)
	}
	return order
}

// Has says whether slot stands in the order.
func (o *Order) Has(slot uint32) bool {
	return slot < o.end() && o.next[slot] != slot
}

// First is the first slot, or None.
func (o *Order) First() uint32 {
	if slot := o.next[o.end()]; slot != o.end() {
		return slot
	}
	return kvasir.None
}

// Remove takes slot out, if it stands in the order.
func (o *Order) Remove(slot uint32) {
	next, prev := o.next[slot], o.prev[slot]
	o.next[prev], o.prev[next] = next, prev
	o.next[slot], o.prev[slot] = slot, slot
}

// Put moves or adds slot in front of before, or last if that is not in the order.
func (o *Order) Put(slot, before uint32) {
	if slot == before {
		return
	}
	o.Remove(slot)
	if !o.Has(before) {
		before = o.end()
	}
	prev := o.prev[before]
	o.next[slot], o.prev[slot] = before, prev
	o.next[prev], o.prev[before] = slot, slot
}

func (o *Order) end() uint32 {
	return uint32(len(o.next) - 1)
}
