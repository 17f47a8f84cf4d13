// Lets the scheduler move prefixes sooner while queues are uneven.
import { balancer, number } from "../../../js/kvasir.js";

const threshold = {};

export const { control, balancing } = balancer({
  name: "my-balancer",
  version: "0.1.0",
  settings: [
    { name: "even", value: 4, doc: "kvcache-balancing-threshold while queues are even, 1 to 1000" },
    { name: "uneven", value: 1.5, doc: "the same while the longest queue is over twice the mean, 1 to 1000" },
  ],

  configure(name, value) {
    threshold[name] = number(name, value, 1, 1000);
  },

  tick({ prefillQueue }) {
    const queues = prefillQueue.filter((queue) => queue >= 0); // the others are unavailable
    if (queues.length === 0) return []; // keep what is in force
    const mean = queues.reduce((sum, queue) => sum + queue, 0) / queues.length;
    return [Math.max(...queues) > 2 * mean ? threshold.uneven : threshold.even];
  },
});
