// Sends a request where its first token comes soonest, and its decoding to the instance with the
// fewest sequences.
import { D, P, Reason, scheduler } from "../../../js/kvasir.js";

/** Time until the prefill at `slot` is done, ms; infinite if it cannot serve the request. */
function firstToken(request, { prefill, blockTokens }, slot) {
  if (prefill.at(slot, P.available) !== 1 || request.prefillFit?.[slot] === 0) return Infinity;
  const stored = (request.prefix?.[slot] ?? 0) * blockTokens;
  const computed = Math.max(request.promptTokens - stored, 0);
  return Math.max(prefill.at(slot, P.busyUntil) - request.now, 0) + prefill.at(slot, P.c0)
    + prefill.at(slot, P.c1) * computed + prefill.at(slot, P.c2) * computed * (stored + computed / 2);
}

/** Sequences decoded there, now or soon; infinite if it cannot serve the request. */
function sequences(request, { decode }, slot) {
  if (decode.at(slot, D.available) !== 1 || request.decodeFit?.[slot] === 0) return Infinity;
  return decode.at(slot, D.sequences) + decode.at(slot, D.coming);
}

/** The first slot with the lowest finite score, or -1. */
function least(slots, score) {
  let best = -1, lowest = Infinity;
  for (let slot = 0; slot < slots; slot++) {
    const value = score(slot);
    if (value < lowest) [lowest, best] = [value, slot];
  }
  return best;
}

export const { control, scheduling } = scheduler({
  name: "my-scheduler",
  version: "0.1.0",

  schedule(request, cluster) {
    const prefill = least(cluster.prefill.slots, (slot) => firstToken(request, cluster, slot));
    const decode = least(cluster.decode.slots, (slot) => sequences(request, cluster, slot));
    if (prefill < 0 || decode < 0) return { reason: Reason.noInstance, retryAfter: 1000 };
    return { prefill, decode };
  },

  explain: (request, cluster) =>
    Float32Array.from({ length: cluster.prefill.slots }, (_, slot) => firstToken(request, cluster, slot)),
});
