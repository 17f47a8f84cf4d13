// Types of kvasir.js, for policies in TypeScript and for editors. Meanings: sdk/wit. Of 64 bits, numbers hold the lower 53:
// all of a time or a memo below 2^53, and enough of a hash.
export const NONE: 0xffffffff;
export const P: Record<
  | "available" | "busyUntil" | "c0" | "c1" | "c2" | "t0" | "t1" | "queued" | "freeBlocks" | "capacity" | "reportedAt"
  | "identity" | "peer" | "host" | "domain" | "waiting" | "adapters" | "adaptersMax" | "send", number>;
export const D: Record<
  | "available" | "sequences" | "context" | "freeBlocks" | "capacity" | "d0" | "d1" | "d2" | "coming" | "comingContext"
  | "reportedAt" | "identity" | "peer" | "host" | "domain" | "waiting" | "t0" | "t1" | "adapters"
  | "adaptersMax", number>;
export const Reason: { ttft: 1; tbt: 2; noInstance: 3; noMemory: 4; own: 5 };
export const Kind: { insert: 1; hit: 2; remove: 3; keep: 4; pin: 5; unpin: 6 };
export const Where: { hostDecides: 0; hbm: 1; nvme: 3; remote: 4; drop: 15 };
export const Store: { skip: 0; store: 1; colder: 2 };
export function number(name: string, text: string, low: number, high: number): number;

/** What a policy of any slot gives. */
export interface Policy {
  name: string;
  version: string;
  settings?: { name: string; value: string | number; doc: string }[];
  /** Gets every setting once: the operator's value, or the default. Throws the text of a refusal. */
  configure?(name: string, value: string): void;
  exportState?(): Uint8Array;
  /** Throws why the state cannot be used. */
  importState?(state: Uint8Array): void;
}
export interface Control {
  describe(): object;
  configure(pairs: [string, string][]): void;
  exportState(): Uint8Array;
  importState(state: Uint8Array): void;
}

export interface Words {
  promptTokens: number; outputTokens: number; class: number; tenant: number; priority: number; hints: number;
  session: number; seed: number; ttftSlo: number; tbtSlo: number; model: number; adapter: number;
  sessionMemo: number; tenantMemo: number;
}
/** Columns that the host did not send are undefined. */
export interface Request extends Words {
  now: number;
  prefix?: Uint32Array; prefixHbm?: Uint32Array; prefixDram?: Uint32Array; prefillFit?: Uint32Array;
  decodePrefix?: Uint32Array; decodeFit?: Uint32Array; decodePrefixHbm?: Uint32Array; decodePrefixDram?: Uint32Array;
  /** Bits of floats: what the scorers of a chain say. */
  prefillScore?: Uint32Array; decodeScore?: Uint32Array;
}
export interface Table {
  slots: number;
  at(slot: number, column: number): number;
}
export interface Cluster { prefill: Table; decode: Table; blockTokens: number; domains: number; hostRun: number }
/** What is left out is zero; without `prefill` the request is rejected. */
export interface Decision {
  prefill?: number; decode?: number; transferBlocks?: number; source?: number; reason?: number; retryAfter?: number;
  sessionMemo?: number; tenantCharge?: number;
}
/** What came of a request; times in ms, -1 = not known. */
export interface Outcome {
  end: number; reason: number; decision: number; tenant: number; class: number; model: number; adapter: number; session: number;
  prefill: number; decode: number; promptTokens: number; cachedTokens: number; fetchedBlocks: number; decodedTokens: number;
  ttftPredicted: number; ttft: number; tbtPredicted: number; tbt: number; queuePredicted: number; prefillPredicted: number;
  prefillMeasured: number; hostRun: number;
}
export const End: { finished: 1; rejected: 2; refused: 3; givenUp: 4 };
/** Of a policy that learns; its module exports `learning` too. */
export interface Learner {
  /** On the learner's instance alone. */
  observe?(outcome: Outcome): void;
  publish?(): Uint8Array;
  adopt?(knowledge: Uint8Array): void;
}
export interface Scheduler extends Policy, Learner {
  schedule(request: Request, cluster: Cluster): Decision;
  explain?(request: Request, cluster: Cluster): Float32Array;
  opened?(cluster: Cluster): void;
  updateLinks?(links: Float32Array[]): void;
  setThresholds?(values: Float32Array): void;
}
export function scheduler(policy: Scheduler): { control: Control; scheduling: object; learning: object };

/** `parent` is an insert's, `uses` a hit's. */
export interface Event {
  kind: number; replayed: boolean; class: number; slot: number; parent: number; uses: number; depth: number; size: number;
  time: number; identity: number; tenant: number;
}
export interface Evictor extends Policy {
  open(slots: number): void;
  onEvent(event: Event): void;
  selectVictims(want: number, now: number): Iterable<number>;
  updateTiers?(tiers: Float32Array[]): void;
}
export function evictor(policy: Evictor): { control: Control; eviction: object };
export function victim(slot: number, where?: number): number;
export class Order {
  constructor(slots: number);
  has(slot: number): boolean;
  first(): number;
  remove(slot: number): void;
  put(slot: number, at: number): void;
}

export interface Forecast {
  ttft: number; tbt: number; tenantPart: number; queueMs: number; prefillMs: number; transferMs: number; tokensStored: number;
  /** From prefill to decode; no part of the TTFT. */
  handoverMs: number;
}
export interface Block { class: number; uses: number; depth: number; size: number; lastOfferedMs: number; tenant: number }
export interface Admitter extends Policy, Learner {
  /** `{}` accepts; `queue` asks for a wait; `reject` is the reason of a rejection. */
  admitRequest(request: Words, forecast: Forecast): { queue?: boolean; reject?: number; retryAfter?: number };
  admitBlock(tier: number, block: Block): number;
  updateLoad?(values: Float32Array): void;
}
export function admitter(policy: Admitter): { control: Control; admission: object; learning: object };

export interface Tick {
  now: number; hitPercent: number; rejected: number; accepted: number; prefillQueue: Float32Array; decodeStep: Float32Array;
  /** What a block costs to compute, and to fetch from another instance; 0 = unknown. */
  computeMs: number; fetchMs: number;
}
export interface Balancer extends Policy {
  /** The thresholds to have from now on; none = keep. */
  tick(tick: Tick): number[];
}
export function balancer(policy: Balancer): { control: Control; balancing: object };
