#!/bin/sh
# build.sh DIR OUT.wasm: bundles DIR/policy.js (or policy.ts) and compiles it to a component that imports no WASI.
# Needs esbuild and componentize-js (npm: esbuild, @bytecodealliance/componentize-js).
# ESBUILD, COMPONENTIZE_JS and KVASIR_WIT (folder of the contract) may be set.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 DIR OUT.wasm" >&2; exit 2; }
sdk=$(cd "$(dirname "$0")/.." && pwd)
source=$1/policy.js
[ -e "$source" ] || source=$1/policy.ts
bundle=$2.bundle.js
trap 'rm -f "$bundle"' EXIT
${ESBUILD:-esbuild} "$source" --bundle --format=esm --external:kvasir:policy/* --log-level=warning --outfile="$bundle"
for world in scheduler evictor admitter balancer ''; do
  case $world in
    scheduler) interface=scheduling ;; evictor) interface=eviction ;; admitter) interface=admission ;; balancer) interface=balancing ;;
    *) echo "$source exports none of scheduling, eviction, admission, balancing" >&2; exit 1 ;;
  esac
  # esbuild puts all exports into one list, one a line.
  if grep -Eq "^  ([a-zA-Z0-9_]+ as )?$interface,?\$" "$bundle"; then break; fi
done
if grep -Eq "^  ([a-zA-Z0-9_]+ as )?learning,?\$" "$bundle"; then world=learning-$world; fi
# Without these features there is no clock, no randomness but a fixed sequence, and nothing to read or write.
${COMPONENTIZE_JS:-componentize-js} "$bundle" --wit "${KVASIR_WIT:-$sdk/wit}" --world-name "$world" \
  --disable stdio random clocks http fetch-event --out "$2"
