// What turns a policy into the exports of its slot. Each of `scheduler`, `evictor`, `admitter` and
// `balancer` takes one object: `name`, `version`, `settings` (name, value, doc), the functions of the
// slot, and, if wanted, `configure(name, value)`, `exportState()` and `importState(bytes)`. What each call
// means stands in the WIT text (sdk/wit); types are in kvasir.d.ts. Pure, so tests run it in Node.

// The engine passes lists as plain arrays, and 64 bits as a number. Of what it takes back, a `u32` over 2^31 would be cut
// down to 2^31 - 1; as the negative number with the same bits it is not.
const bits32 = (value) => value | 0;
const words32 = (list) => (list instanceof Uint32Array ? list : Uint32Array.from(list));
const floats32 = (list) => (list instanceof Float32Array ? list : Float32Array.from(list));

/** No slot, no parent, never. */
export const NONE = 0xffff_ffff;

/** Columns of the tables, and words of a request, by the numbers of the contract. */
export const P = {
  available: 1, busyUntil: 2, c0: 3, c1: 4, c2: 5, t0: 6, t1: 7, queued: 8, freeBlocks: 9, capacity: 10, reportedAt: 11,
  identity: 12, peer: 13, host: 14, domain: 15, waiting: 16, adapters: 17, adaptersMax: 18,
  send: 19,
};
export const D = {
  available: 1, sequences: 2, context: 3, freeBlocks: 4, capacity: 5, d0: 6, d1: 7, d2: 8, coming: 9, comingContext: 10,
  reportedAt: 11, identity: 12, peer: 13, host: 14, domain: 15, waiting: 16, t0: 17, t1: 18, adapters: 19,
  adaptersMax: 20,
};
const COLUMNS = [
  "prefix", "prefixHbm", "prefixDram", "prefillFit", "decodePrefix", "decodeFit", "prefillScore", "decodeScore",
  "decodePrefixHbm", "decodePrefixDram",
];
const OF_DECODE = ["decodePrefix", "decodeFit", "decodeScore", "decodePrefixHbm", "decodePrefixDram"];
/** Reasons of a rejection. */
export const Reason = { ttft: 1, tbt: 2, noInstance: 3, noMemory: 4, own: 5 };
/** Kinds of events, and where a victim's bytes go. */
export const Kind = { insert: 1, hit: 2, remove: 3, keep: 4, pin: 5, unpin: 6 };
export const Where = { hostDecides: 0, hbm: 1, nvme: 3, remote: 4, drop: 15 };
/** What happens to a block offered to a tier. */
export const Store = { skip: 0, store: 1, colder: 2 };

/** A setting's value within `low` to `high`; throws the refusal if it is none. */
export function number(name, text, low, high) {
  const value = /^-?\d+(\.\d*)?$/.test(text) ? Number(text) : NaN;
  if (!(value >= low && value <= high)) throw `${name}: a number from ${low} to ${high}`;
  return value;
}

export function scheduler(policy) {
  const cluster = { prefill: new Table(), decode: new Table(), blockTokens: 0, domains: 0, hostRun: 0 };
  let words = 0, linkValues = 5;
  const request = (now, question) => readRequest(now, words32(question), words, cluster);
  const scheduling = {
    open(layout) {
      cluster.prefill.open(layout[0], layout[3]);
      cluster.decode.open(layout[1], layout[4]);
      [cluster.blockTokens, words, cluster.domains, linkValues] = [layout[2], layout[5], layout[6], layout[7]];
      cluster.hostRun = layout[8] ?? 0;
      policy.opened?.(cluster);
    },
    updatePrefill: (rows) => cluster.prefill.update(floats32(rows)),
    updateDecode: (rows) => cluster.decode.update(floats32(rows)),
    updateLinks: (rows) => policy.updateLinks?.(split(floats32(rows), linkValues)),
    setThresholds: (values) => policy.setThresholds?.(floats32(values)),
    schedule: (now, question) => decision(policy.schedule(request(now, question), cluster)),
    explain: (now, question) => [...(policy.explain?.(request(now, question), cluster) ?? [])],
  };
  return { control: control("scheduler", policy), scheduling, learning: learning(policy) };
}

