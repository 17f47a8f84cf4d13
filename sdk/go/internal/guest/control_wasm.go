package guest

import (
	"kvasir"
	"strings"
	"unsafe"
)

var (
	control kvasir.Control
	slot    string
	// Texts of answers, which the collector does not see in spans.
	texts []string
)

// Serve makes this the component's policy.
func Serve(policy kvasir.Policy, name string) {
	control, slot = kvasir.Control{Policy: policy}, name
}

func textSpan(text string) span {
	texts = append(texts, text)
	return span{uint32(uintptr(unsafe.Pointer(unsafe.StringData(text)))), uint32(len(text))}
}

// Records of the canonical ABI.
type (
	setting     struct{ name, value, doc span }
	description struct{ name, version, slot, settings span }
	result      struct {
		failed uint32
		text   span
	}
)

var (
	described description
	settings  []setting
	said      result
)

func say(err error) unsafe.Pointer {
	texts, said = texts[:0], result{}
	if err != nil {
		said = result{1, textSpan(err.Error())}
	}
	return unsafe.Pointer(&said)
}

//go:wasmexport kvasir:policy/control@0.1.0#describe
func describe() unsafe.Pointer {
	defer Done()
	d := control.Policy.Describe()
	texts, settings = texts[:0], nil
	for _, s := range d.Settings {
		settings = append(settings, setting{textSpan(s.Name), textSpan(s.Default), textSpan(s.Doc)})
	}
	described = description{
		textSpan(d.Name), textSpan(d.Version), textSpan(slot),
		span{uint32(uintptr(unsafe.Pointer(unsafe.SliceData(settings)))), uint32(len(settings))},
	}
	return unsafe.Pointer(&described)
}

//go:wasmexport kvasir:policy/control@0.1.0#configure
func configure(pairs unsafe.Pointer, count uint32) unsafe.Pointer {
	defer Done()
	given := make(map[string]string, count)
	for _, pair := range unsafe.Slice((*[2]span)(pairs), count) {
		given[pair[0].text()] = pair[1].text()
	}
	return say(control.Configure(given))
}

// text copies, since the policy may keep it.
func (s span) text() string {
	return strings.Clone(unsafe.String((*byte)(unsafe.Pointer(uintptr(s.at))), s.length))
}

//go:wasmexport kvasir:policy/control@0.1.0#export-state
func exportState() unsafe.Pointer {
	defer Done()
	return List(control.ExportState())
}

//go:wasmexport kvasir:policy/control@0.1.0#import-state
func importState(state unsafe.Pointer, length uint32) unsafe.Pointer {
	defer Done()
	return say(control.ImportState(Bytes(state, length)))
}
