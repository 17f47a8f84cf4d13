//! Lets the scheduler move prefixes sooner while queues are uneven.
const std = @import("std");
const kv = @import("kvasir");
const balancer = kv.balancer;

pub const description: kv.Description = .{ .name = "my-balancer", .version = "0.1.0", .settings = &.{
    .{ .name = "even", .default = "4", .doc = "kvcache-balancing-threshold while queues are even, 1 to 1000" },
    .{ .name = "uneven", .default = "1.5", .doc = "the same while the longest queue is over twice the mean, 1 to 1000" },
} };

var even: f64 = 4;
var uneven: f64 = 1.5;

pub fn configure(name: []const u8, value: []const u8) ?[]const u8 {
    const setting = if (std.mem.eql(u8, name, "even")) &even else &uneven;
    setting.* = kv.number(value, 1, 1000) orelse return "even, uneven: numbers from 1 to 1000";
    return null;
}

pub fn tick(now: balancer.Tick, thresholds: *[balancer.thresholds_max]f32) []const f32 {
    var sum: f32 = 0;
    var longest: f32 = 0;
    var count: f32 = 0;
    for (now.prefill_queue) |queue| {
        if (queue < 0) continue; // unavailable
        sum += queue;
        count += 1;
        longest = @max(longest, queue);
    }
    if (count == 0) return &.{}; // keep what is in force
    thresholds[0] = @floatCast(if (longest > 2 * sum / count) uneven else even);
    return thresholds[0..1];
}
