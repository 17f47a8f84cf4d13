// Package guest is the memory side of the canonical ABI (docs/policy-languages.md), and `control`.
package guest

import (
	"kvasir"
	"unsafe"
)

// Lists of the host are allocated here, from cabi_realloc to the end of the call that they are for. The collector does
// not move memory, and sees it here.
var (
	lists [][]uint64
	used  uintptr // bytes of the last of lists
)

// A first list for one call: a question about 64 instances has 600 bytes.
const firstBytes = 16 << 10

// What is kept from call to call: a full batch of events has 74 KB.
const keptBytes = 1 << 20

//go:wasmexport cabi_realloc
func realloc(old unsafe.Pointer, oldSize, align, size uint32) uint32 {
	if size == 0 {
		return align
	}
	memory := allocate(uintptr(size))
	copy(unsafe.Slice((*byte)(memory), size), unsafe.Slice((*byte)(old), oldSize))
	return uint32(uintptr(memory))
}

// allocate returns memory aligned to 8, as much as any type of the contract wants.
func allocate(size uintptr) unsafe.Pointer {
	size = (size + 7) &^ 7
	if n := len(lists); n == 0 || uintptr(len(lists[n-1]))*8-used < size {
		bytes := max(size, firstBytes)
		if n > 0 {
			bytes = max(bytes, 2*uintptr(len(lists[n-1]))*8)
		}
		lists = append(lists, make([]uint64, bytes/8))
		used = 0
	}
	at := &lists[len(lists)-1][used/8]
	used += size
	return unsafe.Pointer(at)
}

// Done frees the lists of a call. An export defers it, so a panic comes through here: its text goes to the log, and it
// goes on as a trap.
func Done() {
	if n := len(lists); n > 1 || n == 1 && len(lists[0])*8 > keptBytes {
		last := lists[n-1]
		clear(lists)
		lists = lists[:0]
		if len(last)*8 <= keptBytes {
			lists = append(lists, last)
		}
	}
	used = 0
	if reason := recover(); reason != nil {
		kvasir.Log(kvasir.Error, text(reason))
		panic(reason)
	}
}

func text(reason any) string {
	switch reason := reason.(type) {
	case error:
		return reason.Error()
	case string:
		return reason
	default:
		return "panic"
	}
}

// Words is a list of the host.
func Words(at unsafe.Pointer, length uint32) []uint32 {
	return unsafe.Slice((*uint32)(at), length)
}

// Floats is a list of the host.
func Floats(at unsafe.Pointer, length uint32) []float32 {
	return unsafe.Slice((*float32)(at), length)
}

// Bytes is a list of the host.
func Bytes(at unsafe.Pointer, length uint32) []byte {
	return unsafe.Slice((*byte)(at), length)
}

// span is a list or a string in memory.
type span struct{ at, length uint32 }

// An answer stays here until the next call; kept holds what the collector would not see there.
var (
	answer span
	kept   any
)

// List is the address of an answer that is a list.
func List[T any](list []T) unsafe.Pointer {
	kept = unsafe.SliceData(list)
	answer = span{uint32(uintptr(unsafe.Pointer(unsafe.SliceData(list)))), uint32(len(list))}
	return unsafe.Pointer(&answer)
}
