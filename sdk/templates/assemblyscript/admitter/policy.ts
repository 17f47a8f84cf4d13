// Refuses a request whose predicted times miss its SLO, and stores blocks that were used often enough.
export * from "kvasir/exports/admitter";
import {
  ACCEPT, Admitter, B, Description, F, Floats, R, Setting, Store, Words, number, refuse, serve,
} from "kvasir/admitter";

class MyAdmitter extends Admitter {
  private slack: f64 = 1;
  private minUses: f64 = 2;

  describe(): Description {
    return new Description("my-admitter", "0.1.0", [
      new Setting("slack", "1", "times its SLO that a predicted time may reach, 0.1 to 100"),
      new Setting("min-uses", "2", "uses a block must have had to be stored in a lower tier, 0 to 1000"),
    ]);
  }

  configure(name: string, value: string): string | null {
    if (name == "slack") {
      this.slack = number(value, 0.1, 100);
      return isNaN(this.slack) ? "slack: a number from 0.1 to 100" : null;
    }
    this.minUses = number(value, 0, 1000);
    return isNaN(this.minUses) ? "min-uses: a number from 0 to 1000" : null;
  }

  admitRequest(request: Words, forecast: Floats): u64 {
    if (request[R.Hints] & 1) return ACCEPT; // it must run
    if (forecast[F.Ttft] > this.slack * request.float(R.TtftSlo)) return refuse(1, 1000);
    if (forecast[F.Tbt] > this.slack * request.float(R.TbtSlo)) return refuse(2, 1000);
    return ACCEPT;
  }

  admitBlock(tier: u32, block: Words): Store {
    return <f64>(block[B.ClassAndUses] >> 16) >= this.minUses ? Store.Store : Store.Skip;
  }
}

serve(new MyAdmitter());
