/* Evicts the block used longest ago; within one prompt the deepest block first. */
#include "kvasir_evictor.h"

const kv_description kv_policy = {"my-lru", "0.1.0", NULL, 0};

static kv_order order; /* resident blocks, the one used longest ago first */
static uint32_t *parent;
static bool *pinned;

void kv_open(uint32_t slots) {
    kv_order_open(&order, slots);
    KV_NEW(parent, slots);
    KV_NEW(pinned, slots);
}

/* To the end; but if the parent stands in the order, in front of it, so that leaves go first. */
static void use(uint32_t slot) {
    if (!pinned[slot]) kv_order_put(&order, slot, parent[slot]);
}

void kv_on_event(const kv_event *event) {
    uint32_t slot = event->slot;
    if (event->kind == KV_INSERT) parent[slot] = event->parent;
    pinned[slot] = event->kind == KV_PIN || (pinned[slot] && (event->kind == KV_HIT || event->kind == KV_KEEP));
    if (event->kind == KV_PIN || event->kind == KV_REMOVE) kv_order_remove(&order, slot);
    else use(slot);
}

uint32_t kv_select_victims(uint64_t now_ms, uint32_t want, uint32_t *victims) {
    uint32_t count = 0;
    for (uint32_t slot; count < want && (slot = kv_order_first(&order)) != KV_NONE; count++) {
        kv_order_remove(&order, slot);
        victims[count] = kv_victim(slot, KV_HOST_DECIDES);
    }
    (void)now_ms;
    return count;
}
