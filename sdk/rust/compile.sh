#!/bin/sh
# compile.sh DIR OUT.wasm: compiles the policy crate in DIR to a core module, of which `kvasir policy build` makes a component.
# Needs cargo with the target wasm32-unknown-unknown (rustup target add wasm32-unknown-unknown). CARGO and CARGO_TARGET_DIR may
# be set.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 DIR OUT.wasm" >&2; exit 2; }
target=${CARGO_TARGET_DIR:-$1/target}
# The component type lies in the module: wit-bindgen left it there.
RUSTFLAGS="-C target-feature=+simd128" "${CARGO:-cargo}" build --quiet --release --lib --target wasm32-unknown-unknown \
  --manifest-path "$1/Cargo.toml" --target-dir "$target"
name=$(sed -n 's/^name = "\(.*\)"$/\1/p' "$1/Cargo.toml" | head -n 1 | tr - _)
cp "$target/wasm32-unknown-unknown/release/$name.wasm" "$2"
