// Sends a request where its first token comes soonest, and its decoding to the instance with the
// fewest sequences.
export * from "kvasir/exports/scheduler";
import {
  Column, D, Decision, Description, NONE, P, R, Reason, Scheduler, Words, blockTokens, column, decode, prefill, serve,
} from "kvasir/scheduler";

const prefix = new Words(), prefillFit = new Words(), decodeFit = new Words();

/** Time until the prefill at `slot` is done, ms; infinite if it cannot serve the request. */
function firstToken(now: f32, request: Words, slot: u32): f32 {
  if (prefill.at(slot, P.Available) != 1 || (prefillFit.length && !prefillFit[slot])) return Infinity as f32;
  const prompt = <f32>request[R.PromptTokens];
  const stored = prefix.length ? <f32>(prefix[slot] * blockTokens) : 0;
  const computed = max<f32>(prompt - stored, 0);
  return max<f32>(prefill.at(slot, P.BusyUntil) - now, 0) + prefill.at(slot, P.C0) + prefill.at(slot, P.C1) * computed
    + prefill.at(slot, P.C2) * computed * (stored + computed / 2);
}

class MyScheduler extends Scheduler {
  describe(): Description {
    return new Description("my-scheduler", "0.1.0");
  }

  schedule(now: f32, request: Words): Decision {
    this.columns(request);
    let bestPrefill = NONE, soonest = Infinity as f32;
    for (let slot: u32 = 0; slot < prefill.slots; slot++) {
      const time = firstToken(now, request, slot);
      if (time < soonest) soonest = time, bestPrefill = slot;
    }
    let bestDecode = NONE, fewest = Infinity as f32;
    for (let slot: u32 = 0; slot < decode.slots; slot++) {
      if (decode.at(slot, D.Available) != 1 || (decodeFit.length && !decodeFit[slot])) continue;
      const sequences = decode.at(slot, D.Sequences) + decode.at(slot, D.Coming);
      if (sequences < fewest) fewest = sequences, bestDecode = slot;
    }
    if (bestPrefill == NONE || bestDecode == NONE) return Decision.reject(Reason.NoInstance, 1000);
    return Decision.run(bestPrefill, bestDecode);
  }

  explain(now: f32, request: Words): StaticArray<f32> {
    this.columns(request);
    const scores = new StaticArray<f32>(prefill.slots);
    for (let slot: u32 = 0; slot < prefill.slots; slot++) scores[slot] = firstToken(now, request, slot);
    return scores;
  }

  private columns(request: Words): void {
    column(request, Column.Prefix, prefix);
    column(request, Column.PrefillFit, prefillFit);
    column(request, Column.DecodeFit, decodeFit);
  }
}

serve(new MyScheduler());
