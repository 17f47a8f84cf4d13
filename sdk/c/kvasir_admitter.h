/* A Kvasir admitter in C11 or C++17: include this file in one source file, and define `kv_policy` and
 * the functions under "Yours"; those marked KV_OPTIONAL may be left out. What each call means stands in
 * the WIT text (sdk/wit/admitter.wit); words and values are numbered as there. */
#ifndef KVASIR_ADMITTER_H
#define KVASIR_ADMITTER_H
#define KV_SLOT "admitter"
#include "kvasir_policy.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Words of a request, as the scheduler gets them; the SLOs are floats, the SEED and the memos u64. */
enum { KV_PROMPT_TOKENS, KV_OUTPUT_TOKENS, KV_CLASS, KV_TENANT, KV_PRIORITY, KV_HINTS, KV_SESSION, KV_SEED = 8, KV_TTFT_SLO = 10,
       KV_TBT_SLO, KV_MODEL, KV_ADAPTER, KV_SESSION_MEMO, KV_TENANT_MEMO = 16 };
/* Values of a forecast. */
enum { KV_TTFT, KV_TBT, KV_TENANT_PART, KV_QUEUE_MS, KV_PREFILL_MS, KV_TRANSFER_MS, KV_TOKENS_STORED };
/* Words of a block. */
enum { KV_BLOCK_CLASS_AND_USES, KV_BLOCK_DEPTH, KV_BLOCK_SIZE, KV_BLOCK_LAST_OFFERED_MS, KV_BLOCK_TENANT };
enum { KV_SKIP, KV_STORE, KV_STORE_COLDER };
/* Yours. */
uint64_t kv_admit_request(kv_words request, kv_floats forecast);
uint32_t kv_admit_block(uint32_t tier, const uint32_t *block);
KV_OPTIONAL void kv_update_load(kv_floats values);

static inline uint64_t kv_accept(void) { return 0; }
static inline uint64_t kv_queue(uint32_t retry_after_ms) { return 1 | (uint64_t)retry_after_ms << 32; }
static inline uint64_t kv_refuse(uint32_t reason, uint32_t retry_after_ms) {
    return 2 | reason << 8 | (uint64_t)retry_after_ms << 32;
}
KV_EXPORT(KV_NAME("admission", "update-load")) void kv_abi_update_load(float *values, uint32_t length) {
    kv_floats list = {values, length};
    if (kv_update_load) kv_update_load(list);
    kv_done_(values);
}
KV_EXPORT(KV_NAME("admission", "admit-request"))
uint64_t kv_abi_admit_request(uint32_t *words, uint32_t length, float *values, uint32_t count) {
    kv_words request = {words, length};
    kv_floats forecast = {values, count};
    uint64_t answer = kv_admit_request(request, forecast);
    kv_done_(words), kv_done_(values);
    return answer;
}
KV_EXPORT(KV_NAME("admission", "admit-blocks"))
kv_words *kv_abi_admit_blocks(uint32_t tier, uint32_t stride, uint32_t *blocks, uint32_t length) {
    static kv_words answer;
    static uint32_t *answers;
    uint32_t count = stride ? length / stride : 0;
    KV_NEW(answers, count);
    for (uint32_t i = 0; i < count; i++) answers[i] = kv_admit_block(tier, blocks + i * stride);
    answer.at = answers, answer.length = count;
    kv_done_(blocks);
    return &answer;
}

#ifdef __cplusplus
}
#endif
#endif
