/* A Kvasir scheduler in C11 or C++17: include this file in one source file, and define `kv_policy` and
 * the functions under "Yours"; those marked KV_OPTIONAL may be left out. What each call means stands in
 * the WIT text (sdk/wit/scheduler.wit); columns and words are numbered as there. */
#ifndef KVASIR_SCHEDULER_H
#define KVASIR_SCHEDULER_H
#define KV_SLOT "scheduler"
#include "kvasir_policy.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Columns of both tables; rows are as wide as the host says. */
enum { KV_AVAILABLE = 1, KV_BUSY_UNTIL = 2, KV_C0, KV_C1, KV_C2, KV_T0, KV_T1, KV_QUEUED, KV_FREE_BLOCKS, KV_CAPACITY,
       KV_REPORTED_AT, KV_IDENTITY, KV_PEER, KV_HOST, KV_DOMAIN, KV_WAITING, KV_ADAPTERS, KV_ADAPTERS_MAX,
       KV_SEND };
enum { KV_D_SEQUENCES = 2, KV_D_CONTEXT, KV_D_FREE_BLOCKS, KV_D_CAPACITY, KV_D_D0, KV_D_D1, KV_D_D2, KV_D_COMING,
       KV_D_COMING_CONTEXT, KV_D_REPORTED_AT, KV_D_IDENTITY, KV_D_PEER, KV_D_HOST, KV_D_DOMAIN, KV_D_WAITING, KV_D_T0, KV_D_T1,
       KV_D_ADAPTERS, KV_D_ADAPTERS_MAX };
/* Words of a request; SESSION, SEED and the memos are u64, the SLOs floats. */
enum { KV_PROMPT_TOKENS, KV_OUTPUT_TOKENS, KV_CLASS, KV_TENANT, KV_PRIORITY, KV_HINTS, KV_SESSION, KV_SEED = 8, KV_TTFT_SLO = 10,
       KV_TBT_SLO, KV_MODEL, KV_ADAPTER, KV_SESSION_MEMO, KV_TENANT_MEMO = 16, KV_COLUMNS = 18 };
/* Bits of KV_COLUMNS. */
enum { KV_PREFIX, KV_PREFIX_HBM, KV_PREFIX_DRAM, KV_PREFILL_FIT, KV_DECODE_PREFIX, KV_DECODE_FIT, KV_PREFILL_SCORE, KV_DECODE_SCORE,
       KV_DECODE_PREFIX_HBM, KV_DECODE_PREFIX_DRAM };
/* Those with one word per decode slot. */
#define KV_OF_DECODE \
    (1u << KV_DECODE_PREFIX | 1u << KV_DECODE_FIT | 1u << KV_DECODE_SCORE | 1u << KV_DECODE_PREFIX_HBM | 1u << KV_DECODE_PREFIX_DRAM)
enum { KV_NO_TTFT = 1, KV_NO_TBT, KV_NO_INSTANCE, KV_NO_MEMORY, KV_OWN_REASON };
typedef struct { float *rows; uint32_t slots, width; } kv_table;
typedef struct { float now; const uint32_t *words; uint32_t length; } kv_request;
typedef struct {
    uint32_t prefill, decode, transfer_blocks, source, reason, retry_after;
    uint64_t session_memo, tenant_charge;
} kv_decision;
/* Kept for you: the tables, and the layout given to `open`. */
static kv_table kv_prefill, kv_decode;
static uint32_t kv_block_tokens, kv_request_words, kv_domains, kv_link_values, kv_host_run;
/* Yours. Explain writes up to one score per prefill and decode slot. */
kv_decision kv_schedule(const kv_request *request);
KV_OPTIONAL uint32_t kv_explain(const kv_request *request, float *scores);
KV_OPTIONAL void kv_opened(void);
KV_OPTIONAL void kv_update_links(kv_rows links);
KV_OPTIONAL void kv_set_thresholds(kv_floats values);

