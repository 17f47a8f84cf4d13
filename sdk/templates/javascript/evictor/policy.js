// Evicts the block used longest ago; within one prompt the deepest block first.
import { Kind, NONE, Order, evictor, victim } from "../../../js/kvasir.js";

/** Resident blocks, the one used longest ago first. */
let order, parent, pinned;

export const { control, eviction } = evictor({
  name: "my-lru",
  version: "0.1.0",

  open(slots) {
    order = new Order(slots);
    parent = new Uint32Array(slots);
    pinned = new Uint8Array(slots);
  },

  onEvent({ kind, slot, parent: above }) {
    if (kind === Kind.insert) parent[slot] = above;
    pinned[slot] = kind === Kind.pin || (pinned[slot] && (kind === Kind.hit || kind === Kind.keep));
    if (kind === Kind.pin || kind === Kind.remove) order.remove(slot);
    // To the end; but if the parent stands in the order, in front of it, so that leaves go first.
    else if (!pinned[slot]) order.put(slot, parent[slot]);
  },

  selectVictims(want) {
    const victims = [];
    for (let slot; victims.length < want && (slot = order.first()) !== NONE; ) {
      order.remove(slot);
      victims.push(victim(slot));
    }
    return victims;
  },
});
