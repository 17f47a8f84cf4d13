// The canonical ABI of `balancing`.
import { balancer } from "../balancer";
import { Floats } from "../policy";
import { answer, done } from "./control";
export { cabi_realloc, control__describe, control__configure, control__export_state, control__import_state } from "./control";

const clusterView = new Floats(), queueView = new Floats(), stepView = new Floats();
let thresholds: f32[] = [];

export function balancing__tick(
  now: u64, cluster: usize, values: u32, queues: usize, prefills: u32, steps: usize, decodes: u32,
): usize {
  thresholds = balancer!.tick(
    now, clusterView.of(cluster, values), queueView.of(queues, prefills), stepView.of(steps, decodes),
  );
  done(cluster);
  done(queues);
  done(steps);
  return answer(memory.data(8, 4), thresholds.dataStart, thresholds.length);
}
