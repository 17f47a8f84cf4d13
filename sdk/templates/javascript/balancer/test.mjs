// node --test: the policy runs as it is, called as a host would.
import assert from "node:assert";
import test from "node:test";
import { balancing, control } from "./policy.js";

test("answers uneven queues", () => {
  const tick = (...queues) => balancing.tick(0, [0, 0, 0], queues, [0]);
  control.configure([["even", "8"]]);
  assert.deepEqual(tick(10, 10, 10), [8]);
  assert.deepEqual(tick(1, 1, 100), [1.5]);
  assert.deepEqual(tick(5, 20, -1), [8]); // 20 is less than twice 12.5
  assert.deepEqual(tick(-1, -1, -1), []);
});

test("checks its settings", () => {
  const thrown = (pair) => {
    try {
      control.configure([pair]);
    } catch (text) {
      return text;
    }
  };
  assert.equal(thrown(["even", "0.5"]), "even: a number from 1 to 1000");
  assert.equal(thrown(["odd", "1"]), "unknown setting: odd");
});
