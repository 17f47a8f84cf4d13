/* A Kvasir balancer in C11 or C++17: include this file in one source file, and define `kv_policy` and
 * the functions under "Yours". What each call means stands in the WIT text (sdk/wit/balancer.wit). */
#ifndef KVASIR_BALANCER_H
#define KVASIR_BALANCER_H
#define KV_SLOT "balancer"
#include "kvasir_policy.h"
#ifdef __cplusplus
extern "C" {
#endif

enum { KV_HIT_PERCENT, KV_REJECTED, KV_ACCEPTED };
/* Yours. Writes the thresholds to have from now on, and returns how many; 0 = keep. */
uint32_t kv_tick(uint64_t now_ms, kv_floats cluster, kv_floats prefill_queue, kv_floats decode_step, float thresholds[16]);
KV_EXPORT(KV_NAME("balancing", "tick")) kv_floats *kv_abi_tick(uint64_t now, float *cluster, uint32_t cluster_length,
        float *prefill, uint32_t prefill_length, float *decode, uint32_t decode_length) {
    static float thresholds[16];
    static kv_floats answer = {thresholds, 0};
    kv_floats c = {cluster, cluster_length}, p = {prefill, prefill_length}, d = {decode, decode_length};
    answer.length = kv_tick(now, c, p, d, thresholds);
    kv_done_(cluster), kv_done_(prefill), kv_done_(decode);
    return &answer;
}

#ifdef __cplusplus
}
#endif
#endif
