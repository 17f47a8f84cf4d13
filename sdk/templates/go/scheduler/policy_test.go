package main

import (
	"kvasir"
	"kvasir/scheduler"
	"slices"
	"testing"
)

// Each one more than documented, as a later host may send.
const prefillValues, decodeValues, words = 20, 22, 20

func row(width int, values ...float32) []float32 {
	return append(values, make([]float32, width-len(values))...)
}

func TestRequestsGoWhereTheFirstTokenComesSoonest(t *testing.T) {
	h := scheduler.NewHost(policy{})
	h.Open([]uint32{2, 2, 16, prefillValues, decodeValues, words, 1, 6, 7, 99})
	// 1,000 tokens; the columns 0 (prefix) and 3 (which prefill can serve it).
	expect := func(expected scheduler.Decision, columns ...uint32) {
		t.Helper()
		question := make([]uint32, words)
		question[0], question[18] = 1000, 0b1001
		if decision := h.Schedule(50, append(question, columns...)); decision != expected {
			t.Errorf("%+v, not %+v", decision, expected)
		}
	}
	expect(scheduler.Reject(kvasir.NoInstance, 1000), 0, 0, 1, 1)
	h.UpdatePrefill(append(row(prefillValues, 0, 1, 0, 10, 0.1), row(prefillValues, 1, 1, 100, 10, 0.1)...))
	h.UpdateDecode(append(row(decodeValues, 0, 1, 5), row(decodeValues, 1, 1, 4)...))
	expect(scheduler.Run(0, 1), 0, 0, 1, 1)
	expect(scheduler.Run(1, 1), 0, 50, 1, 1) // 80 ms of prefill saved, 50 of waiting
	expect(scheduler.Run(0, 1), 0, 50, 1, 0) // 1 cannot serve it
	h.UpdateDecode(row(decodeValues, 1, 0, 4))
	expect(scheduler.Run(0, 0), 0, 0, 1, 1)
	question := make([]uint32, words)
	question[0] = 1000
	if scores := h.Explain(50, question); !slices.Equal(scores, []float32{110, 160}) {
		t.Errorf("scores %v", scores)
	}
}
