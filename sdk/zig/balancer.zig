//! A balancer, `balancing` in sdk/wit/balancer.wit. It declares
//!
//! * `tick(now: Tick, thresholds: *[thresholds_max]f32) []const f32`: the part of `thresholds` that it filled, to have
//!   from now on; none = keep
const kv = @import("kvasir.zig");

pub const thresholds_max = 64;

pub const Tick = struct {
    now_ms: u64,
    /// Hit prefix blocks in per cent of referenced blocks since the last tick.
    hit_percent: f32,
    /// Requests since the last tick.
    rejected: f32,
    accepted: f32,
    /// Work queued, ms, per prefill slot; negative = unavailable.
    prefill_queue: []const f32,
    /// Step time, ms, per decode slot; negative = unavailable.
    decode_step: []const f32,
};

/// `balancing`, as the host calls it.
pub fn Host(comptime P: type) type {
    return struct {
        var thresholds: [thresholds_max]f32 = undefined;

        pub fn tick(now_ms: u64, cluster: []const f32, prefill_queue: []const f32, decode_step: []const f32) []const f32 {
            const now: Tick = .{
                .now_ms = now_ms,
                .hit_percent = cluster[0],
                .rejected = cluster[1],
                .accepted = cluster[2],
                .prefill_queue = prefill_queue,
                .decode_step = decode_step,
            };
            return P.tick(now, &thresholds);
        }
    };
}
