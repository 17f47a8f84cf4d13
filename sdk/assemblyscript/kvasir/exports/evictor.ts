// The canonical ABI of `eviction`.
import { Event, Kind, evictor } from "../evictor";
import { NONE, Rows } from "../policy";
import { answer, done } from "./control";
export { cabi_realloc, control__describe, control__configure, control__export_state, control__import_state } from "./control";

let slots: u32 = 0;
let words: u32 = 9;
let values: u32 = 6;
const event = new Event();
const tiers = new Rows();
const victims = memory.data(4 * 256, 4);

export function eviction__open(layout: usize, length: u32): void {
  slots = load<u32>(layout);
  words = load<u32>(layout, 4);
  values = load<u32>(layout, 8);
  evictor!.open(slots);
  done(layout);
}

export function eviction__update_tiers(rows: usize, length: u32): void {
  evictor!.updateTiers(tiers.of(rows, length, values));
  done(rows);
}

export function eviction__on_events(base: u64, events: usize, length: u32): void {
  let at = events;
  for (let left = length; left >= words; left -= words, at += <usize>words << 2) {
    const first = load<u32>(at), kind = <i32>(first & 255), slot = load<u32>(at, 4);
    if (kind < Kind.Insert || kind > Kind.Unpin || slot >= slots) continue;
    event.kind = kind;
    event.replayed = ((first >> 8) & 1) != 0;
    event.class_ = first >> 16;
    event.slot = slot;
    event.parent = load<u32>(at, 8);
    event.depth = load<u32>(at, 12);
    event.size = load<u32>(at, 16);
    event.time = base + load<u32>(at, 20);
    event.identity = load<u64>(at, 24);
    event.tenant = load<u32>(at, 32);
    evictor!.onEvent(event);
  }
  done(events);
}

export function eviction__select_victims(now: u64, want: u32): usize {
  let count: u32 = 0;
  for (; count < min<u32>(want, 256); count++) {
    const victim = evictor!.nextVictim(now);
    if (victim == NONE) break;
    store<u32>(victims + (<usize>count << 2), victim);
  }
  return answer(memory.data(8, 4), victims, count);
}