static inline float kv_at(const kv_table *table, uint32_t slot, uint32_t column) {
    return table->rows[(size_t)slot * table->width + column];
}
/* One word per slot, or NULL if this request has no such column. */
static inline const uint32_t *kv_column(const kv_request *r, uint32_t bit) {
    uint32_t bits = r->words[KV_COLUMNS], start = kv_request_words;
    for (uint32_t b = 0; b < bit; b++)
        if (bits >> b & 1) start += KV_OF_DECODE >> b & 1 ? kv_decode.slots : kv_prefill.slots;
    return bits >> bit & 1 ? r->words + start : NULL;
}
static inline kv_decision kv_run(uint32_t prefill, uint32_t decode) {
    kv_decision answer = {prefill, decode, 0, 0, 0, 0, 0, 0};
    return answer;
}
static inline kv_decision kv_reject(uint32_t reason, uint32_t retry_after_ms) {
    kv_decision answer = {KV_NONE, 0, 0, 0, reason, retry_after_ms, 0, 0};
    return answer;
}
static float *kv_scores_;
KV_EXPORT(KV_NAME("scheduling", "open")) void kv_abi_open(uint32_t *layout, uint32_t length) {
    kv_prefill.slots = layout[0], kv_decode.slots = layout[1], kv_block_tokens = layout[2];
    kv_prefill.width = layout[3], kv_decode.width = layout[4], kv_request_words = layout[5], kv_domains = layout[6], kv_link_values = layout[7];
    kv_host_run = length > 8 ? layout[8] : 0;
    KV_NEW(kv_prefill.rows, (size_t)kv_prefill.slots * kv_prefill.width);
    KV_NEW(kv_decode.rows, (size_t)kv_decode.slots * kv_decode.width);
    KV_NEW(kv_scores_, kv_prefill.slots + kv_decode.slots);
    if (kv_opened) kv_opened();
    kv_done_(layout);
}
static inline void kv_store_(kv_table *table, const float *rows, uint32_t length) {
    for (uint32_t at = 0; table->width && length - at >= table->width; at += table->width)
        if (rows[at] >= 0 && rows[at] < (float)table->slots)
            __builtin_memcpy(table->rows + (size_t)rows[at] * table->width, rows + at, table->width * sizeof *rows);
}
KV_EXPORT(KV_NAME("scheduling", "update-prefill")) void kv_abi_update_prefill(float *rows, uint32_t length) {
    kv_store_(&kv_prefill, rows, length);
    kv_done_(rows);
}
KV_EXPORT(KV_NAME("scheduling", "update-decode")) void kv_abi_update_decode(float *rows, uint32_t length) {
    kv_store_(&kv_decode, rows, length);
    kv_done_(rows);
}
KV_EXPORT(KV_NAME("scheduling", "update-links")) void kv_abi_update_links(float *rows, uint32_t length) {
    kv_rows list = {rows, kv_link_values ? length / kv_link_values : 0, kv_link_values};
    if (kv_update_links) kv_update_links(list);
    kv_done_(rows);
}
KV_EXPORT(KV_NAME("scheduling", "set-thresholds")) void kv_abi_set_thresholds(float *values, uint32_t length) {
    kv_floats list = {values, length};
    if (kv_set_thresholds) kv_set_thresholds(list);
    kv_done_(values);
}
KV_EXPORT(KV_NAME("scheduling", "schedule")) kv_decision *kv_abi_schedule(float now, uint32_t *question, uint32_t length) {
    static kv_decision answer;
    kv_request request = {now, question, length};
    answer = kv_schedule(&request);
    kv_done_(question);
    return &answer;
}
KV_EXPORT(KV_NAME("scheduling", "explain")) kv_floats *kv_abi_explain(float now, uint32_t *question, uint32_t length) {
    static kv_floats answer;
    kv_request request = {now, question, length};
    answer.at = kv_scores_, answer.length = kv_explain ? kv_explain(&request, kv_scores_) : 0;
    kv_done_(question);
    return &answer;
}

#ifdef __cplusplus
}
#endif
#endif
