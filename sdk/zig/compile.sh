#!/bin/sh
# compile.sh DIR OUT.wasm: compiles DIR/policy.zig to a core module, of which `kvasir policy build` makes a component.
# Needs Zig 0.17 (PyPI: ziglang). ZIG may be set.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 DIR OUT.wasm" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
zig=${ZIG:-$(command -v zig || echo python-zig)} # as the package of PyPI calls it
# With safety checks: an index out of bounds or an overflow is a trap, which costs one decision.
# shellcheck disable=SC2086
$zig build-exe -target wasm32-freestanding -mcpu=generic+simd128+bulk_memory -O ReleaseSafe -fno-entry -rdynamic -fstrip \
  --stack 65536 -femit-bin="$2" \
  --dep kvasir --dep policy -Mroot="$here/component.zig" --dep kvasir -Mpolicy="$1/policy.zig" -Mkvasir="$here/kvasir.zig"
