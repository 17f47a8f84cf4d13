package kvasir

import "math"

// Request is what schedulers and admitters learn of a request.
type Request struct {
	PromptTokens   uint32
	OutputTokens   uint32 // expected, 0 = unknown
	Class          uint32
	Tenant         uint32
	Priority       uint32 // larger is sooner
	Hints          uint32
	Session        uint64 // 0 = none
	Seed           uint64 // fresh per request
	TTFTSLO        float32
	TBTSLO         float32 // ms; +Inf = none
	Model, Adapter uint32
	SessionMemo    uint64
	TenantMemo     uint64
}

// Read takes the request from the host's words.
func (r *Request) Read(words []uint32) {
	_ = words[17]
	*r = Request{
		PromptTokens: words[0],
		OutputTokens: words[1],
		Class:        words[2],
		Tenant:       words[3],
		Priority:     words[4],
		Hints:        words[5],
		Session:      Long(words[6:]),
		Seed:         Long(words[8:]),
		TTFTSLO:      math.Float32frombits(words[10]),
		TBTSLO:       math.Float32frombits(words[11]),
		Model:        words[12],
		Adapter:      words[13],
		SessionMemo:  Long(words[14:]),
		TenantMemo:   Long(words[16:]),
	}
}

// MustRun says that the host asks not to reject this request.
func (r *Request) MustRun() bool {
	return r.Hints&1 != 0
}

// AskedAgain says that another decision overtook the last answer for this request.
func (r *Request) AskedAgain() bool {
	return r.Hints&2 != 0
}
