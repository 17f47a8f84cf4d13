// Lets the scheduler move prefixes sooner while queues are uneven.
export * from "kvasir/exports/balancer";
import { Balancer, Description, Floats, Setting, number, serve } from "kvasir/balancer";

class MyBalancer extends Balancer {
  private even: f64 = 4;
  private uneven: f64 = 1.5;

  describe(): Description {
    return new Description("my-balancer", "0.1.0", [
      new Setting("even", "4", "kvcache-balancing-threshold while queues are even, 1 to 1000"),
      new Setting("uneven", "1.5", "the same while the longest queue is over twice the mean, 1 to 1000"),
    ]);
  }

  configure(name: string, value: string): string | null {
    const threshold = number(value, 1, 1000);
    if (name == "even") this.even = threshold;
    else this.uneven = threshold;
    return isNaN(threshold) ? name + ": a number from 1 to 1000" : null;
  }

  tick(now: u64, cluster: Floats, prefillQueue: Floats, decodeStep: Floats): f32[] {
    let sum: f32 = 0, longest: f32 = 0, count: f32 = 0;
    for (let i: u32 = 0; i < prefillQueue.length; i++) {
      const queue = prefillQueue[i];
      if (queue < 0) continue; // unavailable
      sum += queue;
      count += 1;
      longest = max(longest, queue);
    }
    if (count == 0) return []; // keep what is in force
    return [<f32>(longest > 2 * sum / count ? this.uneven : this.even)];
  }
}

serve(new MyBalancer());
