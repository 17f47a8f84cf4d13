/* cc -I../../../c test.c && ./a.out: the policy runs natively, as the host would call it. */
#include "policy.c"
#include <assert.h>

static uint32_t bits(float value) { uint32_t word; __builtin_memcpy(&word, &value, 4); return word; }

static uint64_t admit(float ttft, float tbt, uint32_t hints) {
    uint32_t request[KV_TENANT_MEMO + 2] = {0};
    float forecast[KV_TOKENS_STORED + 1] = {ttft, tbt};
    request[KV_HINTS] = hints, request[KV_TTFT_SLO] = bits(200), request[KV_TBT_SLO] = bits(50);
    return kv_abi_admit_request(request, KV_TENANT_MEMO + 2, forecast, KV_TOKENS_STORED + 1);
}

static bool configured(const char *name, const char *value) {
    kv_pair pair = {kv_text_(name), kv_text_(value)};
    return !kv_abi_configure(&pair, 1)->failed;
}

int main(void) {
    assert(!configured("slack", "x") && !configured("slack", "0") && !configured("slak", "1"));
    assert(configured("min-uses", "3"));
    assert(admit(200, 50, 0) == kv_accept());
    assert(admit(201, 50, 0) == kv_refuse(1, 1000));
    assert(admit(200, 51, 0) == kv_refuse(2, 1000));
    assert(admit(201, 51, 1) == kv_accept());
    assert(configured("slack", "1.5") && admit(300, 75, 0) == kv_accept());
    uint32_t blocks[] = {2 << 16, 0, 1, 0, 0, 77, 3 << 16, 0, 1, 0, 0, 77}; /* records of 6 words */
    assert(configured("min-uses", "3"));
    kv_words *answers = kv_abi_admit_blocks(3, 6, blocks, 12);
    assert(answers->length == 2 && answers->at[0] == KV_SKIP && answers->at[1] == KV_STORE);
    return 0;
}
