// Package scheduler makes schedulers: `scheduling` in sdk/wit/scheduler.wit.
package scheduler

import "kvasir"

// Policy is a scheduler. It may also have the methods of Explainer, LinkUser and ThresholdUser, and an Opened().
type Policy interface {
	kvasir.Policy
	Schedule(cluster *Cluster, request *Request) Decision
}

// Explainer appends the scores behind a decision to scores: one per prefill slot and, if wanted, one per decode slot
// behind these; smaller is better, +Inf = not considered.
type Explainer interface {
	Explain(cluster *Cluster, request *Request, scores []float32) []float32
}

// LinkUser hears what lies between domains.
type LinkUser interface{ UpdateLinks(links []Link) }

// ThresholdUser hears the thresholds of the balancer or the operator.
type ThresholdUser interface{ SetThresholds(values []float32) }

// Link is what lies between two domains.
type Link struct {
	From, To  int
	Fixed     float32 // ms
	Factor    float32
	Transfers float32 // under way
}

// Cluster is what the host pushed.
type Cluster struct {
	Prefill     []Prefill // by slot
	Decode      []Decode  // by slot
	BlockTokens uint32    // tokens in one block
	Domains     uint32
	HostRun     uint32 // another number after each restart of the host
}

// Prefill is a prefill instance; times in ms, on the table clock.
type Prefill struct {
	Available  bool
	BusyUntil  float32
	C0, C1, C2 float32
	T0, T1     float32
	Queued     float32
	FreeBlocks float32
	Capacity   float32
	ReportedAt float32
	Identity   uint32
	Peer       int // decode slot of the same instance, -1 = it does not decode
	Host       int // -1 = unknown
	Domain     int
	Waiting    float32 // -1 = not reported
	Adapters   float32 // loaded, -1 = unknown
	AdapterMax float32 // that it can hold, -1 = not said
	Send       float32 // ms for a block to leave it, with what it sends now; -1 = not said
}

// Decode is a decode instance; times in ms, on the table clock.
type Decode struct {
	Available          bool
	Sequences, Context float32
	FreeBlocks         float32
	Capacity           float32
	D0, D1, D2         float32
	Coming             float32
	ComingContext      float32
	ReportedAt         float32
	Identity           uint32
	Peer               int // prefill slot of the same instance, -1 = it does not prefill
	Host               int // -1 = unknown
	Domain             int
	Waiting            float32 // -1 = not reported
	T0, T1             float32
	Adapters           float32 // loaded, -1 = unknown
	AdapterMax         float32 // that it can hold, -1 = not said
}

// Request is a request and what is new with it: columns of one word per slot of their table, nil if absent.
type Request struct {
	kvasir.Request
	Now                           float32 // ms on the table clock
	Prefix, PrefixHBM, PrefixDRAM []uint32
	PrefillFit                    []uint32
	DecodePrefix                  []uint32
	DecodeFit                     []uint32
	PrefillScore, DecodeScore     []float32 // of the scorers of a chain
	DecodePrefixHBM               []uint32
	DecodePrefixDRAM              []uint32
}

// Decision says where a request runs; fields as in the WIT text.
type Decision struct {
	Prefill, Decode        uint32
	TransferBlocks, Source uint32
	Reason                 kvasir.Reason
	RetryAfter             uint32 // ms
	SessionMemo            uint64
	TenantCharge           uint64
}

// Run sends a request to these slots.
func Run(prefill, decode int) Decision {
	return Decision{Prefill: uint32(prefill), Decode: uint32(decode)}
}

// Reject rejects a request.
func Reject(reason kvasir.Reason, retryAfterMs uint32) Decision {
	return Decision{Prefill: kvasir.None, Reason: reason, RetryAfter: retryAfterMs}
}
