// node --test: the policy runs as it is, called as a host would.
import assert from "node:assert";
import test from "node:test";
import { NONE, Reason } from "../../../js/kvasir.js";
import { scheduling } from "./policy.js";

const PREFILL = 20, DECODE = 22, WORDS = 20; // one more than documented each, as a later host may send

test("goes where the first token comes soonest", () => {
  const row = (width, ...values) => Array.from({ length: width }, (_, i) => values[i] ?? 0);
  const prefill = (slot, available, busy) => scheduling.updatePrefill(row(PREFILL, slot, available, busy, 10, 0.125));
  const decode = (slot, available, sequences) => scheduling.updateDecode(row(DECODE, slot, available, sequences));
  const request = (columns, ...values) => [1000, ...Array(17).fill(0), columns, 0, ...values];
  // 1,000 tokens; columns 0 (prefix) and 3 (which prefill can serve it).
  const schedule = (...values) => scheduling.schedule(50, request(0b1001, ...values));
  const chosen = (...values) => [schedule(...values).prefill, schedule(...values).decode];

  scheduling.open([2, 2, 16, PREFILL, DECODE, WORDS, 1, 6, 7, 99]);
  assert.equal(schedule(0, 0, 1, 1).prefill >>> 0, NONE);
  assert.equal(schedule(0, 0, 1, 1).reason, Reason.noInstance);
  prefill(0, 1, 0), prefill(1, 1, 100);
  decode(0, 1, 5), decode(1, 1, 4);
  assert.deepEqual(chosen(0, 0, 1, 1), [0, 1]);
  assert.deepEqual(chosen(0, 50, 1, 1), [1, 1]); // 100 ms of prefill saved, 50 of waiting
  assert.deepEqual(chosen(0, 50, 1, 0), [0, 1]); // 1 cannot serve it
  decode(1, 0, 4);
  assert.deepEqual(chosen(0, 0, 1, 1), [0, 0]);
  assert.deepEqual(scheduling.explain(50, request(0)), [135, 185]);
});
