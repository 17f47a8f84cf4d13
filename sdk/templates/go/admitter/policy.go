// Refuses a request whose predicted times miss its SLO, and stores blocks that were used often enough.
package main

import (
	"kvasir"
	"kvasir/admitter"
)

type policy struct{ slack, minUses float64 }

func init() { admitter.Serve(&policy{}) }
func main() {}

func (p *policy) Describe() kvasir.Description {
	return kvasir.Description{Name: "my-admitter", Version: "0.1.0", Settings: []kvasir.Setting{
		{Name: "slack", Default: "1", Doc: "times its SLO that a predicted time may reach, 0.1 to 100"},
		{Name: "min-uses", Default: "2", Doc: "uses a block must have had to be stored in a lower tier, 0 to 1000"},
	}}
}

func (p *policy) Configure(name, value string) (err error) {
	if name == "slack" {
		p.slack, err = kvasir.Number(name, value, 0.1, 100)
	} else {
		p.minUses, err = kvasir.Number(name, value, 0, 1000)
	}
	return err
}

func (p *policy) AdmitRequest(r *kvasir.Request, f *admitter.Forecast) admitter.Verdict {
	switch {
	case r.MustRun():
		return admitter.Accept
	case float64(f.TTFT) > p.slack*float64(r.TTFTSLO):
		return admitter.Refuse(kvasir.TTFT, 1000)
	case float64(f.TBT) > p.slack*float64(r.TBTSLO):
		return admitter.Refuse(kvasir.TBT, 1000)
	}
	return admitter.Accept
}

func (p *policy) AdmitBlock(tier uint32, block *admitter.Block) admitter.Store {
	if float64(block.Uses) >= p.minUses {
		return admitter.Keep
	}
	return admitter.Skip
}
