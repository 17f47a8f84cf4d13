//! Evicts the block used longest ago; within one prompt the deepest block first.
const kv = @import("kvasir");
const evictor = kv.evictor;

pub const description: kv.Description = .{ .name = "my-lru", .version = "0.1.0" };

var order: evictor.Order = .{}; // resident blocks, the one used longest ago first
var parent: []u32 = &.{};
var pinned: []bool = &.{};

pub fn open(slots: u32) void {
    order.open(slots);
    kv.renew(u32, &parent, slots, kv.none);
    kv.renew(bool, &pinned, slots, false);
}

pub fn onEvent(event: *const evictor.Event) void {
    const slot = event.slot;
    switch (event.kind) {
        .insert => parent[slot] = event.parent,
        .hit, .keep => {},
        .pin => pinned[slot] = true,
        .unpin, .remove => pinned[slot] = false,
    }
    if (event.kind == .pin or event.kind == .remove) return order.remove(slot);
    // To the end; but if the parent stands in the order, in front of it, so that leaves go first.
    if (!pinned[slot]) order.put(slot, parent[slot]);
}

pub fn selectVictims(now_ms: u64, victims: []evictor.Victim) usize {
    _ = now_ms;
    for (victims, 0..) |*victim, count| {
        const slot = order.first() orelse return count;
        order.remove(slot);
        victim.* = .{ .slot = @intCast(slot) };
    }
    return victims.len;
}
