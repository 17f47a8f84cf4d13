/* cc -I../../../c test.c && ./a.out: the policy runs natively, as the host would call it. */
#include "policy.c"
#include <assert.h>

enum { PREFILL = 20, DECODE = 22, WORDS = 20 }; /* each one more than documented, as a later host may send */

static void prefill(float slot, float available, float busy_until) {
    float row[PREFILL] = {slot, available, busy_until, 10, 0.1f, 0};
    kv_abi_update_prefill(row, PREFILL);
}

static void decode(float slot, float available, float sequences) {
    float row[DECODE] = {slot, available, sequences};
    kv_abi_update_decode(row, DECODE);
}

/* 1,000 tokens; both columns given. */
static kv_decision *schedule(uint32_t prefix0, uint32_t prefix1, uint32_t fit0, uint32_t fit1) {
    uint32_t question[WORDS + 4] = {1000};
    question[KV_COLUMNS] = 1 << KV_PREFIX | 1 << KV_PREFILL_FIT;
    question[WORDS] = prefix0, question[WORDS + 1] = prefix1, question[WORDS + 2] = fit0, question[WORDS + 3] = fit1;
    return kv_abi_schedule(50, question, WORDS + 4);
}

int main(void) {
    uint32_t layout[] = {2, 2, 16, PREFILL, DECODE, WORDS, 1, 6, 7, 99};
    kv_abi_open(layout, 10);
    assert(schedule(0, 0, 1, 1)->prefill == KV_NONE && schedule(0, 0, 1, 1)->reason == KV_NO_INSTANCE);
    prefill(0, 1, 0), prefill(1, 1, 100);
    decode(0, 1, 5), decode(1, 1, 4);
    assert(schedule(0, 0, 1, 1)->prefill == 0 && schedule(0, 0, 1, 1)->decode == 1);
    assert(schedule(0, 50, 1, 1)->prefill == 1); /* 80 ms of prefill saved, 50 of waiting */
    assert(schedule(0, 50, 1, 0)->prefill == 0); /* 1 cannot serve it */
    decode(1, 0, 4);
    assert(schedule(0, 0, 1, 1)->decode == 0);
    uint32_t plain[WORDS] = {1000};
    kv_floats *scores = kv_abi_explain(50, plain, WORDS);
    assert(scores->length == 2 && scores->at[0] == 110 && scores->at[1] == 160);
    return 0;
}
