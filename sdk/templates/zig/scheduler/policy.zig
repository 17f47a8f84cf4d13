//! Sends a request where its first token comes soonest, and its decoding to the instance with the fewest sequences.
const std = @import("std");
const kv = @import("kvasir");
const Request = kv.scheduler.Request;
const Decision = kv.scheduler.Decision;
const cluster = &kv.scheduler.cluster;

pub const description: kv.Description = .{ .name = "my-scheduler", .version = "0.1.0" };

const Score = fn (request: *const Request, slot: usize) f32;

/// Time until the prefill at `slot` is done, ms; infinite if it cannot serve the request.
fn firstToken(request: *const Request, slot: usize) f32 {
    const row = &cluster.prefill;
    if (row.at(slot, .available) != 1) return std.math.inf(f32);
    if (request.column(.prefill_fit)) |fit| if (fit[slot] == 0) return std.math.inf(f32);
    const blocks = if (request.column(.prefix)) |prefix| prefix[slot] else 0;
    const stored: f32 = @floatFromInt(blocks * cluster.block_tokens);
    const prompt: f32 = @floatFromInt(request.get(.prompt_tokens));
    const computed = @max(prompt - stored, 0);
    return @max(row.at(slot, .busy_until) - request.now, 0) + row.at(slot, .c0) + row.at(slot, .c1) * computed +
        row.at(slot, .c2) * computed * (stored + computed / 2);
}

/// Sequences decoded there, now or soon; infinite if it cannot serve the request.
fn sequences(request: *const Request, slot: usize) f32 {
    if (cluster.decode.at(slot, .available) != 1) return std.math.inf(f32);
    if (request.column(.decode_fit)) |fit| if (fit[slot] == 0) return std.math.inf(f32);
    return cluster.decode.at(slot, .sequences) + cluster.decode.at(slot, .coming);
}

fn least(request: *const Request, slots: u32, score: Score) ?u32 {
    var best: ?u32 = null;
    var lowest = std.math.inf(f32);
    for (0..slots) |slot| {
        const value = score(request, slot);
        if (value >= lowest) continue;
        lowest = value;
        best = @intCast(slot);
    }
    return best;
}

pub fn schedule(request: *const Request) Decision {
    const prefill = least(request, cluster.prefill.slots, firstToken);
    const decode = least(request, cluster.decode.slots, sequences);
    return .run(prefill orelse return .reject(.no_instance, 1000), decode orelse return .reject(.no_instance, 1000));
}

pub fn explain(request: *const Request, scores: []f32) []const f32 {
    for (scores[0..cluster.prefill.slots], 0..) |*score, slot| score.* = firstToken(request, slot);
    return scores[0..cluster.prefill.slots];
}
