#!/bin/sh
# compile.sh DIR OUT.wasm: compiles DIR/policy.ts to a core module, of which `kvasir policy build` makes a component. Its exports
# have the names that AssemblyScript can express: eviction__on_events.
# Needs asc (npm: assemblyscript), on the PATH or from `npm install` in this folder; ASC may be set.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 DIR OUT.wasm" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
out=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
PATH=$here/node_modules/.bin:$PATH
cd "$1"
# The collector is needed by policies that allocate in calls; `abort` becomes a trap.
exec ${ASC:-asc} policy.ts --path "$here" -O3 --noAssert --runtime incremental --use abort= --enable simd -o "$out"
