#!/bin/sh
# componentize.sh [--stub-wasi] CORE.wasm OUT.wasm: wraps a core module that exports the functions of one slot by
# their canonical names (docs/policy-languages.md) as a component. The exports tell which world it is.
# --stub-wasi: what the module imports of WASI preview 1 is answered by wasi-stub.wat, which grants nothing.
# WASM_TOOLS and KVASIR_WIT (folder of the contract) may be set.
set -eu
sdk=$(cd "$(dirname "$0")" && pwd)
stub=
[ "${1-}" != --stub-wasi ] || { stub=$sdk/wasi-stub.wat; shift; }
[ $# -eq 2 ] || { echo "usage: $0 [--stub-wasi] CORE.wasm OUT.wasm" >&2; exit 2; }
wit=${KVASIR_WIT:-$sdk/wit}
tools=${WASM_TOOLS:-wasm-tools}
exports() { LC_ALL=C grep -aq "kvasir:policy/$1@" "$core"; }
core=$1
world=
if exports scheduling; then world=scheduler
elif exports eviction; then world=evictor
elif exports admission; then world=admitter
elif exports balancing; then world=balancer
else
  echo "$1 exports no function of a slot, as kvasir:policy/eviction@0.1.0#open would be" >&2
  exit 1
fi
if exports learning; then world=learning-$world; fi
trap 'rm -f "$2.embedded"' EXIT
"$tools" component embed "$wit" --world "$world" "$core" -o "$2.embedded"
"$tools" component new "$2.embedded" ${stub:+--adapt wasi_snapshot_preview1="$stub"} -o "$2"
