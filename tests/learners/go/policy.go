// See ../README.md.
package main

import (
	"encoding/binary"
	"kvasir"
	"kvasir/admitter"
	"kvasir/learning"
)

type policy struct{ known uint32 }

func init() {
	p := &policy{}
	admitter.Serve(p)
	learning.Serve(p)
}
func main() {}

func (p *policy) Describe() kvasir.Description {
	return kvasir.Description{Name: "my-learner", Version: "0.1.0"}
}

func (p *policy) Observe(o *learning.Outcome) {
	twice := func(ms float32) uint32 { return uint32(2 * ms) }
	for _, value := range []uint32{
		uint32(o.End), uint32(o.Reason), uint32(o.Decision >> 20), o.Tenant, o.Class, o.Model, o.Adapter,
		uint32(o.Session >> 20), o.Prefill, o.Decode, o.PromptTokens, o.CachedTokens, o.FetchedBlocks, o.DecodedTokens,
		twice(o.TTFTPredicted), twice(o.TTFT), twice(o.TBTPredicted), twice(o.TBT), twice(o.QueuePredicted),
		twice(o.PrefillPredicted), twice(o.PrefillMeasured), o.HostRun,
	} {
		p.known = (p.known*31 + value) & 0xfffff
	}
}

func (p *policy) Publish() []byte {
	return binary.LittleEndian.AppendUint32(nil, p.known)
}

func (p *policy) Adopt(knowledge []byte) {
	if len(knowledge) == 4 {
		p.known = binary.LittleEndian.Uint32(knowledge)
	}
}

func (p *policy) AdmitRequest(*kvasir.Request, *admitter.Forecast) admitter.Verdict {
	return admitter.Refuse(kvasir.OwnReason, p.known)
}

func (p *policy) AdmitBlock(uint32, *admitter.Block) admitter.Store {
	return admitter.Keep
}
