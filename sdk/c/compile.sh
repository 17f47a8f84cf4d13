#!/bin/sh
# compile.sh DIR OUT.wasm: compiles DIR/policy.c (or policy.cpp) to a core module, of which `kvasir policy build` makes a component.
# Needs clang and wasm-ld (Debian: clang lld). CC, CXX and WASM_LD may be set.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 DIR OUT.wasm" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
trap 'rm -f "$2.o"' EXIT
compile() { "$@" --target=wasm32 -O3 -mbulk-memory -msimd128 -ffreestanding -Wall -Wextra -I"$here" -c -o "$out.o" "$source"; }
out=$2
source=$1/policy.c
if [ -e "$source" ]; then
  # shellcheck disable=SC2086
  compile ${CC:-clang} -std=c11 -Werror=implicit-function-declaration
else
  source=$1/policy.cpp
  # shellcheck disable=SC2086
  compile ${CXX:-clang++} -std=c++17 -fno-exceptions -fno-rtti
fi
# Not through clang, which would run any wasm-opt on the PATH, and an older one refuses SIMD.
"${WASM_LD:-wasm-ld}" --no-entry --stack-first -z stack-size=65536 --strip-all -o "$out" "$out.o"
