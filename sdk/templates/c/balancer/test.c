/* cc -I../../../c test.c && ./a.out: the policy runs natively, as the host would call it. */
#include "policy.c"
#include <assert.h>

static float tick(float a, float b, float c) {
    float cluster[3] = {0}, queues[] = {a, b, c};
    kv_floats *answer = kv_abi_tick(0, cluster, 3, queues, 3, cluster, 1);
    return answer->length ? answer->at[0] : -1;
}

static bool configured(const char *name, const char *value) {
    kv_pair pair = {kv_text_(name), kv_text_(value)};
    return !kv_abi_configure(&pair, 1)->failed;
}

int main(void) {
    assert(!configured("even", "0.5") && !configured("uneven", "") && !configured("odd", "1"));
    assert(configured("even", "8"));
    assert(tick(10, 10, 10) == 8);
    assert(tick(1, 1, 100) == 1.5f);
    assert(tick(5, 20, -1) == 8); /* 20 is less than twice 12.5 */
    assert(tick(-1, -1, -1) == -1);
    return 0;
}
