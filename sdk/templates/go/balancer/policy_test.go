package main

import (
	"kvasir"
	"kvasir/balancer"
	"slices"
	"testing"
)

func TestTheThresholdFollowsHowEvenTheQueuesAre(t *testing.T) {
	p := &policy{}
	if err := (kvasir.Control{Policy: p}).Configure(map[string]string{"even": "8"}); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ queues, expected []float32 }{
		{[]float32{10, 10, 10}, []float32{8}},
		{[]float32{1, 1, 100}, []float32{1.5}},
		{[]float32{5, 20, -1}, []float32{8}}, // 20 is less than twice 12.5
		{[]float32{-1, -1, -1}, nil},
	} {
		answer := balancer.NewHost(p).Tick(0, []float32{0, 0, 0, 77}, test.queues, nil)
		if !slices.Equal(answer, test.expected) {
			t.Errorf("%v: %v, not %v", test.queues, answer, test.expected)
		}
	}
}

func TestSettingsAreChecked(t *testing.T) {
	for _, pair := range [][2]string{{"even", "0.5"}, {"uneven", ""}, {"odd", "1"}} {
		if err := (kvasir.Control{Policy: &policy{}}).Configure(map[string]string{pair[0]: pair[1]}); err == nil {
			t.Errorf("%v is taken", pair)
		}
	}
}
