//! See ../README.md.
const std = @import("std");
const kv = @import("kvasir");
const admitter = kv.admitter;

pub const description: kv.Description = .{ .name = "my-learner", .version = "0.1.0" };

var known: u32 = 0;
var bytes: [4]u8 = undefined;

fn fold(value: u32) void {
    known = (known *% 31 +% value) & 0xfffff;
}

pub fn observe(outcome: kv.learning.Outcome) void {
    fold(@backingInt(outcome.end));
    inline for (std.enums.values(kv.learning.Word)) |word| switch (word) {
        .end => {},
        .decision, .session => fold(@truncate(outcome.record.long(word) >> 20)),
        .ttft_predicted, .ttft, .tbt_predicted, .tbt, .queue_predicted, .prefill_predicted, .prefill_measured => {
            fold(@intFromFloat(2 * outcome.record.float(word)));
        },
        else => fold(outcome.record.get(word)),
    };
}

pub fn publish() []const u8 {
    std.mem.writeInt(u32, &bytes, known, .little);
    return &bytes;
}

pub fn adopt(knowledge: []const u8) void {
    if (knowledge.len == 4) known = std.mem.readInt(u32, knowledge[0..4], .little);
}

pub fn admitRequest(request: admitter.Request, forecast: admitter.Forecast) admitter.Verdict {
    _ = request;
    _ = forecast;
    return .{ .refuse = .{ .reason = .own, .retry_after_ms = known } };
}

pub fn admitBlock(tier: u32, block: admitter.Block) admitter.Store {
    _ = tier;
    _ = block;
    return .store;
}
