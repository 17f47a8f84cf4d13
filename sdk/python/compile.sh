#!/bin/sh
# compile.sh DIR OUT.wasm: makes a component of DIR/policy.py that imports no WASI.
# Needs componentize-py (PyPI). COMPONENTIZE_PY and KVASIR_WIT (folder of the contract) may be set.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 DIR OUT.wasm" >&2; exit 2; }
sdk=$(cd "$(dirname "$0")/.." && pwd)
bases=$(sed -n 's/^class Policy(\(.*\)).*/\1/p' "$1/policy.py")
world=$(echo "$bases" | sed -n 's/.*\(Scheduler\|Evictor\|Admitter\|Balancer\).*/\1/p' | tr 'SEAB' 'seab')
[ -n "$world" ] || { echo "$1/policy.py has no class Policy(Scheduler), (Evictor), (Admitter) or (Balancer)" >&2; exit 1; }
case $bases in *Learner*) world=learning-$world ;; esac
# WASI is replaced by stubs: no file, no clock, no randomness; the hash seed is fixed.
PYTHONHASHSEED=0 ${COMPONENTIZE_PY:-componentize-py} --quiet -d "${KVASIR_WIT:-$sdk/wit}" -w "$world" \
  componentize kvasir_component --stub-wasi -p "$1" -p "$sdk/python" -o "$2"
