// Evicts the block used longest ago; within one prompt the deepest block first.
export * from "kvasir/exports/evictor";
import { Description, Event, Evictor, Kind, NONE, Order, Where, serve, victim } from "kvasir/evictor";

class Lru extends Evictor {
  /** Resident blocks, the one used longest ago first. */
  private order: Order = new Order(0);
  private parent: StaticArray<u32> = new StaticArray<u32>(0);
  private pinned: StaticArray<bool> = new StaticArray<bool>(0);

  describe(): Description {
    return new Description("my-lru", "0.1.0");
  }

  open(slots: u32): void {
    this.order = new Order(slots);
    this.parent = new StaticArray<u32>(slots);
    this.pinned = new StaticArray<bool>(slots);
  }

  onEvent(event: Event): void {
    const slot = event.slot, kind = event.kind;
    if (kind == Kind.Insert) this.parent[slot] = event.parent;
    this.pinned[slot] = kind == Kind.Pin || (this.pinned[slot] && (kind == Kind.Hit || kind == Kind.Keep));
    if (kind == Kind.Pin || kind == Kind.Remove) this.order.remove(slot);
    // To the end; but if the parent stands in the order, in front of it, so that leaves go first.
    else if (!this.pinned[slot]) this.order.put(slot, this.parent[slot]);
  }

  nextVictim(now: u64): u32 {
    const slot = this.order.first();
    if (slot == NONE) return NONE;
    this.order.remove(slot);
    return victim(slot, Where.HostDecides);
  }
}

serve(new Lru());
