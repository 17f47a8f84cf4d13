#!/bin/sh
# build.sh DIR OUT.wasm: as compile.sh, which makes the whole component here.
exec "$(dirname "$0")/compile.sh" "$@"
