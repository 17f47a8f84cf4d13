// Refuses a request whose predicted times miss its SLO, and stores blocks that were used often enough.
import { Reason, Store, admitter, number } from "../../../js/kvasir.js";

let slack, minUses;

export const { control, admission } = admitter({
  name: "my-admitter",
  version: "0.1.0",
  settings: [
    { name: "slack", value: 1, doc: "times its SLO that a predicted time may reach, 0.1 to 100" },
    { name: "min-uses", value: 2, doc: "uses a block must have had to be stored in a lower tier, 0 to 1000" },
  ],

  configure(name, value) {
    if (name === "slack") slack = number(name, value, 0.1, 100);
    else minUses = number(name, value, 0, 1000);
  },

  admitRequest({ hints, ttftSlo, tbtSlo }, { ttft, tbt }) {
    if (hints & 1) return {}; // it must run
    if (ttft > slack * ttftSlo) return { reject: Reason.ttft, retryAfter: 1000 };
    if (tbt > slack * tbtSlo) return { reject: Reason.tbt, retryAfter: 1000 };
    return {};
  },

  admitBlock: (tier, { uses }) => (uses >= minUses ? Store.store : Store.skip),
});
