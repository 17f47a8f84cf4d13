//! Refuses a request whose predicted times miss its SLO, and stores blocks that were used often enough.
const std = @import("std");
const kv = @import("kvasir");
const admitter = kv.admitter;

pub const description: kv.Description = .{ .name = "my-admitter", .version = "0.1.0", .settings = &.{
    .{ .name = "slack", .default = "1", .doc = "times its SLO that a predicted time may reach, 0.1 to 100" },
    .{ .name = "min-uses", .default = "2", .doc = "uses a block must have had to be stored in a lower tier, 0 to 1000" },
} };

var slack: f64 = 1;
var min_uses: f64 = 2;

pub fn configure(name: []const u8, value: []const u8) ?[]const u8 {
    if (std.mem.eql(u8, name, "slack")) {
        slack = kv.number(value, 0.1, 100) orelse return "slack: a number from 0.1 to 100";
    } else {
        min_uses = kv.number(value, 0, 1000) orelse return "min-uses: a number from 0 to 1000";
    }
    return null;
}

pub fn admitRequest(request: admitter.Request, forecast: admitter.Forecast) admitter.Verdict {
    if (request.get(.hints) & 1 == 1) return .accept; // it must run
    if (forecast.ttft > slack * request.float(.ttft_slo)) return .{ .refuse = .{ .reason = .ttft, .retry_after_ms = 1000 } };
    if (forecast.tbt > slack * request.float(.tbt_slo)) return .{ .refuse = .{ .reason = .tbt, .retry_after_ms = 1000 } };
    return .accept;
}

pub fn admitBlock(tier: u32, block: admitter.Block) admitter.Store {
    _ = tier;
    return if (@as(f64, @floatFromInt(block.uses)) >= min_uses) .store else .skip;
}
