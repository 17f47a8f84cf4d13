// What the policies of every slot share: a description, settings, state, the log, and views of the
// host's lists. What each call means stands in the WIT text (sdk/wit).

/** No slot, no parent, never. */
export const NONE: u32 = u32.MAX_VALUE;

/** One setting; `value` is its default, as text. */
export class Setting {
  constructor(public name: string, public value: string, public doc: string) {}
}

export class Description {
  constructor(public name: string, public version: string, public settings: Setting[] = []) {}
}

/** What a policy of any slot may say and take. */
export abstract class Policy {
  abstract describe(): Description;
  /** Gets every setting once: the operator's value, or the default. Returns null, or the text of a refusal. */
  configure(name: string, value: string): string | null {
    return null;
  }
  exportState(): Uint8Array {
    return new Uint8Array(0);
  }
  /** Returns null, or why the state cannot be used. */
  importState(state: Uint8Array): string | null {
    return "this policy keeps no state";
  }
}

/** A list of `u32` that the host passed: valid during the call only. */
export class Words {
  at: usize = 0;
  length: u32 = 0;
  @inline @operator("[]") get(i: u32): u32 {
    return load<u32>(this.at + (<usize>i << 2));
  }
  /** The float whose bits stand in word `i`. */
  @inline float(i: u32): f32 {
    return load<f32>(this.at + (<usize>i << 2));
  }
  /** The `u64` in words `i` and `i + 1`. */
  @inline long(i: u32): u64 {
    return <u64>this[i] | (<u64>this[i + 1] << 32);
  }
  of(at: usize, length: u32): Words {
    this.at = at;
    this.length = length;
    return this;
  }
}

/** A list of `f32` that the host passed: valid during the call only. */
export class Floats {
  at: usize = 0;
  length: u32 = 0;
  @inline @operator("[]") get(i: u32): f32 {
    return load<f32>(this.at + (<usize>i << 2));
  }
  of(at: usize, length: u32): Floats {
    this.at = at;
    this.length = length;
    return this;
  }
}

/** Rows of `f32` that the host passed: valid during the call only. */
export class Rows {
  count: u32 = 0;
  private values: usize = 0;
  private width: u32 = 0;
  @inline at(row: u32, column: u32): f32 {
    return load<f32>(this.values + (<usize>(row * this.width + column) << 2));
  }
  of(values: usize, length: u32, width: u32): Rows {
    this.values = values;
    this.width = width;
    this.count = width ? length / width : 0;
    return this;
  }
}

/** A setting's value such as `12` or `-0.25`; NaN if the text is no number or outside `low` to `high`. */
export function number(text: string, low: f64, high: f64): f64 {
  for (let i = 0; i < text.length; i++) {
    const c = text.charCodeAt(i);
    if ((c < 0x30 || c > 0x39) && c != 0x2e && !(c == 0x2d && i == 0)) return NaN;
  }
  const value = parseFloat(text);
  return value >= low && value <= high ? value : NaN;
}

// @ts-ignore: the decorator is AssemblyScript's
@external("kvasir:policy/log@0.1.0", "log")
declare function hostLog(level: u32, text: usize, length: usize): void;

/** Level: 1 error, 2 warning, 3 information, 4 debug. */
export function log(level: u32, message: string): void {
  const text = String.UTF8.encode(message);
  hostLog(level, changetype<usize>(text), text.byteLength);
}
