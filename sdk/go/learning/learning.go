// Package learning is for schedulers and admitters that learn: `learning` in sdk/wit/learning.wit. Such a policy calls
// this package's Serve beside that of its slot.
package learning

import (
	"kvasir"
	"math"
)

// Learner hears outcomes on the learner's instance alone; what it publishes, those that decide adopt.
type Learner interface {
	// Observe gets each outcome with a known end.
	Observe(outcome *Outcome)
	// Publish is what instances that decide are to know, in a format of the policy's own.
	Publish() []byte
	// Adopt takes what the learner published; it is valid during the call only.
	Adopt(knowledge []byte)
}

// End says how a request ended.
type End uint32

const (
	Finished End = iota + 1
	Rejected
	Refused
	GivenUp
)

// Outcome is what came of a request; times in ms, -1 = not known.
type Outcome struct {
	End                              End
	Reason                           kvasir.Reason
	Decision, Session                uint64
	Tenant, Class, Model, Adapter    uint32
	Prefill, Decode                  uint32 // identities of the instances, 0 = none
	PromptTokens, CachedTokens       uint32
	FetchedBlocks, DecodedTokens     uint32
	TTFTPredicted, TTFT              float32
	TBTPredicted, TBT                float32
	QueuePredicted, PrefillPredicted float32
	PrefillMeasured                  float32 // without the waits before it
	HostRun                          uint32  // another number after each restart of the host
}

// Host calls a learner as the host does, with the lists of the WIT text.
type Host struct {
	learner Learner
	outcome Outcome
}

// NewHost is for tests; a component has one already.
func NewHost(learner Learner) *Host {
	return &Host{learner: learner}
}

func (h *Host) Observe(stride uint32, words []uint32) {
	for width := int(stride); width >= 22 && len(words) >= width; words = words[width:] {
		w := words[:width]
		if end := End(w[0]); end < Finished || end > GivenUp {
			continue
		}
		float := math.Float32frombits
		h.outcome = Outcome{
			End: End(w[0]), Reason: kvasir.Reason(w[1]), Decision: kvasir.Long(w[2:]), Session: kvasir.Long(w[8:]),
			Tenant: w[4], Class: w[5], Model: w[6], Adapter: w[7], Prefill: w[10], Decode: w[11], PromptTokens: w[12],
			CachedTokens: w[13], FetchedBlocks: w[14], DecodedTokens: w[15], TTFTPredicted: float(w[16]), TTFT: float(w[17]),
			TBTPredicted: float(w[18]), TBT: float(w[19]), QueuePredicted: float(w[20]), PrefillPredicted: float(w[21]),
			PrefillMeasured: -1,
		}
		if width >= 24 {
			h.outcome.PrefillMeasured, h.outcome.HostRun = float(w[22]), w[23]
		}
		h.learner.Observe(&h.outcome)
	}
}
