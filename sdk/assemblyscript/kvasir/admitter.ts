// An admitter: what `admission` in sdk/wit/admitter.wit says, as a class to extend.
import { Floats, Policy, Words } from "./policy";
import { setPolicy, setSlot } from "./exports/control";
export * from "./policy";

/** Words of a request; Session, Seed and the memos are `long`, the SLOs `float`. */
export const enum R {
  PromptTokens, OutputTokens, Class, Tenant, Priority, Hints, Session, Seed = 8, TtftSlo = 10, TbtSlo, Model, Adapter,
  SessionMemo, TenantMemo = 16,
}
/** Values of a forecast. */
export const enum F { Ttft, Tbt, TenantPart, QueueMs, PrefillMs, TransferMs, TokensStored }
/** Words of a block. */
export const enum B { ClassAndUses, Depth, Size, LastOfferedMs, Tenant }
export const enum Store { Skip, Store, Colder }

export const ACCEPT: u64 = 0;
export function queue(retryAfterMs: u32): u64 {
  return 1 | (<u64>retryAfterMs << 32);
}
export function refuse(reason: u32, retryAfterMs: u32): u64 {
  return 2 | (reason << 8) | (<u64>retryAfterMs << 32);
}

export abstract class Admitter extends Policy {
  abstract admitRequest(request: Words, forecast: Floats): u64;
  abstract admitBlock(tier: u32, block: Words): Store;
  updateLoad(values: Floats): void {}
}

export let admitter: Admitter | null = null;
/** Makes this the component's policy; call it once, at the end of policy.ts. */
export function serve(policy: Admitter): void {
  admitter = policy;
  setPolicy(policy);
  setSlot("admitter");
}
