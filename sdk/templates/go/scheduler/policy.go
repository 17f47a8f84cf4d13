// Sends a request where its first token comes soonest, and its decoding to the instance with the fewest sequences.
package main

import (
	"kvasir"
	"kvasir/scheduler"
	"math"
)

type policy struct{}

func init() { scheduler.Serve(policy{}) }
func main() {}

func (policy) Describe() kvasir.Description {
	return kvasir.Description{Name: "my-scheduler", Version: "0.1.0"}
}

var infinite = float32(math.Inf(1))

// Time until the prefill at slot is done, ms; infinite if it cannot serve the request.
func firstToken(c *scheduler.Cluster, r *scheduler.Request, slot int) float32 {
	p := &c.Prefill[slot]
	if !p.Available || (r.PrefillFit != nil && r.PrefillFit[slot] == 0) {
		return infinite
	}
	stored := float32(0)
	if r.Prefix != nil {
		stored = float32(r.Prefix[slot] * c.BlockTokens)
	}
	computed := max(float32(r.PromptTokens)-stored, 0)
	return max(p.BusyUntil-r.Now, 0) + p.C0 + p.C1*computed + p.C2*computed*(stored+computed/2)
}

// Sequences decoded there, now or soon; infinite if it cannot serve the request.
func sequences(c *scheduler.Cluster, r *scheduler.Request, slot int) float32 {
	d := &c.Decode[slot]
	if !d.Available || (r.DecodeFit != nil && r.DecodeFit[slot] == 0) {
		return infinite
	}
	return d.Sequences + d.Coming
}

func (policy) Schedule(c *scheduler.Cluster, r *scheduler.Request) scheduler.Decision {
	prefill, soonest := -1, infinite
	for slot := range c.Prefill {
		if value := firstToken(c, r, slot); value < soonest {
			prefill, soonest = slot, value
		}
	}
	decode, fewest := -1, infinite
	for slot := range c.Decode {
		if value := sequences(c, r, slot); value < fewest {
			decode, fewest = slot, value
		}
	}
	if prefill < 0 || decode < 0 {
		return scheduler.Reject(kvasir.NoInstance, 1000)
	}
	return scheduler.Run(prefill, decode)
}

func (policy) Explain(c *scheduler.Cluster, r *scheduler.Request, scores []float32) []float32 {
	for slot := range c.Prefill {
		scores = append(scores, firstToken(c, r, slot))
	}
	return scores
}
