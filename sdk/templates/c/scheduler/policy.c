/* Sends a request where its first token comes soonest, and its decoding to the instance with the fewest
 * sequences. */
#include "kvasir_scheduler.h"

const kv_description kv_policy = {"my-scheduler", "0.1.0", NULL, 0};

/* Time until the prefill at `slot` is done, ms; infinite if it cannot serve the request. */
static float first_token(const kv_request *r, uint32_t slot) {
    const uint32_t *prefix = kv_column(r, KV_PREFIX), *fit = kv_column(r, KV_PREFILL_FIT);
    if (kv_at(&kv_prefill, slot, KV_AVAILABLE) != 1 || (fit && !fit[slot])) return __builtin_inff();
    float prompt = (float)r->words[KV_PROMPT_TOKENS];
    float stored = prefix ? (float)(prefix[slot] * kv_block_tokens) : 0;
    float computed = prompt > stored ? prompt - stored : 0;
    float wait = kv_at(&kv_prefill, slot, KV_BUSY_UNTIL) - r->now;
    return (wait > 0 ? wait : 0) + kv_at(&kv_prefill, slot, KV_C0) + kv_at(&kv_prefill, slot, KV_C1) * computed
        + kv_at(&kv_prefill, slot, KV_C2) * computed * (stored + computed / 2);
}

/* Sequences decoded there, now or soon; infinite if it cannot serve the request. */
static float sequences(const kv_request *r, uint32_t slot) {
    const uint32_t *fit = kv_column(r, KV_DECODE_FIT);
    if (kv_at(&kv_decode, slot, KV_AVAILABLE) != 1 || (fit && !fit[slot])) return __builtin_inff();
    return kv_at(&kv_decode, slot, KV_D_SEQUENCES) + kv_at(&kv_decode, slot, KV_D_COMING);
}

static uint32_t least(const kv_request *r, uint32_t slots, float (*score)(const kv_request *, uint32_t)) {
    uint32_t best = KV_NONE;
    float lowest = __builtin_inff();
    for (uint32_t slot = 0; slot < slots; slot++) {
        float value = score(r, slot);
        if (value < lowest) lowest = value, best = slot;
    }
    return best;
}

kv_decision kv_schedule(const kv_request *request) {
    uint32_t prefill = least(request, kv_prefill.slots, first_token);
    uint32_t decode = least(request, kv_decode.slots, sequences);
    if (prefill == KV_NONE || decode == KV_NONE) return kv_reject(KV_NO_INSTANCE, 1000);
    return kv_run(prefill, decode);
}

uint32_t kv_explain(const kv_request *request, float *scores) {
    for (uint32_t slot = 0; slot < kv_prefill.slots; slot++) scores[slot] = first_token(request, slot);
    return kv_prefill.slots;
}