/** What the policy left out is zero; without a prefill slot it is a rejection. */
function decision({ prefill = NONE, decode = 0, transferBlocks = 0, source = 0, retryAfter = 0, ...rest }) {
  const { reason = prefill === NONE ? Reason.own : 0, sessionMemo = 0, tenantCharge = 0 } = rest;
  return {
    prefill: bits32(prefill), decode: bits32(decode), transferBlocks, source: bits32(source), reason, retryAfter, sessionMemo,
    tenantCharge,
  };
}

/** One of the two tables, kept as the host pushes it. */
class Table {
  open(slots, width) {
    [this.slots, this.width, this.rows] = [slots, width, new Float32Array(slots * width)];
  }
  update(rows) {
    for (let at = 0; at + this.width <= rows.length; at += this.width)
      if (rows[at] < this.slots) this.rows.set(rows.subarray(at, at + this.width), rows[at] * this.width);
  }
  at(slot, column) {
    return this.rows[slot * this.width + column];
  }
}

function split(values, width) {
  return Array.from({ length: values.length / width }, (_, i) => values.subarray(i * width, (i + 1) * width));
}

/** Words 0 to 17 by name; columns that the host did not send are undefined. */
function readRequest(now, question, words, cluster) {
  const request = { now, ...readWords(question) };
  let at = words;
  for (let bit = 0; bit < COLUMNS.length; bit++) {
    if (!((question[18] >> bit) & 1)) continue;
    const { slots } = OF_DECODE.includes(COLUMNS[bit]) ? cluster.decode : cluster.prefill;
    request[COLUMNS[bit]] = question.subarray(at, at + slots);
    at += slots;
  }
  return request;
}

/** Of 64 bits in two words the lower 53: all of a number below 2^53, and enough of a hash. */
const low53 = (words, i) => words[i] + (words[i + 1] & 0x1f_ffff) * 2 ** 32;

function readWords(words) {
  const view = new DataView(words.buffer, words.byteOffset);
  const float = (i) => view.getFloat32(4 * i, true), long = (i) => low53(words, i);
  return {
    promptTokens: words[0], outputTokens: words[1], class: words[2], tenant: words[3], priority: words[4], hints: words[5],
    session: long(6), seed: long(8), ttftSlo: float(10), tbtSlo: float(11), model: words[12], adapter: words[13],
    sessionMemo: long(14), tenantMemo: long(16),
  };
}

export function evictor(policy) {
  let slots = 0, words = 9, tierValues = 6;
  const eviction = {
    open(layout) {
      [slots, words, tierValues] = layout;
      policy.open(slots);
    },
    updateTiers: (rows) => policy.updateTiers?.(split(floats32(rows), tierValues)),
    onEvents(base, list) {
      const events = words32(list);
      for (let at = 0; at + words <= events.length; at += words) {
        const kind = events[at] & 255, slot = events[at + 1];
        if (kind >= Kind.insert && kind <= Kind.unpin && slot < slots) policy.onEvent(readEvent(base, events, at, kind, slot));
      }
    },
    selectVictims: (now, want) => Array.from(policy.selectVictims(want, now), bits32),
  };
  return { control: control("evictor", policy), eviction };
}

function readEvent(base, w, at, kind, slot) {
  return {
    kind, slot, replayed: ((w[at] >> 8) & 1) === 1, class: w[at] >>> 16,
    parent: w[at + 2], uses: w[at + 2], depth: w[at + 3], size: w[at + 4], time: base + w[at + 5],
    identity: low53(w, at + 6), tenant: w[at + 8],
  };
}

/** One answer of `selectVictims`. */
export function victim(slot, where = Where.hostDecides) {
  return (slot | (where << 28)) >>> 0;
}

/** Block slots in an order that the policy gives them. */
export class Order {
  /** Element `slots` is both ends; a slot that stands nowhere follows itself. */
  constructor(slots) {
    this.slots = slots;
    this.next = Uint32Array.from({ length: slots + 1 }, (_, i) => i);
    this.prev = this.next.slice();
  }
  has(slot) {
    return slot < this.slots && this.next[slot] !== slot;
  }
  first() {
    const slot = this.next[this.slots];
    return slot === this.slots ? NONE : slot;
  }
  remove(slot) {
    const next = this.next[slot], prev = this.prev[slot];
    this.next[prev] = next;
    this.prev[next] = prev;
    this.next[slot] = this.prev[slot] = slot;
  }
  /** Moves or adds `slot` in front of `at`, or last if `at` is not in the order. */
  put(slot, at) {
    if (slot === at) return;
    this.remove(slot);
    if (!this.has(at)) at = this.slots;
    const prev = this.prev[at];
    this.next[slot] = at;
    this.prev[slot] = prev;
    this.next[prev] = this.prev[at] = slot;
  }
}

