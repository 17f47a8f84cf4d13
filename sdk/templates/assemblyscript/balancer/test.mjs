// node --test: the policy's core module runs in Node, called as a host would.
import assert from "node:assert";
import test from "node:test";
import { load } from "../../../assemblyscript/testing.mjs";

test("answers uneven queues", () => {
  const policy = load(import.meta.dirname);
  const tick = (...queues) => {
    const lists = [[0, 0, 0], queues, [0]].map((list) => Float32Array.from(list));
    return policy.floats(policy.call("balancing__tick", 0n, ...lists));
  };
  assert.equal(policy.configure({ even: "0.5" }), "even: a number from 1 to 1000");
  assert.equal(policy.configure({ odd: "1" }), "unknown setting: odd");
  assert.equal(policy.configure({ even: "8" }), null);
  assert.deepEqual(tick(10, 10, 10), [8]);
  assert.deepEqual(tick(1, 1, 100), [1.5]);
  assert.deepEqual(tick(5, 20, -1), [8]); // 20 is less than twice 12.5
  assert.deepEqual(tick(-1, -1, -1), []);
});
