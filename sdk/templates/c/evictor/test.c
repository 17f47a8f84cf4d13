/* cc -I../../../c test.c && ./a.out: the policy runs natively, as the host would call it. */
#include "policy.c"
#include <assert.h>

enum { WORDS = 10 }; /* one more than documented, as a later host may send */

static void event(uint32_t kind, uint32_t slot, uint32_t parent) {
    uint32_t words[WORDS] = {kind, slot, parent, 0, 1 << 20, 0, 0, 0, 0, 77};
    kv_abi_on_events(0, words, WORDS);
}

static uint32_t victim(void) {
    kv_words *answer = kv_abi_select_victims(0, 1);
    return answer->length ? answer->at[0] : KV_NONE;
}

int main(void) {
    uint32_t layout[] = {4, WORDS, 7};
    kv_abi_open(layout, 3);
    assert(victim() == KV_NONE);
    event(KV_INSERT, 0, KV_NONE); /* a prompt of two blocks, 0 and 1, and another, 2 */
    event(KV_INSERT, 1, 0);
    event(KV_INSERT, 2, KV_NONE);
    event(KV_HIT, 0, 1);
    event(KV_HIT, 1, 1);
    assert(victim() == 2); /* used longest ago */
    event(KV_KEEP, 2, 0);
    assert(victim() == 1); /* the leaf before its parent */
    event(KV_PIN, 0, 0);
    event(KV_HIT, 0, 1);
    assert(victim() == 2 && victim() == KV_NONE);
    event(KV_UNPIN, 0, 0);
    event(99, 3, 0); /* a kind of a later host */
    event(KV_INSERT, 3, KV_NONE);
    event(KV_REMOVE, 3, 0);
    assert(victim() == 0 && victim() == KV_NONE);
    return 0;
}
