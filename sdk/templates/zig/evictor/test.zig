//! zig test: the policy runs natively, called as the host would. README.md has the whole command.
const std = @import("std");
const kv = @import("kvasir");
const host = kv.evictor.Host(@import("policy.zig"));

const words = 10; // one more than documented, as a later host may send

fn event(kind: u32, slot: u32, parent: u32) void {
    host.onEvents(0, &[words]u32{ kind, slot, parent, 0, 1 << 20, 0, 0, 0, 0, 77 });
}

fn expectVictims(want: u32, expected: []const u28) !void {
    const victims = host.selectVictims(0, want);
    try std.testing.expectEqual(expected.len, victims.len);
    for (expected, victims) |slot, victim| try std.testing.expectEqual(kv.evictor.Victim{ .slot = slot }, victim);
}

const insert = 1;
const hit = 2;
const remove = 3;
const keep = 4;
const pin = 5;
const unpin = 6;

test "the block used longest ago goes first, and leaves before their parents" {
    host.open(&.{ 4, words, 7 });
    try expectVictims(1, &.{});
    event(insert, 0, kv.none); // a prompt of two blocks, 0 and 1, and another, 2
    event(insert, 1, 0);
    event(insert, 2, kv.none);
    event(hit, 0, 1);
    event(hit, 1, 1);
    try expectVictims(1, &.{2});
    event(keep, 2, 0);
    try expectVictims(1, &.{1});
}

test "pinned and removed blocks are no victims" {
    host.open(&.{ 4, words, 7 });
    event(insert, 0, kv.none);
    event(pin, 0, 0);
    event(hit, 0, 1);
    event(99, 3, 0); // a kind of a later host
    event(insert, 3, kv.none);
    event(remove, 3, 0);
    try expectVictims(2, &.{});
    event(unpin, 0, 0);
    try expectVictims(2, &.{0});
}
