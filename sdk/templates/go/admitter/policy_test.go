package main

import (
	"kvasir"
	"kvasir/admitter"
	"math"
	"slices"
	"testing"
)

func configured(t *testing.T, settings map[string]string) *admitter.Host {
	p := &policy{}
	if err := (kvasir.Control{Policy: p}).Configure(settings); err != nil {
		t.Fatal(err)
	}
	return admitter.NewHost(p)
}

func TestWhatWouldMissItsSLOIsRefused(t *testing.T) {
	expect := func(h *admitter.Host, expected admitter.Verdict, ttft, tbt float32, hints uint32) {
		t.Helper()
		request := make([]uint32, 19)
		request[5], request[10], request[11] = hints, math.Float32bits(200), math.Float32bits(50)
		if verdict := h.AdmitRequest(request, []float32{ttft, tbt, 0, 0, 0, 0, 0, 77}); verdict != expected {
			t.Errorf("%#x, not %#x", verdict, expected)
		}
	}
	h := configured(t, nil)
	expect(h, admitter.Accept, 200, 50, 0)
	expect(h, admitter.Refuse(kvasir.TTFT, 1000), 201, 50, 0)
	expect(h, admitter.Refuse(kvasir.TBT, 1000), 200, 51, 0)
	expect(h, admitter.Accept, 201, 51, 1)
	expect(configured(t, map[string]string{"slack": "1.5"}), admitter.Accept, 300, 75, 0)
}

func TestBlocksUsedOftenEnoughAreStored(t *testing.T) {
	blocks := []uint32{2 << 16, 0, 1, 0, 0, 77, 3 << 16, 0, 1, 0, 0, 77} // records of 6 words
	answers := configured(t, map[string]string{"min-uses": "3"}).AdmitBlocks(3, 6, blocks)
	if !slices.Equal(answers, []admitter.Store{admitter.Skip, admitter.Keep}) {
		t.Errorf("answers %v", answers)
	}
}

func TestSettingsAreChecked(t *testing.T) {
	for _, pair := range [][2]string{{"slack", "x"}, {"slack", "0"}, {"min-uses", "NaN"}, {"slak", "1"}} {
		if err := (kvasir.Control{Policy: &policy{}}).Configure(map[string]string{pair[0]: pair[1]}); err == nil {
			t.Errorf("%v is taken", pair)
		}
	}
}
