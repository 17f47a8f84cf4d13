//! zig test: the policy runs natively, called as the host would. README.md has the whole command.
const std = @import("std");
const kv = @import("kvasir");
const policy = @import("policy.zig");
const control = kv.Control(policy);
const host = kv.balancer.Host(policy);

fn expectTick(expected: []const f32, queues: [3]f32) !void {
    try std.testing.expectEqualSlices(f32, expected, host.tick(0, &.{ 0, 0, 0, 77 }, &queues, &.{}));
}

test "the threshold follows how even the queues are" {
    try std.testing.expectEqual(null, control.configure(&.{.{ .name = "even", .value = "8" }}));
    try expectTick(&.{8}, .{ 10, 10, 10 });
    try expectTick(&.{1.5}, .{ 1, 1, 100 });
    try expectTick(&.{8}, .{ 5, 20, -1 }); // 20 is less than twice 12.5
    try expectTick(&.{}, .{ -1, -1, -1 });
}

test "settings are checked" {
    for ([_][2][]const u8{ .{ "even", "0.5" }, .{ "uneven", "" }, .{ "odd", "1" } }) |pair| {
        try std.testing.expect(control.configure(&.{.{ .name = pair[0], .value = pair[1] }}) != null);
    }
}
