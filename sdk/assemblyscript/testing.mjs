// Runs a policy's core module in Node, without a host: for the tests of AssemblyScript policies.
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

/** Compiles `folder`/policy.ts and returns its functions, called as `policy.call("eviction__open", [4, 9])`. */
export function load(folder) {
  const target = mkdtempSync(join(tmpdir(), "kvasir-"));
  try {
    const module = join(target, "policy.wasm");
    execFileSync(fileURLToPath(new URL("compile.sh", import.meta.url)), [folder, module], { stdio: "inherit" });
    return new Policy(new WebAssembly.Module(readFileSync(module)));
  } finally {
    rmSync(target, { recursive: true });
  }
}

class Policy {
  constructor(module) {
    const log = (level, at, length) => console.error(`log ${level}: ${this.text(at, length)}`);
    this.exports = new WebAssembly.Instance(module, { "kvasir:policy/log@0.1.0": { log } }).exports;
  }

  /** An array of integers is passed as a list of `u32`, a Float32Array as a list of `f32`. */
  call(name, ...args) {
    const list = (a) => (Array.isArray(a) ? Uint32Array.from(a) : a);
    const lower = (a) => (typeof a === "object" ? [this.put(new Uint8Array(list(a).buffer)), a.length] : [a]);
    return this.exports[name](...args.flatMap(lower));
  }

  /** The `u32` words at the address of an answer. */
  words(at, count) {
    return [...new Uint32Array(this.exports.memory.buffer, at, count)];
  }

  /** An answer that is a list of `u32`. */
  list(at) {
    return this.words(...this.words(at, 2));
  }

  /** An answer that is a list of `f32`. */
  floats(at) {
    const [from, count] = this.words(at, 2);
    return [...new Float32Array(this.exports.memory.buffer, from, count)];
  }

  /** Calls `configure`; returns null, or the text of the refusal. */
  configure(settings) {
    const pairs = Object.entries(settings).flat().map((text) => new TextEncoder().encode(text));
    const words = Uint32Array.from(pairs.flatMap((bytes) => [this.put(bytes), bytes.length]));
    const at = this.exports.control__configure(this.put(new Uint8Array(words.buffer)), pairs.length / 2);
    const [failed, from, length] = this.words(at, 3);
    return failed ? this.text(from, length) : null;
  }

  text(at, length) {
    return new TextDecoder().decode(new Uint8Array(this.exports.memory.buffer, at, length));
  }

  put(bytes) {
    const at = this.exports.cabi_realloc(0, 0, 4, bytes.length);
    new Uint8Array(this.exports.memory.buffer, at, bytes.length).set(bytes);
    return at;
  }
}
