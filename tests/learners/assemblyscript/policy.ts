// See ../README.md.
export * from "kvasir/exports/admitter";
export * from "kvasir/exports/learning";
import { Admitter, Description, Floats, Store, Words, refuse, serve } from "kvasir/admitter";
import { Learner, O, learnWith } from "kvasir/learning";

let known: u32 = 0;

function fold(value: u32): void {
  known = (known * 31 + value) & 0xfffff;
}

class MyLearner extends Admitter implements Learner {
  describe(): Description {
    return new Description("my-learner", "0.1.0");
  }

  observe(outcome: Words): void {
    for (let word: i32 = O.End; word <= O.HostRun; word++) {
      if (word == O.Decision || word == O.Session) fold(<u32>(outcome.long(word++) >> 20));
      else if (word >= O.TtftPredicted && word <= O.PrefillMeasured) fold(<u32>(outcome.float(word) * 2.0));
      else fold(outcome[word]);
    }
  }

  publish(): Uint8Array {
    const bytes = new Uint8Array(4);
    store<u32>(bytes.dataStart, known);
    return bytes;
  }

  adopt(knowledge: Uint8Array): void {
    if (knowledge.length == 4) known = load<u32>(knowledge.dataStart);
  }

  admitRequest(request: Words, forecast: Floats): u64 {
    return refuse(5, known);
  }

  admitBlock(tier: u32, block: Words): Store {
    return Store.Store;
  }
}

const policy = new MyLearner();
serve(policy);
learnWith(policy);
