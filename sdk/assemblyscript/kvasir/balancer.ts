// A balancer: what `balancing` in sdk/wit/balancer.wit says, as a class to extend.
import { Floats, Policy } from "./policy";
import { setPolicy, setSlot } from "./exports/control";
export * from "./policy";

/** Values of `cluster`. */
export const enum C { HitPercent, Rejected, Accepted }

export abstract class Balancer extends Policy {
  /** The thresholds to have from now on; none = keep. */
  abstract tick(now: u64, cluster: Floats, prefillQueue: Floats, decodeStep: Floats): f32[];
}

export let balancer: Balancer | null = null;
/** Makes this the component's policy; call it once, at the end of policy.ts. */
export function serve(policy: Balancer): void {
  balancer = policy;
  setPolicy(policy);
  setSlot("balancer");
}
