/* See ../README.md. */
#include "kvasir_admitter.h"
#include "kvasir_learning.h"

const kv_description kv_policy = {"my-learner", "0.1.0", NULL, 0};

static uint32_t known;

static void fold(uint32_t value) { known = (known * 31 + value) & 0xfffff; }

void kv_observe(const uint32_t *outcome) {
    for (uint32_t word = KV_O_END; word <= KV_O_HOST_RUN; word++)
        if (word == KV_O_DECISION || word == KV_O_SESSION)
            fold((uint32_t)(kv_u64(outcome + word++) >> 20));
        else if (word >= KV_O_TTFT_PREDICTED && word <= KV_O_PREFILL_MEASURED)
            fold((uint32_t)(2 * kv_float(outcome[word])));
        else
            fold(outcome[word]);
}

kv_bytes kv_publish(void) {
    kv_bytes bytes = {(const uint8_t *)&known, sizeof known};
    return bytes;
}

void kv_adopt(kv_bytes knowledge) {
    if (knowledge.length == sizeof known) __builtin_memcpy(&known, knowledge.at, sizeof known);
}

uint64_t kv_admit_request(kv_words request, kv_floats forecast) {
    (void)request, (void)forecast;
    return kv_refuse(5, known);
}

uint32_t kv_admit_block(uint32_t tier, const uint32_t *block) {
    (void)tier, (void)block;
    return KV_STORE;
}
