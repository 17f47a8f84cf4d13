//! A scheduler, `scheduling` in sdk/wit/scheduler.wit. It declares
//!
//! * `schedule(request: *const Request) Decision`
//!
//! and may declare
//!
//! * `explain(request: *const Request, scores: []f32) []const f32`: the part of `scores` that it filled; one score per
//!   prefill slot and, if wanted, one per decode slot behind these
//! * `opened() void`: the tables were emptied
//! * `updateLinks(links: Rows) void`, `setThresholds(values: []const f32) void`
const std = @import("std");
const kv = @import("kvasir.zig");

/// Columns of the prefill table.
pub const Prefill = enum {
    slot,
    available,
    busy_until,
    c0,
    c1,
    c2,
    t0,
    t1,
    queued,
    free_blocks,
    capacity,
    reported_at,
    identity,
    peer,
    host,
    domain,
    waiting,
    adapters,
    adapters_max,
    send,
};

/// Columns of the decode table.
pub const Decode = enum {
    slot,
    available,
    sequences,
    context,
    free_blocks,
    capacity,
    d0,
    d1,
    d2,
    coming,
    coming_context,
    reported_at,
    identity,
    peer,
    host,
    domain,
    waiting,
    t0,
    t1,
    adapters,
    adapters_max,
};

/// Columns of a request, by their bits; the scores are floats.
pub const Column = enum(u5) {
    prefix,
    prefix_hbm,
    prefix_dram,
    prefill_fit,
    decode_prefix,
    decode_fit,
    prefill_score,
    decode_score,
    decode_prefix_hbm,
    decode_prefix_dram,

    fn slots(which: Column) u32 {
        return switch (which) {
            .decode_prefix, .decode_fit, .decode_score, .decode_prefix_hbm, .decode_prefix_dram => cluster.decode.slots,
            else => cluster.prefill.slots,
        };
    }
};

/// One of the two tables, kept as the host pushes it.
pub fn Table(comptime C: type) type {
    return struct {
        values: []f32 = &.{},
        slots: u32 = 0,
        width: u32 = 0,

        const Self = @This();

        pub inline fn at(table: *const Self, slot: usize, column: C) f32 {
            return table.values[slot * table.width + @backingInt(column)];
        }

        fn open(table: *Self, slots: u32, width: u32) void {
            table.slots = slots;
            table.width = width;
            kv.renew(f32, &table.values, @as(usize, slots) * width, 0);
        }

        fn update(table: *Self, values: []const f32) void {
            const rows: kv.Rows = .{ .values = values, .width = table.width };
            for (0..rows.count()) |index| {
                const row = rows.row(index);
                if (!(row[0] >= 0 and row[0] < @as(f32, @floatFromInt(table.slots)))) continue;
                const slot: usize = @intFromFloat(row[0]);
                @memcpy(table.values[slot * table.width ..][0..table.width], row);
            }
        }
    };
}

/// What the host pushed.
pub const Cluster = struct {
    prefill: Table(Prefill) = .{},
    decode: Table(Decode) = .{},
    /// Tokens in one block.
    block_tokens: u32 = 0,
    domains: u32 = 0,
    /// Run of the host.
    run: u32 = 0,
};
pub var cluster: Cluster = .{};

var request_words: u32 = 0;
var link_values: u32 = 0;

pub const Request = struct {
    /// ms on the table clock.
    now: f32,
    record: kv.Record(kv.RequestWord),

    pub inline fn get(request: *const Request, word: kv.RequestWord) u32 {
        return request.record.get(word);
    }

    pub inline fn float(request: *const Request, word: kv.RequestWord) f32 {
        return request.record.float(word);
    }

    pub inline fn long(request: *const Request, word: kv.RequestWord) u64 {
        return request.record.long(word);
    }

    /// One word per slot of its table, if this request has that column.
    pub fn column(request: *const Request, which: Column) ?[]const u32 {
        const bits = request.get(.columns);
        const wanted = @backingInt(which);
        if (bits >> wanted & 1 == 0) return null;
        var start = request_words;
        for (0..wanted) |bit| {
            if (bits >> @intCast(bit) & 1 == 1) start += @as(Column, @fromBackingInt(@intCast(bit))).slots();
        }
        return request.record.words[start..][0..which.slots()];
    }
};

/// Fields as in the WIT text.
pub const Decision = extern struct {
    prefill: u32,
    decode: u32 = 0,
    transfer_blocks: u32 = 0,
    source: u32 = 0,
    reason: u32 = 0,
    retry_after: u32 = 0,
    session_memo: u64 = 0,
    tenant_charge: u64 = 0,

    pub fn run(prefill: u32, decode: u32) Decision {
        return .{ .prefill = prefill, .decode = decode };
    }

    pub fn reject(reason: kv.Reason, retry_after_ms: u32) Decision {
        return .{ .prefill = kv.none, .reason = @backingInt(reason), .retry_after = retry_after_ms };
    }
};

/// `scheduling`, as the host calls it.
pub fn Host(comptime P: type) type {
    return struct {
        var scores: []f32 = &.{};

        pub fn open(layout: []const u32) void {
            cluster.prefill.open(layout[0], layout[3]);
            cluster.decode.open(layout[1], layout[4]);
            cluster.block_tokens = layout[2];
            cluster.domains = layout[6];
            cluster.run = if (layout.len > 8) layout[8] else 0;
            request_words = layout[5];
            link_values = layout[7];
            kv.renew(f32, &scores, cluster.prefill.slots + cluster.decode.slots, 0);
            kv.callIfDeclared(P, "opened", .{});
        }

        pub fn updatePrefill(rows: []const f32) void {
            cluster.prefill.update(rows);
        }

        pub fn updateDecode(rows: []const f32) void {
            cluster.decode.update(rows);
        }

        pub fn updateLinks(rows: []const f32) void {
            kv.callIfDeclared(P, "updateLinks", .{kv.Rows{ .values = rows, .width = link_values }});
        }

        pub fn setThresholds(values: []const f32) void {
            kv.callIfDeclared(P, "setThresholds", .{values});
        }

        pub fn schedule(now: f32, question: []const u32) Decision {
            return P.schedule(&Request{ .now = now, .record = .{ .words = question } });
        }

        pub fn explain(now: f32, question: []const u32) []const f32 {
            if (!@hasDecl(P, "explain")) return &.{};
            return P.explain(&Request{ .now = now, .record = .{ .words = question } }, scores);
        }
    };
}