/** 35 minutes, ms: more does not fit beside the answer into a number of this language. */
const RETRY_MAX = 2 ** 21 - 1;

export function admitter(policy) {
  const admission = {
    updateLoad: (values) => policy.updateLoad?.(floats32(values)),
    admitRequest(request, forecast) {
      const [ttft, tbt, tenantPart, queueMs, prefillMs, transferMs, tokensStored, handoverMs] = forecast;
      const times = { ttft, tbt, tenantPart, queueMs, prefillMs, transferMs, tokensStored, handoverMs };
      const { queue = false, reject = 0, retryAfter = 0 } = policy.admitRequest(readWords(words32(request)), times);
      const wait = Math.min(Math.max(Math.floor(retryAfter), 0), RETRY_MAX);
      return (reject ? 2 + 256 * (reject & 0xffff) : Number(queue)) + wait * 2 ** 32;
    },
    admitBlocks(tier, stride, list) {
      const blocks = words32(list), answers = [];
      for (let at = 0; at + stride <= blocks.length; at += stride)
        answers.push(policy.admitBlock(tier, readBlock(blocks, at)));
      return answers;
    },
  };
  return { control: control("admitter", policy), admission, learning: learning(policy) };
}

function readBlock(w, at) {
  return {
    class: w[at] & 0xffff, uses: w[at] >>> 16, depth: w[at + 1], size: w[at + 2], lastOfferedMs: w[at + 3], tenant: w[at + 4],
  };
}

export function balancer(policy) {
  const tick = (now, [hitPercent, rejected, accepted, computeMs, fetchMs], prefillQueue, decodeStep) =>
    [...policy.tick({
      now, hitPercent, rejected, accepted, computeMs, fetchMs,
      prefillQueue: floats32(prefillQueue), decodeStep: floats32(decodeStep),
    })];
  return { control: control("balancer", policy), balancing: { tick } };
}

/** Of a policy that learns; it exports `learning` too. */
function learning(policy) {
  return {
    observe(stride, list) {
      const words = words32(list);
      for (let at = 0; stride && at + stride <= words.length; at += stride)
        if (words[at] >= 1 && words[at] <= 4) policy.observe(readOutcome(words.subarray(at, at + stride)));
    },
    publish: () => policy.publish(),
    adopt: (knowledge) => policy.adopt(Uint8Array.from(knowledge)),
  };
}

/** Ends of requests. */
export const End = { finished: 1, rejected: 2, refused: 3, givenUp: 4 };

function readOutcome(w) {
  const view = new DataView(w.buffer, w.byteOffset), float = (i) => view.getFloat32(4 * i, true);
  return {
    end: w[0], reason: w[1], decision: low53(w, 2), tenant: w[4], class: w[5], model: w[6], adapter: w[7], session: low53(w, 8),
    prefill: w[10], decode: w[11], promptTokens: w[12], cachedTokens: w[13], fetchedBlocks: w[14], decodedTokens: w[15],
    ttftPredicted: float(16), ttft: float(17), tbtPredicted: float(18), tbt: float(19), queuePredicted: float(20),
    prefillPredicted: float(21), prefillMeasured: w.length > 22 ? float(22) : -1, hostRun: w[23] ?? 0,
  };
}

function control(slot, policy) {
  const settings = policy.settings ?? [];
  return {
    describe: () => ({
      name: policy.name, version: policy.version, slot,
      settings: settings.map(({ name, value, doc }) => ({ name, default: String(value), doc })),
    }),
    /** An error is thrown as its text. */
    configure(pairs) {
      const given = new Map(pairs);
      for (const name of given.keys()) if (!settings.some((s) => s.name === name)) throw `unknown setting: ${name}`;
      for (const { name, value } of settings) policy.configure?.(name, given.get(name) ?? String(value));
    },
    exportState: () => policy.exportState?.() ?? new Uint8Array(),
    importState(state) {
      if (!policy.importState) throw "this policy keeps no state";
      policy.importState(state);
    },
  };
}
