#!/bin/sh
# new-user.sh LANGUAGE [SLOT]...: from nothing to a policy that serves, as somebody goes who has the binary and its README, in a
# folder outside the repository. Without slots: all four.
# KVASIR names the binary; the tools of the language are on the PATH.
set -eu
[ $# -ge 1 ] || { echo "usage: $0 LANGUAGE [SLOT]..." >&2; exit 2; }
language=$1
shift
[ $# -gt 0 ] || set -- scheduler evictor admitter balancer
kvasir=${KVASIR:-kvasir}
work=$(mktemp -d)
host=
trap 'if [ -n "$host" ]; then kill "$host" || true; wait "$host" || true; fi; rm -rf "$work"' EXIT

step() {
  echo "\$ $*"
  "$@"
}

# The command must fail, and say this.
refused() {
  said=$1
  shift
  echo "\$ $*   # is refused"
  if "$@" >"$work/said" 2>&1; then
    echo "it was not refused" >&2
    exit 1
  fi
  grep -q "$said" "$work/said" || { echo "it does not say: $said" >&2; cat "$work/said" >&2; exit 1; }
}

own_test() {
  case $language in
    c) cc -I./sdk/c test.c -o test && ./test ;;
    rust) cargo test --quiet ;;
    python) PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=./sdk/python python3 -m unittest --quiet ;;
    *) node --test >"$work/said" || { cat "$work/said" >&2; exit 1; } ;;
  esac
}

source_file() {
  case $language in
    rust) echo src/lib.rs ;;
    c) echo policy.c ;;
    assemblyscript) echo policy.ts ;;
    javascript) echo policy.js ;;
    *) echo "policy.$language" ;;
  esac
}

memory=16MiB
[ "$language" != python ] || memory=32MiB
"$kvasir" serve --json --set "node.data_dir=$work/data" --set store.pool_bytes=4MiB --set listen.http=127.0.0.1:0 \
  --set listen.data=127.0.0.1:0 --set "policy.memory_bytes=$memory" >"$work/host.json" 2>"$work/host.log" &
host=$!
until grep -q control "$work/host.json"; do
  kill -0 "$host" || { cat "$work/host.log" >&2; exit 1; }
  sleep 0.1
done
KVASIR_GRPC=unix:$(sed -n 's/.*"control":"\([^"]*\)".*/\1/p' "$work/host.json")
export KVASIR_GRPC

mkdir "$work/my policies"
for slot; do
  cd "$work/my policies"
  step "$kvasir" policy new --lang "$language" --slot "$slot" "new-$slot"
  cd "new-$slot"
  own_test
  step "$kvasir" policy build
  step "$kvasir" policy check
  step "$kvasir" policy load "$slot" "./new-$slot.wasm"
  "$kvasir" policy list --json | grep -q "\"name\":\"new-$slot\""
  step "$kvasir" policy rollback "$slot"
  if "$kvasir" policy list --json | grep -q "\"name\":\"new-$slot\""; then
    echo "new-$slot still serves after its rollback" >&2
    exit 1
  fi
done

echo ')' >>"$(source_file)"
refused "$(source_file).*[0-9]" "$kvasir" policy build
refused "there is something in" "$kvasir" policy new --lang "$language" --slot "$slot" "new-$slot" --dir .
echo "$language: all steps done"
