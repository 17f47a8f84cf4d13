//! zig test: the policy runs natively, called as the host would. README.md has the whole command.
const std = @import("std");
const kv = @import("kvasir");
const Decision = kv.scheduler.Decision;
const host = kv.scheduler.Host(@import("policy.zig"));
const expectEqual = std.testing.expectEqual;

// Each one more than documented, as a later host may send.
const prefill_values = 20;
const decode_values = 22;
const words = 20;

fn zeros(comptime T: type, comptime count: usize) [count]T {
    return @splat(0);
}

fn prefill(slot: f32, available: f32, busy_until: f32) void {
    const row = [_]f32{ slot, available, busy_until, 10, 0.1 };
    host.updatePrefill(&(row ++ zeros(f32, prefill_values - row.len)));
}

fn decode(slot: f32, available: f32, sequences: f32) void {
    const row = [_]f32{ slot, available, sequences };
    host.updateDecode(&(row ++ zeros(f32, decode_values - row.len)));
}

/// 1,000 tokens; the columns 0 (prefix) and 3 (which prefill can serve it).
fn schedule(columns: [4]u32) Decision {
    const question = [_]u32{1000} ++ zeros(u32, 17) ++ [_]u32{ 0b1001, 0 } ++ columns;
    return host.schedule(50, &question);
}

test "requests go where the first token comes soonest" {
    host.open(&.{ 2, 2, 16, prefill_values, decode_values, words, 1, 6, 7, 99 });
    try expectEqual(Decision.reject(.no_instance, 1000), schedule(.{ 0, 0, 1, 1 }));
    prefill(0, 1, 0);
    prefill(1, 1, 100);
    decode(0, 1, 5);
    decode(1, 1, 4);
    try expectEqual(Decision.run(0, 1), schedule(.{ 0, 0, 1, 1 }));
    try expectEqual(Decision.run(1, 1), schedule(.{ 0, 50, 1, 1 })); // 80 ms of prefill saved, 50 of waiting
    try expectEqual(Decision.run(0, 1), schedule(.{ 0, 50, 1, 0 })); // 1 cannot serve it
    decode(1, 0, 4);
    try expectEqual(Decision.run(0, 0), schedule(.{ 0, 0, 1, 1 }));
    const plain = [_]u32{1000} ++ zeros(u32, words - 1);
    try std.testing.expectEqualSlices(f32, &.{ 110, 160 }, host.explain(50, &plain));
}
