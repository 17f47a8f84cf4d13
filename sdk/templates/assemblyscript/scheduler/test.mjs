// node --test: the policy's core module runs in Node, called as a host would.
import assert from "node:assert";
import test from "node:test";
import { load } from "../../../assemblyscript/testing.mjs";

// One more than documented each, as a later host may send.
const PREFILL = 20, DECODE = 22, WORDS = 20;
const NONE = 2 ** 32 - 1, NO_INSTANCE = 3;

test("goes where the first token comes soonest", () => {
  const policy = load(import.meta.dirname);
  const row = (width, ...values) => Float32Array.from({ length: width }, (_, i) => values[i] ?? 0);
  const prefill = (slot, available, busy) =>
    policy.call("scheduling__update_prefill", row(PREFILL, slot, available, busy, 10, 0.1));
  const decode = (slot, available, sequences) =>
    policy.call("scheduling__update_decode", row(DECODE, slot, available, sequences));
  const request = (columns, ...values) => [1000, ...Array(17).fill(0), columns, 0, ...values];
  // 1,000 tokens; columns 0 (prefix) and 3 (which prefill can serve it).
  const schedule = (...values) => policy.words(policy.call("scheduling__schedule", 50, request(0b1001, ...values)), 5);
  const chosen = (...values) => schedule(...values).slice(0, 2);

  policy.call("scheduling__open", [2, 2, 16, PREFILL, DECODE, WORDS, 1, 6, 7, 99]);
  assert.deepEqual(schedule(0, 0, 1, 1), [NONE, 0, 0, 0, NO_INSTANCE]);
  prefill(0, 1, 0), prefill(1, 1, 100);
  decode(0, 1, 5), decode(1, 1, 4);
  assert.deepEqual(chosen(0, 0, 1, 1), [0, 1]);
  assert.deepEqual(chosen(0, 50, 1, 1), [1, 1]); // 80 ms of prefill saved, 50 of waiting
  assert.deepEqual(chosen(0, 50, 1, 0), [0, 1]); // 1 cannot serve it
  decode(1, 0, 4);
  assert.deepEqual(chosen(0, 0, 1, 1), [0, 0]);
  assert.deepEqual(policy.floats(policy.call("scheduling__explain", 50, request(0))), [110, 160]);
});
