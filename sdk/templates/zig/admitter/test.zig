//! zig test: the policy runs natively, called as the host would. README.md has the whole command.
const std = @import("std");
const kv = @import("kvasir");
const policy = @import("policy.zig");
const control = kv.Control(policy);
const host = kv.admitter.Host(policy);
const expectEqual = std.testing.expectEqual;

const accept = 0;

fn refuse(reason: u64) u64 {
    return 2 | reason << 8 | 1000 << 32;
}

fn admit(ttft: f32, tbt: f32, hints: u32) u64 {
    const words = [_]u32{ 0, 0, 0, 0, 0, hints, 0, 0, 0, 0, @bitCast(@as(f32, 200)), @bitCast(@as(f32, 50)) };
    const rest: [7]u32 = @splat(0);
    return host.admitRequest(&(words ++ rest), &.{ ttft, tbt, 0, 0, 0, 0, 0, 77 });
}

fn configured(name: []const u8, value: []const u8) bool {
    return control.configure(&.{.{ .name = name, .value = value }}) == null;
}

test "what would miss its SLO is refused" {
    try std.testing.expect(configured("min-uses", "3"));
    try expectEqual(accept, admit(200, 50, 0));
    try expectEqual(refuse(1), admit(201, 50, 0));
    try expectEqual(refuse(2), admit(200, 51, 0));
    try expectEqual(accept, admit(201, 51, 1));
    try std.testing.expect(configured("slack", "1.5"));
    try expectEqual(accept, admit(300, 75, 0));
}

test "blocks used often enough are stored" {
    try std.testing.expect(configured("min-uses", "3"));
    const blocks = [_]u32{ 2 << 16, 0, 1, 0, 0, 77, 3 << 16, 0, 1, 0, 0, 77 }; // records of 6 words
    try std.testing.expectEqualSlices(kv.admitter.Store, &.{ .skip, .store }, host.admitBlocks(3, 6, &blocks));
}

test "settings are checked" {
    for ([_][2][]const u8{ .{ "slack", "x" }, .{ "slack", "0" }, .{ "min-uses", "nan" }, .{ "slak", "1" } }) |pair| {
        try std.testing.expect(!configured(pair[0], pair[1]));
    }
}
