// A scheduler or admitter that learns: what sdk/wit/learning.wit says. policy.ts has
// `export * from "kvasir/exports/learning"` as well, and calls `learnWith` beside `serve`.
import { Words } from "./policy";

export const enum End { Finished = 1, Rejected, Refused, GivenUp }

/** Words of an outcome; Decision and Session are `long`, the times `float`, -1 = not known. */
export const enum O {
  End, Reason, Decision, Tenant = 4, Class, Model, Adapter, Session, Prefill = 10, Decode, PromptTokens, CachedTokens,
  FetchedBlocks, DecodedTokens, TtftPredicted, Ttft, TbtPredicted, Tbt, QueuePredicted, PrefillPredicted,
  PrefillMeasured, HostRun,
}

export interface Learner {
  /** Gets each outcome with a known end, on the learner's instance alone. */
  observe(outcome: Words): void;
  /** What instances that decide are to know, in a format of the policy's own. */
  publish(): Uint8Array;
  /** Takes what the learner published. */
  adopt(knowledge: Uint8Array): void;
}

export let learner: Learner | null = null;
export function learnWith(policy: Learner): void {
  learner = policy;
}
