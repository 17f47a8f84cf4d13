// node --test: the policy runs as it is, called as a host would.
import assert from "node:assert";
import test from "node:test";
import { Kind, NONE } from "../../../js/kvasir.js";
import { eviction } from "./policy.js";

const WORDS = 10; // one more than documented, as a later host may send

test("evicts the block used longest ago, leaves first", () => {
  const event = (kind, slot, parent = 1) =>
    eviction.onEvents(0, [kind, slot, parent, 0, 1 << 20, 0, 0, 0, 0, 77]);
  const victims = (want) => eviction.selectVictims(0, want);
  eviction.open([4, WORDS, 7]);
  assert.deepEqual(victims(1), []);
  event(Kind.insert, 0, NONE); // a prompt of two blocks, 0 and 1, and another, 2
  event(Kind.insert, 1, 0);
  event(Kind.insert, 2, NONE);
  event(Kind.hit, 0);
  event(Kind.hit, 1);
  assert.deepEqual(victims(1), [2]); // used longest ago
  event(Kind.keep, 2);
  assert.deepEqual(victims(1), [1]); // the leaf before its parent
  event(Kind.pin, 0);
  event(Kind.hit, 0);
  assert.deepEqual(victims(2), [2]);
  event(Kind.unpin, 0);
  event(99, 3); // a kind of a later host
  event(Kind.insert, 3, NONE);
  event(Kind.remove, 3);
  assert.deepEqual(victims(2), [0]);
});
