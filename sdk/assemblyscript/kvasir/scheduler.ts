// A scheduler: what `scheduling` in sdk/wit/scheduler.wit says, as a class to extend.
import { Floats, NONE, Policy, Rows, Words } from "./policy";
import { setPolicy, setSlot } from "./exports/control";
export * from "./policy";

/** Columns of `prefill`. */
export const enum P {
  Slot, Available, BusyUntil, C0, C1, C2, T0, T1, Queued, FreeBlocks, Capacity, ReportedAt, Identity, Peer, Host, Domain,
  Waiting, Adapters, AdaptersMax, Send,
}
/** Columns of `decode`. */
export const enum D {
  Slot, Available, Sequences, Context, FreeBlocks, Capacity, D0, D1, D2, Coming, ComingContext, ReportedAt, Identity, Peer,
  Host, Domain, Waiting, T0, T1, Adapters, AdaptersMax,
}
/** Words of a request; Session, Seed and the memos are `long`, the SLOs `float`. */
export const enum R {
  PromptTokens, OutputTokens, Class, Tenant, Priority, Hints, Session, Seed = 8, TtftSlo = 10, TbtSlo, Model, Adapter,
  SessionMemo, TenantMemo = 16, Columns = 18,
}
/** Columns of a request. */
export const enum Column {
  Prefix, PrefixHbm, PrefixDram, PrefillFit, DecodePrefix, DecodeFit, PrefillScore, DecodeScore, DecodePrefixHbm,
  DecodePrefixDram,
}
const OF_DECODE: u32 =
  (1 << Column.DecodePrefix) | (1 << Column.DecodeFit) | (1 << Column.DecodeScore) | (1 << Column.DecodePrefixHbm) |
  (1 << Column.DecodePrefixDram);
/** Reasons of a rejection. */
export const enum Reason { Ttft = 1, Tbt, NoInstance, NoMemory, Own }

/** One of the two tables, kept as the host pushes it. */
export class Table {
  slots: u32 = 0;
  width: u32 = 0;
  rows: StaticArray<f32> = new StaticArray<f32>(0);
  @inline at(slot: u32, column: u32): f32 {
    return this.rows[slot * this.width + column];
  }
  open(slots: u32, width: u32): void {
    this.slots = slots;
    this.width = width;
    this.rows = new StaticArray<f32>(slots * width);
  }
  update(rows: usize, length: u32): void {
    for (let left = length; this.width && left >= this.width; left -= this.width) {
      const slot = load<f32>(rows), bytes = <usize>this.width << 2;
      if (slot >= 0 && slot < <f32>this.slots)
        memory.copy(changetype<usize>(this.rows) + <usize>slot * bytes, rows, bytes);
      rows += bytes;
    }
  }
}

export const prefill = new Table(), decode = new Table();
/** Kept from `open`: tokens in one block, words of a request, domains of the network, run of the host. */
export let blockTokens: u32 = 0, requestWords: u32 = 0, domains: u32 = 0, hostRun: u32 = 0;
export function setLayout(tokens: u32, words: u32, count: u32, run: u32): void {
  blockTokens = tokens;
  requestWords = words;
  domains = count;
  hostRun = run;
}

function slotsOf(column: u32): u32 {
  return (OF_DECODE >> column) & 1 ? decode.slots : prefill.slots;
}

/** One word per slot; empty if the request has no such column. */
export function column(request: Words, which: Column, into: Words): Words {
  const bits = request[R.Columns];
  const slots = slotsOf(which);
  if (!((bits >> which) & 1)) return into.of(0, 0);
  let start = requestWords;
  for (let bit = 0; bit < <i32>which; bit++)
    if ((bits >> bit) & 1) start += slotsOf(bit);
  return into.of(request.at + (<usize>start << 2), slots);
}

export class Decision {
  prefill: u32 = 0;
  decode: u32 = 0;
  transferBlocks: u32 = 0;
  source: u32 = 0;
  reason: u32 = 0;
  retryAfter: u32 = 0;
  sessionMemo: u64 = 0;
  tenantCharge: u64 = 0;
  static run(prefill: u32, decode: u32): Decision {
    const d = new Decision();
    d.prefill = prefill;
    d.decode = decode;
    return d;
  }
  static reject(reason: Reason, retryAfterMs: u32): Decision {
    const d = new Decision();
    d.prefill = NONE;
    d.reason = reason;
    d.retryAfter = retryAfterMs;
    return d;
  }
}

export abstract class Scheduler extends Policy {
  abstract schedule(now: f32, request: Words): Decision;
  /** One score per prefill slot, and if wanted one per decode slot behind these; smaller is better. */
  explain(now: f32, request: Words): StaticArray<f32> {
    return new StaticArray<f32>(0);
  }
  /** The tables were emptied. */
  opened(): void {}
  updateLinks(links: Rows): void {}
  setThresholds(values: Floats): void {}
}

export let scheduler: Scheduler | null = null;
/** Makes this the component's policy; call it once, at the end of policy.ts. */
export function serve(policy: Scheduler): void {
  scheduler = policy;
  setPolicy(policy);
  setSlot("scheduler");
}
