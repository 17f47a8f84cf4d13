/* A scheduler or admitter that learns: include this file behind the header of the slot. One instance of the
 * component, the learner, hears what came of requests; what it publishes, those that decide adopt. See
 * sdk/wit/learning.wit. The learner's state goes on by `kv_export_state` and `kv_import_state`. */
#ifndef KVASIR_LEARNING_H
#define KVASIR_LEARNING_H
#ifndef KV_SLOT
#error "include kvasir_scheduler.h or kvasir_admitter.h first"
#endif
#ifdef __cplusplus
extern "C" {
#endif

enum { KV_FINISHED = 1, KV_REJECTED, KV_REFUSED, KV_GIVEN_UP };
/* Words of an outcome; DECISION and SESSION are u64, the times floats, -1 = not known. */
enum { KV_O_END, KV_O_REASON, KV_O_DECISION, KV_O_TENANT = 4, KV_O_CLASS, KV_O_MODEL, KV_O_ADAPTER, KV_O_SESSION,
       KV_O_PREFILL = 10, KV_O_DECODE, KV_O_PROMPT_TOKENS, KV_O_CACHED_TOKENS, KV_O_FETCHED_BLOCKS, KV_O_DECODED_TOKENS,
       KV_O_TTFT_PREDICTED, KV_O_TTFT, KV_O_TBT_PREDICTED, KV_O_TBT, KV_O_QUEUE_PREDICTED, KV_O_PREFILL_PREDICTED,
       KV_O_PREFILL_MEASURED, KV_O_HOST_RUN };
/* Yours. `kv_observe` gets each outcome with a known end; what `kv_publish` returns stays yours, too. */
void kv_observe(const uint32_t *outcome);
kv_bytes kv_publish(void);
void kv_adopt(kv_bytes knowledge);

KV_EXPORT(KV_NAME("learning", "observe")) void kv_abi_observe(uint32_t stride, uint32_t *outcomes, uint32_t length) {
    const uint32_t *outcome = outcomes;
    for (uint32_t left = length; stride && left >= stride; left -= stride, outcome += stride)
        if (outcome[KV_O_END] >= KV_FINISHED && outcome[KV_O_END] <= KV_GIVEN_UP) kv_observe(outcome);
    kv_done_(outcomes);
}
KV_EXPORT(KV_NAME("learning", "publish")) kv_bytes *kv_abi_publish(void) {
    static kv_bytes answer;
    answer = kv_publish();
    return &answer;
}
KV_EXPORT(KV_NAME("learning", "adopt")) void kv_abi_adopt(uint8_t *knowledge, uint32_t length) {
    kv_bytes list = {knowledge, length};
    kv_adopt(list);
    kv_done_(knowledge);
}
#ifdef __cplusplus
}
#endif
#endif
