// The canonical ABI of `scheduling`.
import { decode, prefill, scheduler, setLayout } from "../scheduler";
import { Floats, Rows, Words } from "../policy";
import { answer, done } from "./control";
export { cabi_realloc, control__describe, control__configure, control__export_state, control__import_state } from "./control";

const floats = new Floats();
const links = new Rows();
let linkValues: u32 = 5;
const request = new Words();
let scores = new StaticArray<f32>(0);

export function scheduling__open(layout: usize, length: u32): void {
  prefill.open(load<u32>(layout), load<u32>(layout, 12));
  decode.open(load<u32>(layout, 4), load<u32>(layout, 16));
  setLayout(load<u32>(layout, 8), load<u32>(layout, 20), load<u32>(layout, 24), length > 8 ? load<u32>(layout, 32) : 0);
  linkValues = load<u32>(layout, 28);
  scheduler!.opened();
  done(layout);
}

export function scheduling__update_prefill(rows: usize, length: u32): void {
  prefill.update(rows, length);
  done(rows);
}

export function scheduling__update_decode(rows: usize, length: u32): void {
  decode.update(rows, length);
  done(rows);
}

export function scheduling__update_links(rows: usize, length: u32): void {
  scheduler!.updateLinks(links.of(rows, length, linkValues));
  done(rows);
}

export function scheduling__set_thresholds(values: usize, length: u32): void {
  scheduler!.setThresholds(floats.of(values, length));
  done(values);
}

export function scheduling__schedule(now: f32, question: usize, length: u32): usize {
  const area = memory.data(40, 8);
  const d = scheduler!.schedule(now, request.of(question, length));
  store<u32>(area, d.prefill);
  store<u32>(area, d.decode, 4);
  store<u32>(area, d.transferBlocks, 8);
  store<u32>(area, d.source, 12);
  store<u32>(area, d.reason, 16);
  store<u32>(area, d.retryAfter, 20);
  store<u64>(area, d.sessionMemo, 24);
  store<u64>(area, d.tenantCharge, 32);
  done(question);
  return area;
}

export function scheduling__explain(now: f32, question: usize, length: u32): usize {
  scores = scheduler!.explain(now, request.of(question, length));
  done(question);
  return answer(memory.data(8, 4), changetype<usize>(scores), scores.length);
}
