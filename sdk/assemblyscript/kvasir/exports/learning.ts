// The canonical ABI of `learning`; a policy that learns exports it beside that of its slot.
import { learner } from "../learning";
import { Words } from "../policy";
import { answer, done } from "./control";

const outcome = new Words();
let published = new Uint8Array(0);

export function learning__observe(stride: u32, outcomes: usize, length: u32): void {
  let at = outcomes;
  for (let left = length; stride && left >= stride; left -= stride, at += <usize>stride << 2) {
    const end = load<u32>(at);
    if (end >= 1 && end <= 4) learner!.observe(outcome.of(at, stride));
  }
  done(outcomes);
}

export function learning__publish(): usize {
  published = learner!.publish();
  return answer(memory.data(8, 4), published.dataStart, published.length);
}

export function learning__adopt(knowledge: usize, length: usize): void {
  const copy = new Uint8Array(<i32>length);
  memory.copy(copy.dataStart, knowledge, length);
  done(knowledge);
  learner!.adopt(copy);
}
