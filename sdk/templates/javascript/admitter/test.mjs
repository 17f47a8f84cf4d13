// node --test: the policy runs as it is, called as a host would.
import assert from "node:assert";
import test from "node:test";
import { Store } from "../../../js/kvasir.js";
import { admission, control } from "./policy.js";

const bits = (value) => new Uint32Array(Float32Array.of(value).buffer)[0];
const refusal = (reason) => 1000 * 2 ** 32 + (reason << 8) + 2;

function admit(ttft, tbt, hints = 0) {
  const request = [0, 0, 0, 0, 0, hints, 0, 0, 0, 0, bits(200), bits(50), 0, 0, 0, 0, 0, 0];
  return admission.admitRequest(request, [ttft, tbt, 0, 0, 0, 0, 0]);
}

test("refuses what misses its SLO", () => {
  control.configure([]);
  assert.equal(admit(200, 50), 0);
  assert.equal(admit(201, 50), refusal(1));
  assert.equal(admit(200, 51), refusal(2));
  assert.equal(admit(201, 51, 1), 0);
  control.configure([["slack", "1.5"]]);
  assert.equal(admit(300, 75), 0);
});

test("stores blocks used often enough", () => {
  control.configure([["min-uses", "3"]]);
  const blocks = [2 << 16, 0, 1, 0, 0, 77, 3 << 16, 0, 1, 0, 0, 77]; // records of 6 words
  assert.deepEqual(admission.admitBlocks(3, 6, blocks), [Store.skip, Store.store]);
});

test("checks its settings", () => {
  const thrown = (pair) => {
    try {
      control.configure([pair]);
    } catch (text) {
      return text;
    }
  };
  assert.equal(thrown(["slack", "x"]), "slack: a number from 0.1 to 100");
  assert.equal(thrown(["min-uses", "-1"]), "min-uses: a number from 0 to 1000");
  assert.equal(thrown(["slak", "1"]), "unknown setting: slak");
});
