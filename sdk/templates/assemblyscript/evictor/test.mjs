// node --test: the policy's core module runs in Node, called as a host would.
import assert from "node:assert";
import test from "node:test";
import { load } from "../../../assemblyscript/testing.mjs";

const [INSERT, HIT, REMOVE, KEEP, PIN, UNPIN] = [1, 2, 3, 4, 5, 6];
const NONE = 2 ** 32 - 1, WORDS = 10; // one word more than documented, as a later host may send

test("evicts the block used longest ago, leaves first", () => {
  const policy = load(import.meta.dirname);
  const event = (kind, slot, parent) =>
    policy.call("eviction__on_events", 0n, [kind, slot, parent, 0, 1 << 20, 0, 0, 0, 0, 77]);
  const victims = (want) => policy.list(policy.call("eviction__select_victims", 0n, want));
  policy.call("eviction__open", [4, WORDS, 7]);
  assert.deepEqual(victims(1), []);
  event(INSERT, 0, NONE); // a prompt of two blocks, 0 and 1, and another, 2
  event(INSERT, 1, 0);
  event(INSERT, 2, NONE);
  event(HIT, 0, 1);
  event(HIT, 1, 1);
  assert.deepEqual(victims(1), [2]); // used longest ago
  event(KEEP, 2, 0);
  assert.deepEqual(victims(1), [1]); // the leaf before its parent
  event(PIN, 0, 0);
  event(HIT, 0, 1);
  assert.deepEqual(victims(2), [2]);
  event(UNPIN, 0, 0);
  event(99, 3, 0); // a kind of a later host
  event(INSERT, 3, NONE);
  event(REMOVE, 3, 0);
  assert.deepEqual(victims(2), [0]);
});
