//! An admitter, `admission` in sdk/wit/admitter.wit. It declares
//!
//! * `admitRequest(request: Request, forecast: Forecast) Verdict`
//! * `admitBlock(tier: u32, block: Block) Store`
//!
//! and may declare `updateLoad(values: []const f32) void`.
const kv = @import("kvasir.zig");

/// As a scheduler gets it, without its columns.
pub const Request = kv.Record(kv.RequestWord);

/// Times in ms.
pub const Forecast = struct {
    ttft: f32,
    tbt: f32,
    /// Part of the tenant's quota in use, 1 = all of it.
    tenant_part: f32,
    queue: f32,
    prefill: f32,
    transfer: f32,
    /// Prompt tokens that need not be computed.
    tokens_stored: f32,
    /// Every value, also those of later hosts.
    values: []const f32,
};

pub const Verdict = union(enum) {
    accept,
    /// Time to wait before a retry, ms.
    queue: u32,
    refuse: struct { reason: kv.Reason, retry_after_ms: u32 },

    fn encode(verdict: Verdict) u64 {
        return switch (verdict) {
            .accept => 0,
            .queue => |wait| 1 | @as(u64, wait) << 32,
            .refuse => |no| 2 | @as(u64, @backingInt(no.reason)) << 8 | @as(u64, no.retry_after_ms) << 32,
        };
    }
};

pub const Block = struct {
    class: u32,
    uses: u32,
    depth: u32,
    size: u32,
    /// ms since it was last offered to this tier and not stored, or `none`.
    last_offered_ms: u32,
    tenant: u32,
};

/// What happens to a block offered to a tier.
pub const Store = enum(u32) { skip, store, colder };

/// `admission`, as the host calls it.
pub fn Host(comptime P: type) type {
    return struct {
        var answers: []Store = &.{};

        pub fn updateLoad(values: []const f32) void {
            kv.callIfDeclared(P, "updateLoad", .{values});
        }

        pub fn admitRequest(request: []const u32, values: []const f32) u64 {
            const forecast: Forecast = .{
                .ttft = values[0],
                .tbt = values[1],
                .tenant_part = values[2],
                .queue = values[3],
                .prefill = values[4],
                .transfer = values[5],
                .tokens_stored = values[6],
                .values = values,
            };
            const verdict: Verdict = P.admitRequest(Request{ .words = request }, forecast);
            return verdict.encode();
        }

        pub fn admitBlocks(tier: u32, stride: u32, words: []const u32) []const Store {
            const count = if (stride == 0) 0 else words.len / stride;
            if (answers.len < count) kv.renew(Store, &answers, count, .skip);
            for (answers[0..count], 0..) |*answer, index| {
                const block = words[index * stride ..];
                answer.* = P.admitBlock(tier, Block{
                    .class = block[0] & 0xffff,
                    .uses = block[0] >> 16,
                    .depth = block[1],
                    .size = block[2],
                    .last_offered_ms = block[3],
                    .tenant = block[4],
                });
            }
            return answers[0..count];
        }
    };
}
