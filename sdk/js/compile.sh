#!/bin/sh
# compile.sh DIR OUT.wasm: bundles DIR/policy.js (or policy.ts) and makes a component of it that imports no WASI.
# Needs esbuild and componentize-qjs (npm), on the PATH or from `npm install` in this folder.
# ESBUILD, COMPONENTIZE_QJS and KVASIR_WIT (folder of the contract) may be set.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 DIR OUT.wasm" >&2; exit 2; }
sdk=$(cd "$(dirname "$0")/.." && pwd)
PATH=$sdk/js/node_modules/.bin:$PATH
source=$1/policy.js
[ -e "$source" ] || source=$1/policy.ts
bundle=$2.bundle.js
log=$2.log
trap 'rm -f "$bundle" "$log"' EXIT
${ESBUILD:-esbuild} "$source" --bundle --format=esm --external:kvasir:policy/* --log-level=warning --outfile="$bundle"
# esbuild puts all exports into one list, one a line.
exports() { grep -Eq "^  ([a-zA-Z0-9_]+ as )?$1,?\$" "$bundle"; }
if exports scheduling; then world=scheduler
elif exports eviction; then world=evictor
elif exports admission; then world=admitter
elif exports balancing; then world=balancer
else
  echo "$source exports none of scheduling, eviction, admission, balancing" >&2
  exit 1
fi
if exports learning; then world=learning-$world; fi
# What the engine wants of WASI becomes a trap: no clock, no file, no randomness from outside.
${COMPONENTIZE_QJS:-componentize-qjs} --wit "${KVASIR_WIT:-$sdk/wit}" --world "$world" --js "$bundle" --stub-wasi --sync \
  --output "$2" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
