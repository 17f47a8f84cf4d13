/* Lets the scheduler move prefixes sooner while queues are uneven. */
#include "kvasir_balancer.h"

static const kv_setting settings[] = {
    {"even", "4", "kvcache-balancing-threshold while queues are even, 1 to 1000"},
    {"uneven", "1.5", "the same while the longest queue is over twice the mean, 1 to 1000"},
};
const kv_description kv_policy = {"my-balancer", "0.1.0", settings, 2};

static double even, uneven;

const char *kv_configure(kv_text name, kv_text value) {
    double *setting = kv_is(name, "even") ? &even : &uneven;
    return kv_number(value, setting) && *setting >= 1 && *setting <= 1000 ? NULL : "even, uneven: numbers from 1 to 1000";
}

uint32_t kv_tick(uint64_t now_ms, kv_floats cluster, kv_floats prefill_queue, kv_floats decode_step, float thresholds[16]) {
    float sum = 0, longest = 0, count = 0;
    for (uint32_t i = 0; i < prefill_queue.length; i++) {
        float queue = prefill_queue.at[i];
        if (queue < 0) continue; /* unavailable */
        sum += queue, count += 1;
        if (queue > longest) longest = queue;
    }
    (void)now_ms, (void)cluster, (void)decode_step;
    if (count == 0) return 0; /* keep what is in force */
    thresholds[0] = (float)(longest > 2 * sum / count ? uneven : even);
    return 1;
}
