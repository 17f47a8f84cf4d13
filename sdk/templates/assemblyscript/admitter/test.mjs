// node --test: the policy's core module runs in Node, called as a host would.
import assert from "node:assert";
import test from "node:test";
import { load } from "../../../assemblyscript/testing.mjs";

const bits = (value) => new Uint32Array(Float32Array.of(value).buffer)[0];
const refusal = (reason) => (1000n << 32n) | BigInt(reason << 8) | 2n;

test("refuses what misses its SLO", () => {
  const policy = load(import.meta.dirname);
  const admit = (ttft, tbt, hints) => {
    const request = [0, 0, 0, 0, 0, hints, 0, 0, 0, 0, bits(200), bits(50), 0, 0, 0, 0, 0, 0];
    return policy.call("admission__admit_request", request, Float32Array.of(ttft, tbt, 0, 0, 0, 0, 0));
  };
  assert.equal(policy.configure({ slack: "1x" }), "slack: a number from 0.1 to 100");
  assert.equal(policy.configure({ slak: "1" }), "unknown setting: slak");
  assert.equal(policy.configure({ "min-uses": "3" }), null);
  assert.equal(admit(200, 50, 0), 0n);
  assert.equal(admit(201, 50, 0), refusal(1));
  assert.equal(admit(200, 51, 0), refusal(2));
  assert.equal(admit(201, 51, 1), 0n);
  const blocks = [2 << 16, 0, 1, 0, 0, 77, 3 << 16, 0, 1, 0, 0, 77]; // records of 6 words
  assert.deepEqual(policy.list(policy.call("admission__admit_blocks", 3, 6, blocks)), [0, 1]);
  assert.equal(policy.configure({ slack: "1.5" }), null);
  assert.equal(admit(300, 75, 0), 0n);
});
