package kvasir

import "strings"

//go:wasmimport kvasir:policy/log@0.1.0 log
//go:noescape
func hostLog(level uint32, text string)

// Log adds a line to the policy's log. What is not UTF-8 in it, which the contract does not allow, is replaced.
func Log(level Level, text string) {
	hostLog(uint32(level), strings.ToValidUTF8(text, "\uFFFD"))
}
