// An evictor: what `eviction` in sdk/wit/evictor.wit says, as a class to extend.
import { NONE, Policy, Rows } from "./policy";
import { setPolicy, setSlot } from "./exports/control";
export * from "./policy";

/** Kinds of events. */
export const enum Kind { Insert = 1, Hit, Remove, Keep, Pin, Unpin }

/** Where a victim's bytes go. */
export const enum Where { HostDecides = 0, Hbm = 1, Nvme = 3, Remote = 4, Drop = 15 }

/** One event; the same object is filled anew for the next. */
export class Event {
  kind: Kind = Kind.Insert;
  replayed: bool = false;
  class_: u32 = 0;
  slot: u32 = 0;
  /** Of an insert: the parent's slot, or NONE. Of a hit: how many uses it stands for. */
  parent: u32 = 0;
  depth: u32 = 0;
  size: u32 = 0;
  time: u64 = 0;
  identity: u64 = 0;
  tenant: u32 = 0;
}

export abstract class Evictor extends Policy {
  /** Empties the policy; block slots are below `slots`. */
  abstract open(slots: u32): void;
  /** Gets known kinds, and slots below `slots`, only. */
  abstract onEvent(event: Event): void;
  /** The most expendable block and where it goes, as `victim` makes it, or NONE. It leaves the policy's books. */
  abstract nextVictim(now: u64): u32;
  updateTiers(tiers: Rows): void {}
}

export function victim(slot: u32, where: Where): u32 {
  return slot | (<u32>where << 28);
}

/** Block slots in an order that the policy gives them. */
export class Order {
  /** Element `slots` is both ends; a slot that stands nowhere follows itself. */
  private next: StaticArray<u32>;
  private prev: StaticArray<u32>;
  constructor(private slots: u32) {
    this.next = new StaticArray<u32>(slots + 1);
    this.prev = new StaticArray<u32>(slots + 1);
    for (let i: u32 = 0; i <= slots; i++) this.next[i] = this.prev[i] = i;
  }
  has(slot: u32): bool {
    return slot < this.slots && this.next[slot] != slot;
  }
  first(): u32 {
    const slot = this.next[this.slots];
    return slot == this.slots ? NONE : slot;
  }
  remove(slot: u32): void {
    const next = this.next[slot], prev = this.prev[slot];
    this.next[prev] = next;
    this.prev[next] = prev;
    this.next[slot] = this.prev[slot] = slot;
  }
  /** Moves or adds `slot` in front of `at`, or last if `at` is not in the order. */
  put(slot: u32, at: u32): void {
    if (slot == at) return;
    this.remove(slot);
    if (!this.has(at)) at = this.slots;
    const prev = this.prev[at];
    this.next[slot] = at;
    this.prev[slot] = prev;
    this.next[prev] = slot;
    this.prev[at] = slot;
  }
}

export let evictor: Evictor | null = null;
/** Makes this the component's policy; call it once, at the end of policy.ts. */
export function serve(policy: Evictor): void {
  evictor = policy;
  setPolicy(policy);
  setSlot("evictor");
}
