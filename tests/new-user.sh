#!/bin/sh
# new-user.sh LANGUAGE [SLOT]...: from nothing to a policy that serves, as somebody goes who has the binary and its README, in a
# folder outside the repository. Without slots: all four.
# KVASIR names the binary; the tools of the language are on the PATH.
set -eu
[ $# -ge 1 ] || { echo "usage: $0 LANGUAGE [SLOT]..." >&2; exit 2; }
language=$1
shift
[ $# -gt 0 ] || set -- scheduler evictor admitter balancer
kvasir=$(command -v "${KVASIR:-kvasir}") || { echo "no kvasir; name it by the variable KVASIR" >&2; exit 2; }
work=$(mktemp -d)
host=
trap 'if [ -n "$host" ]; then kill "$host" 2>/dev/null || true; wait "$host" || true; fi; rm -rf "$work"' EXIT

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
    c++) c++ -std=c++17 -I./sdk/c test.cpp -o test && ./test ;;
    # Node runs types since 22.18.
    typescript) [ "$(node -p 'Boolean(process.features.typescript)')" = false ] || node --test ;;
    rust) cargo test --quiet ;;
    zig) python-zig test --dep kvasir -Mroot=test.zig -Mkvasir=./sdk/zig/kvasir.zig ;;
    go) go test ;;
    python) PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=./sdk/python python3 -m unittest --quiet ;;
    *) node --test >"$work/said" || { cat "$work/said" >&2; exit 1; } ;;
  esac
}

# Whether the new policy of a slot serves, whatever is on trial.
serves() {
  "$kvasir" policy list | grep -q "^ *$1  *active  *new-$1 "
}

source_file() {
  case $language in
    rust) echo src/lib.rs ;;
    c) echo policy.c ;;
    c++) echo policy.cpp ;;
    typescript) echo policy.ts ;;
    assemblyscript) echo policy.ts ;;
    javascript) echo policy.js ;;
    python) echo policy.py ;;
    *) echo "policy.$language" ;;
  esac
}

# As the manifests of the templates say.
memory=16MiB
deadline=5ms
case $language in
  javascript | typescript) deadline=100ms ;;
  python) memory=32MiB deadline=100ms ;;
esac
"$kvasir" serve --json --set "node.data_dir=$work/data" --set store.pool_bytes=4MiB --set listen.http=127.0.0.1:0 \
  --set listen.data=127.0.0.1:0 --set "policy.memory_bytes=$memory" --set "policy.hot_deadline=$deadline" \
  >"$work/host.json" 2>"$work/host.log" &
host=$!
until grep -q control "$work/host.json"; do
  kill -0 "$host" || { cat "$work/host.log" >&2; exit 1; }
  sleep 0.1
done
KVASIR_GRPC=unix:$(sed -n 's/.*"control":"\([^"]*\)".*/\1/p' "$work/host.json")
export KVASIR_GRPC

"$kvasir" trace generate --requests 300 --output "$work/trace.jsonl.gz"
mkdir "$work/my policies"
for slot; do
  cd "$work/my policies"
  step "$kvasir" policy new --lang "$language" --slot "$slot" "new-$slot"
  cd "new-$slot"
  own_test
  step "$kvasir" policy build
  step "$kvasir" policy check --write-vectors
  step "$kvasir" policy bench "./new-$slot.wasm" --smoke
  step "$kvasir" policy replay "./new-$slot.wasm" --trace "$work/trace.jsonl.gz" --against current
  [ -s "$work/release.key" ] || step "$kvasir" policy trust keygen "$work/release"
  step "$kvasir" policy sign "./new-$slot.wasm" --key "$work/release.key"
  step "$kvasir" policy verify "./new-$slot.wasm" --key "$work/release.pub"
  step "$kvasir" policy load "$slot" "./new-$slot.wasm" --shadow
  ! serves "$slot" || { echo "new-$slot serves while it is only on trial" >&2; exit 1; }
  step "$kvasir" policy status "$slot"
  step "$kvasir" policy promote "$slot"
  serves "$slot" || { echo "new-$slot does not serve after its promotion" >&2; exit 1; }
  step "$kvasir" policy rollback "$slot"
  ! serves "$slot" || { echo "new-$slot still serves after its rollback" >&2; exit 1; }
  step "$kvasir" policy history "$slot"
done

step "$kvasir" policy check
[ -s vectors/seed-1.jsonl ] || { echo "no answers were recorded" >&2; exit 1; }

echo ')' >>"$(source_file)"
refused "$(source_file).*[0-9]" "$kvasir" policy build
refused "there is something in" "$kvasir" policy new --lang "$language" --slot "$slot" "new-$slot" --dir .
echo "$language: all steps done"
