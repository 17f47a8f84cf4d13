/* A Kvasir evictor in C11 or C++17: include this file in one source file, and define `kv_policy` and
 * the functions under "Yours"; those marked KV_OPTIONAL may be left out. What each call means stands in
 * the WIT text (sdk/wit/evictor.wit). */
#ifndef KVASIR_EVICTOR_H
#define KVASIR_EVICTOR_H
#define KV_SLOT "evictor"
#include "kvasir_policy.h"
#ifdef __cplusplus
extern "C" {
#endif

enum { KV_INSERT = 1, KV_HIT, KV_REMOVE, KV_KEEP, KV_PIN, KV_UNPIN };
enum { KV_HOST_DECIDES = 0, KV_HBM = 1, KV_NVME = 3, KV_REMOTE = 4, KV_DROP = 15 };
typedef struct {
    uint32_t kind, class_, slot, parent /* or uses, of a hit */, depth, size, tenant;
    bool replayed;
    uint64_t time_ms, identity;
} kv_event;
/* Yours. `kv_on_event` gets known kinds and slots below `slots` only. `kv_select_victims` writes up to
 * `want` victims, as kv_victim makes them, and returns how many. */
void kv_open(uint32_t slots);
void kv_on_event(const kv_event *event);
uint32_t kv_select_victims(uint64_t now_ms, uint32_t want, uint32_t *victims);
KV_OPTIONAL void kv_update_tiers(kv_rows tiers);

static inline uint32_t kv_victim(uint32_t slot, uint32_t where) { return slot | where << 28; }
/* Block slots in an order that you give them; in `next`, element `slots` is both ends. */
typedef struct { uint32_t *next, *prev, slots; } kv_order;
static inline void kv_order_open(kv_order *o, uint32_t slots) {
    o->slots = slots;
    KV_NEW(o->next, slots + 1), KV_NEW(o->prev, slots + 1);
    for (uint32_t i = 0; i <= slots; i++) o->next[i] = o->prev[i] = i; /* itself = not in the order */
}
static inline bool kv_order_has(const kv_order *o, uint32_t slot) { return slot < o->slots && o->next[slot] != slot; }
static inline uint32_t kv_order_first(const kv_order *o) { return o->next[o->slots] == o->slots ? KV_NONE : o->next[o->slots]; }
static inline void kv_order_remove(kv_order *o, uint32_t slot) {
    o->next[o->prev[slot]] = o->next[slot], o->prev[o->next[slot]] = o->prev[slot];
    o->next[slot] = o->prev[slot] = slot;
}
/* Moves or adds `slot` in front of `at`, or last if `at` is not in the order. */
static inline void kv_order_put(kv_order *o, uint32_t slot, uint32_t at) {
    if (slot == at) return;
    kv_order_remove(o, slot);
    if (!kv_order_has(o, at)) at = o->slots;
    o->next[slot] = at, o->prev[slot] = o->prev[at];
    o->next[o->prev[at]] = slot, o->prev[at] = slot;
}
static uint32_t kv_slots_, kv_event_words_, kv_tier_values_;
KV_EXPORT(KV_NAME("eviction", "open")) void kv_abi_open(uint32_t *layout, uint32_t length) {
    kv_slots_ = layout[0], kv_event_words_ = layout[1], kv_tier_values_ = layout[2];
    kv_open(kv_slots_);
    kv_done_(layout), (void)length;
}
KV_EXPORT(KV_NAME("eviction", "update-tiers")) void kv_abi_update_tiers(float *rows, uint32_t length) {
    kv_rows list = {rows, kv_tier_values_ ? length / kv_tier_values_ : 0, kv_tier_values_};
    if (kv_update_tiers) kv_update_tiers(list);
    kv_done_(rows);
}
KV_EXPORT(KV_NAME("eviction", "on-events")) void kv_abi_on_events(uint64_t base, uint32_t *events, uint32_t length) {
    const uint32_t *w = events;
    for (uint32_t left = length; kv_event_words_ >= 9 && left >= kv_event_words_; left -= kv_event_words_, w += kv_event_words_) {
        kv_event e = {w[0] & 255, w[0] >> 16, w[1], w[2], w[3], w[4], w[8], (w[0] >> 8 & 1) != 0, base + w[5], kv_u64(w + 6)};
        if (e.kind >= KV_INSERT && e.kind <= KV_UNPIN && e.slot < kv_slots_) kv_on_event(&e);
    }
    kv_done_(events);
}
KV_EXPORT(KV_NAME("eviction", "select-victims")) kv_words *kv_abi_select_victims(uint64_t now, uint32_t want) {
    static uint32_t victims[256];
    static kv_words answer = {victims, 0};
    answer.length = kv_select_victims(now, want < 256 ? want : 256, victims);
    return &answer;
}

#ifdef __cplusplus
}
#endif
#endif
