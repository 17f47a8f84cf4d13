/* Refuses a request whose predicted times miss its SLO, and stores blocks that were used often enough. */
#include "kvasir_admitter.h"

static const kv_setting settings[] = {
    {"slack", "1", "times its SLO that a predicted time may reach, 0.1 to 100"},
    {"min-uses", "2", "uses a block must have had to be stored in a lower tier, 0 to 1000"},
};
const kv_description kv_policy = {"my-admitter", "0.1.0", settings, 2};

static double slack, min_uses;

const char *kv_configure(kv_text name, kv_text value) {
    if (kv_is(name, "slack"))
        return kv_number(value, &slack) && slack >= 0.1 && slack <= 100 ? NULL : "slack: a number from 0.1 to 100";
    return kv_number(value, &min_uses) && min_uses >= 0 && min_uses <= 1000 ? NULL : "min-uses: a number from 0 to 1000";
}

uint64_t kv_admit_request(kv_words request, kv_floats forecast) {
    if (request.at[KV_HINTS] & 1) return kv_accept(); /* it must run */
    if (forecast.at[KV_TTFT] > slack * kv_float(request.at[KV_TTFT_SLO])) return kv_refuse(1, 1000);
    if (forecast.at[KV_TBT] > slack * kv_float(request.at[KV_TBT_SLO])) return kv_refuse(2, 1000);
    return kv_accept();
}

uint32_t kv_admit_block(uint32_t tier, const uint32_t *block) {
    (void)tier;
    return (block[KV_BLOCK_CLASS_AND_USES] >> 16) >= min_uses ? KV_STORE : KV_SKIP;
}
