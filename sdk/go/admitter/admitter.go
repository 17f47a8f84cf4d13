// Package admitter makes admitters: `admission` in sdk/wit/admitter.wit.
package admitter

import "kvasir"

// Policy is an admitter. It may also have the method of LoadUser.
type Policy interface {
	kvasir.Policy
	AdmitRequest(request *kvasir.Request, forecast *Forecast) Verdict
	AdmitBlock(tier uint32, block *Block) Store
}

// LoadUser hears the load and its forecast on every control tick.
type LoadUser interface{ UpdateLoad(values []float32) }

// Forecast is what the host predicts for a request on its placement; times in ms.
type Forecast struct {
	TTFT, TBT                float32
	TenantPart               float32 // of its quota in use, 1 = all of it
	Queue, Prefill, Transfer float32
	TokensStored             float32   // prompt tokens that need not be computed
	Values                   []float32 // all of them, also those of later hosts
}

// Verdict on a request.
type Verdict uint64

// Accept lets a request in.
const Accept Verdict = 0

// Queue has a request wait.
func Queue(retryAfterMs uint32) Verdict {
	return 1 | Verdict(retryAfterMs)<<32
}

// Refuse turns a request away.
func Refuse(reason kvasir.Reason, retryAfterMs uint32) Verdict {
	return 2 | Verdict(reason)<<8 | Verdict(retryAfterMs)<<32
}

// Block is a block offered to a tier.
type Block struct {
	Class, Uses   uint32
	Depth         uint32
	Size          uint32 // bytes
	LastOfferedMs uint32 // since it was last offered to this tier and not stored, or None
	Tenant        uint32
}

// Store says what happens to a block.
type Store uint32

const (
	Skip Store = iota
	Keep
	Colder
)
