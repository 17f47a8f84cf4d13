package kvasir

//go:wasmimport kvasir:policy/log@0.1.0 log
//go:noescape
func hostLog(level uint32, text string)

// Log adds a line to the policy's log.
func Log(level Level, text string) {
	hostLog(uint32(level), text)
}
