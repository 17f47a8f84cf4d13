package scheduler

import (
	"kvasir"
	"unsafe"
)

// Host calls a scheduler as the host does, with the lists of the WIT text.
type Host struct {
	policy                                                Policy
	cluster                                               Cluster
	request                                               Request
	prefillValues, decodeValues, requestWords, linkValues int
	scores                                                []float32
}

// NewHost is for tests; a component has one already.
func NewHost(policy Policy) *Host {
	return &Host{policy: policy}
}

func (h *Host) Open(layout []uint32) {
	h.cluster = Cluster{
		Prefill:     make([]Prefill, layout[0]),
		Decode:      make([]Decode, layout[1]),
		BlockTokens: layout[2],
		Domains:     layout[6],
	}
	if len(layout) > 8 {
		h.cluster.HostRun = layout[8]
	}
	h.prefillValues, h.decodeValues = int(layout[3]), int(layout[4])
	h.requestWords, h.linkValues = int(layout[5]), int(layout[7])
	if policy, ok := h.policy.(interface{ Opened() }); ok {
		policy.Opened()
	}
}

func (h *Host) UpdatePrefill(values []float32) {
	for width := h.prefillValues; width >= 17 && len(values) >= width; values = values[width:] {
		v := values[:width]
		if !(v[0] >= 0 && v[0] < float32(len(h.cluster.Prefill))) {
			continue
		}
		h.cluster.Prefill[int(v[0])] = Prefill{
			Available: v[1] == 1, BusyUntil: v[2], C0: v[3], C1: v[4], C2: v[5], T0: v[6], T1: v[7], Queued: v[8],
			FreeBlocks: v[9], Capacity: v[10], ReportedAt: v[11], Identity: uint32(v[12]), Peer: int(v[13]), Host: int(v[14]),
			Domain: int(v[15]), Waiting: v[16], Adapters: known(v, 17), AdapterMax: known(v, 18), Send: known(v, 19),
		}
	}
}

func (h *Host) UpdateDecode(values []float32) {
	for width := h.decodeValues; width >= 19 && len(values) >= width; values = values[width:] {
		v := values[:width]
		if !(v[0] >= 0 && v[0] < float32(len(h.cluster.Decode))) {
			continue
		}
		h.cluster.Decode[int(v[0])] = Decode{
			Available: v[1] == 1, Sequences: v[2], Context: v[3], FreeBlocks: v[4], Capacity: v[5], D0: v[6], D1: v[7], D2: v[8],
			Coming: v[9], ComingContext: v[10], ReportedAt: v[11], Identity: uint32(v[12]), Peer: int(v[13]), Host: int(v[14]),
			Domain: int(v[15]), Waiting: v[16], T0: v[17], T1: v[18], Adapters: known(v, 19), AdapterMax: known(v, 20),
		}
	}
}

func (h *Host) UpdateLinks(values []float32) {
	policy, ok := h.policy.(LinkUser)
	if !ok {
		return
	}
	var links []Link
	for _, v := range kvasir.Rows(values, h.linkValues) {
		links = append(links, Link{int(v[0]), int(v[1]), v[2], v[3], v[4]})
	}
	policy.UpdateLinks(links)
}

func (h *Host) SetThresholds(values []float32) {
	if policy, ok := h.policy.(ThresholdUser); ok {
		policy.SetThresholds(values)
	}
}

func (h *Host) Schedule(now float32, question []uint32) Decision {
	h.read(now, question)
	return h.policy.Schedule(&h.cluster, &h.request)
}

func (h *Host) Explain(now float32, question []uint32) []float32 {
	policy, ok := h.policy.(Explainer)
	if !ok {
		return nil
	}
	h.read(now, question)
	h.scores = policy.Explain(&h.cluster, &h.request, h.scores[:0])
	return h.scores
}

func (h *Host) read(now float32, question []uint32) {
	r := &h.request
	r.Read(question)
	r.Now = now
	prefill, decode := len(h.cluster.Prefill), len(h.cluster.Decode)
	bits, rest := question[18], question[h.requestWords:]
	column := func(bit, slots int) []uint32 {
		if bits>>bit&1 == 0 {
			return nil
		}
		list := rest[:slots]
		rest = rest[slots:]
		return list
	}
	r.Prefix, r.PrefixHBM, r.PrefixDRAM = column(0, prefill), column(1, prefill), column(2, prefill)
	r.PrefillFit = column(3, prefill)
	r.DecodePrefix, r.DecodeFit = column(4, decode), column(5, decode)
	r.PrefillScore, r.DecodeScore = floats(column(6, prefill)), floats(column(7, decode))
	r.DecodePrefixHBM, r.DecodePrefixDRAM = column(8, decode), column(9, decode)
}

// known gives a value of a row, -1 if an earlier host leaves it out.
func known(row []float32, at int) float32 {
	if at < len(row) {
		return row[at]
	}
	return -1
}

// floats reads words as the bits of floats.
func floats(words []uint32) []float32 {
	return unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(words))), len(words))
}
