// The canonical ABI of `admission`.
import { admitter } from "../admitter";
import { Floats, Words } from "../policy";
import { answer, done } from "./control";
export { cabi_realloc, control__describe, control__configure, control__export_state, control__import_state } from "./control";

const words = new Words();
const floats = new Floats();
let answers = new StaticArray<u32>(0);

export function admission__update_load(values: usize, length: u32): void {
  admitter!.updateLoad(floats.of(values, length));
  done(values);
}

export function admission__admit_request(request: usize, length: u32, forecast: usize, count: u32): u64 {
  const answer = admitter!.admitRequest(words.of(request, length), floats.of(forecast, count));
  done(request);
  done(forecast);
  return answer;
}

export function admission__admit_blocks(tier: u32, stride: u32, blocks: usize, length: u32): usize {
  const count = stride ? length / stride : 0;
  answers = new StaticArray<u32>(count);
  for (let i: u32 = 0; i < count; i++)
    answers[i] = admitter!.admitBlock(tier, words.of(blocks + (<usize>(i * stride) << 2), stride));
  done(blocks);
  return answer(memory.data(8, 4), changetype<usize>(answers), count);
}
