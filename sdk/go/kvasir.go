// Package kvasir is what Kvasir policies of every slot share. A policy is a package main that gives a value to Serve of
// kvasir/scheduler, kvasir/evictor, kvasir/admitter or kvasir/balancer, in a function init; what each call means
// stands in the WIT text (sdk/wit). Lists in arguments are valid during the call only.
package kvasir

import (
	"fmt"
	"math"
	"strconv"
)

// None is no slot, no parent, never.
const None = math.MaxUint32

// Setting is one setting of a policy.
type Setting struct {
	Name    string
	Default string // as text
	Doc     string // what it does, with its unit
}

// Description is what a policy says about itself.
type Description struct {
	Name, Version string
	Settings      []Setting
}

// Policy is what every policy is, whatever its slot.
type Policy interface {
	Describe() Description
}

// Configurer is a policy with settings: it gets each once, with the operator's value or the default. An error refuses
// the load with its text. Unknown settings are refused before.
type Configurer interface {
	Configure(name, value string) error
}

// StateKeeper is a policy that passes something on to its successor: see `control` in common.wit.
type StateKeeper interface {
	ExportState() []byte
	ImportState(state []byte) error
}

// Number is the number that a setting's text says; an error if it is none, or not within low to high.
func Number(name, text string, low, high float64) (float64, error) {
	value, err := strconv.ParseFloat(text, 64)
	if err != nil || !(low <= value && value <= high) {
		return 0, fmt.Errorf("%s: a number from %g to %g", name, low, high)
	}
	return value, nil
}

// Reason says why a request is rejected.
type Reason uint32

const (
	TTFT Reason = iota + 1
	TBT
	NoInstance
	NoMemory
	OwnReason
)

// Level says how much a line of the log matters.
type Level uint32

const (
	Error Level = iota + 1
	Warn
	Info
	Debug
)

// Long is the 64-bit number in two words, low half first.
func Long(words []uint32) uint64 {
	return uint64(words[0]) | uint64(words[1])<<32
}

// Rows cuts values into rows of that width.
func Rows(values []float32, width int) [][]float32 {
	var rows [][]float32
	for ; width > 0 && len(values) >= width; values = values[width:] {
		rows = append(rows, values[:width])
	}
	return rows
}
