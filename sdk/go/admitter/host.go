package admitter

import "kvasir"

// Host calls an admitter as the host does, with the lists of the WIT text.
type Host struct {
	policy   Policy
	request  kvasir.Request
	forecast Forecast
	block    Block
	answers  []Store
}

// NewHost is for tests; a component has one already.
func NewHost(policy Policy) *Host {
	return &Host{policy: policy}
}

func (h *Host) UpdateLoad(values []float32) {
	if policy, ok := h.policy.(LoadUser); ok {
		policy.UpdateLoad(values)
	}
}

func (h *Host) AdmitRequest(request []uint32, forecast []float32) Verdict {
	h.request.Read(request)
	v := forecast
	h.forecast = Forecast{v[0], v[1], v[2], v[3], v[4], v[5], v[6], v}
	return h.policy.AdmitRequest(&h.request, &h.forecast)
}

func (h *Host) AdmitBlocks(tier, stride uint32, words []uint32) []Store {
	h.answers = h.answers[:0]
	for width := int(stride); width >= 5 && len(words) >= width; words = words[width:] {
		w := words[:width]
		h.block = Block{w[0] & 0xffff, w[0] >> 16, w[1], w[2], w[3], w[4]}
		h.answers = append(h.answers, h.policy.AdmitBlock(tier, &h.block))
	}
	return h.answers
}
