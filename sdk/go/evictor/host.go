package evictor

import "kvasir"

// The host asks for no more victims at once.
const victimsMax = 256

// Host calls an evictor as the host does, with the lists of the WIT text.
type Host struct {
	policy                 Policy
	slots                  uint32
	eventWords, tierValues int
	event                  Event
	victims                []Victim
}

// NewHost is for tests; a component has one already.
func NewHost(policy Policy) *Host {
	return &Host{policy: policy, victims: make([]Victim, 0, victimsMax)}
}

func (h *Host) Open(layout []uint32) {
	h.slots, h.eventWords, h.tierValues = layout[0], int(layout[1]), int(layout[2])
	h.policy.Open(h.slots)
}

func (h *Host) UpdateTiers(values []float32) {
	policy, ok := h.policy.(TierUser)
	if !ok {
		return
	}
	var tiers []Tier
	for _, v := range kvasir.Rows(values, h.tierValues) {
		tiers = append(tiers, Tier{int(v[0]), v[1], v[2], v[3], v[4], v[5] == 1})
	}
	policy.UpdateTiers(tiers)
}

func (h *Host) OnEvents(baseMs uint64, words []uint32) {
	for width := h.eventWords; width >= 9 && len(words) >= width; words = words[width:] {
		w := words[:width]
		kind := Kind(w[0])
		if kind < Insert || kind > Unpin || w[1] >= h.slots {
			continue
		}
		h.event = Event{
			Kind: kind, Replayed: w[0]>>8&1 == 1, Class: w[0] >> 16, Slot: w[1], Parent: w[2], Depth: w[3], Size: w[4],
			TimeMs: baseMs + uint64(w[5]), Identity: kvasir.Long(w[6:]), Tenant: w[8],
		}
		h.policy.OnEvent(&h.event)
	}
}

func (h *Host) SelectVictims(nowMs uint64, want uint32) []Victim {
	h.victims = h.policy.SelectVictims(nowMs, int(min(want, victimsMax)), h.victims[:0])
	return h.victims
}
