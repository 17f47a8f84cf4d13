// Lets the scheduler move prefixes sooner while queues are uneven.
package main

import (
	"kvasir"
	"kvasir/balancer"
)

type policy struct{ even, uneven float64 }

func init() { balancer.Serve(&policy{}) }
func main() {}

func (p *policy) Describe() kvasir.Description {
	return kvasir.Description{Name: "my-balancer", Version: "0.1.0", Settings: []kvasir.Setting{
		{Name: "even", Default: "4", Doc: "kvcache-balancing-threshold while queues are even, 1 to 1000"},
		{Name: "uneven", Default: "1.5", Doc: "the same while the longest queue is over twice the mean, 1 to 1000"},
	}}
}

func (p *policy) Configure(name, value string) (err error) {
	setting := &p.even
	if name == "uneven" {
		setting = &p.uneven
	}
	*setting, err = kvasir.Number(name, value, 1, 1000)
	return err
}

func (p *policy) Tick(tick *balancer.Tick) []float32 {
	var sum, longest, count float32
	for _, queue := range tick.PrefillQueue {
		if queue < 0 {
			continue // unavailable
		}
		sum, longest, count = sum+queue, max(longest, queue), count+1
	}
	switch {
	case count == 0:
		return nil // keep what is in force
	case longest > 2*sum/count:
		return []float32{float32(p.uneven)}
	}
	return []float32{float32(p.even)}
}
