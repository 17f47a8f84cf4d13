//! An evictor, `eviction` in sdk/wit/evictor.wit. It declares
//!
//! * `open(slots: u32) void`: empties the policy; allocate here
//! * `onEvent(event: *const Event) void`: gets known kinds, and slots below `slots`, only
//! * `selectVictims(now_ms: u64, victims: []Victim) usize`: fills `victims` from the front, the most expendable block
//!   first, and returns how many it chose
//!
//! and may declare `updateTiers(tiers: Rows) void`.
const std = @import("std");
const kv = @import("kvasir.zig");

pub const Kind = enum(u8) { insert = 1, hit, remove, keep, pin, unpin };

pub const Event = struct {
    kind: Kind,
    replayed: bool,
    class: u32,
    slot: u32,
    /// For an insert: the parent's slot, or `none`. For a hit: how many uses it stands for.
    parent: u32,
    depth: u32,
    size: u32,
    time_ms: u64,
    identity: u64,
    tenant: u32,
};

/// Where a victim's bytes go.
pub const Where = enum(u4) { host_decides, hbm = 1, nvme = 3, remote = 4, drop = 15, _ };

pub const Victim = packed struct(u32) { slot: u28, where: Where = .host_decides };

/// Most victims that the host asks for at once.
pub const victims_max = 256;

/// Block slots in an order that the policy gives them.
pub const Order = struct {
    // Element `slots` is both ends; a slot that stands nowhere follows itself.
    next: []u32 = &.{},
    prev: []u32 = &.{},
    slots: u32 = 0,

    pub fn open(order: *Order, slots: u32) void {
        order.slots = slots;
        kv.renew(u32, &order.next, slots + 1, 0);
        kv.renew(u32, &order.prev, slots + 1, 0);
        for (order.next, order.prev, 0..) |*next, *prev, slot| {
            next.* = @intCast(slot);
            prev.* = @intCast(slot);
        }
    }

    pub fn has(order: *const Order, slot: u32) bool {
        return slot < order.slots and order.next[slot] != slot;
    }

    pub fn first(order: *const Order) ?u32 {
        const slot = order.next[order.slots];
        return if (slot == order.slots) null else slot;
    }

    pub fn remove(order: *Order, slot: u32) void {
        const next = order.next[slot];
        const prev = order.prev[slot];
        order.next[prev] = next;
        order.prev[next] = prev;
        order.next[slot] = slot;
        order.prev[slot] = slot;
    }

    /// Moves or adds `slot` in front of `before`, or last if that is not in the order.
    pub fn put(order: *Order, slot: u32, before: u32) void {
        if (slot == before) return;
        order.remove(slot);
        const next = if (order.has(before)) before else order.slots;
        const prev = order.prev[next];
        order.next[slot] = next;
        order.prev[slot] = prev;
        order.next[prev] = slot;
        order.prev[next] = slot;
    }
};

/// `eviction`, as the host calls it.
pub fn Host(comptime P: type) type {
    return struct {
        var slots: u32 = 0;
        var event_words: u32 = 0;
        var tier_values: u32 = 0;
        var victims: [victims_max]Victim = undefined;

        pub fn open(layout: []const u32) void {
            slots = layout[0];
            event_words = layout[1];
            tier_values = layout[2];
            P.open(slots);
        }

        pub fn updateTiers(rows: []const f32) void {
            kv.callIfDeclared(P, "updateTiers", .{kv.Rows{ .values = rows, .width = tier_values }});
        }

        pub fn onEvents(base_ms: u64, words: []const u32) void {
            var rest = words;
            while (event_words >= 9 and rest.len >= event_words) : (rest = rest[event_words..]) {
                const kind = std.enums.fromInt(Kind, rest[0] & 255) orelse continue;
                if (rest[1] >= slots) continue;
                P.onEvent(&Event{
                    .kind = kind,
                    .replayed = rest[0] >> 8 & 1 == 1,
                    .class = rest[0] >> 16,
                    .slot = rest[1],
                    .parent = rest[2],
                    .depth = rest[3],
                    .size = rest[4],
                    .time_ms = base_ms + rest[5],
                    .identity = rest[6] | @as(u64, rest[7]) << 32,
                    .tenant = rest[8],
                });
            }
        }

        pub fn selectVictims(now_ms: u64, want: u32) []const Victim {
            return victims[0..P.selectVictims(now_ms, victims[0..@min(want, victims_max)])];
        }
    };
}
