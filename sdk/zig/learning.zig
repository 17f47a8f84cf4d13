//! A scheduler or admitter that learns, `learning` in sdk/wit/learning.wit. It declares
//!
//! * `observe(outcome: Outcome) void`: gets each outcome with a known end, on the learner's instance alone
//! * `publish() []const u8`: what instances that decide are to know, in a format of its own
//! * `adopt(knowledge: []const u8) void`: takes what the learner published; valid during the call only
const kv = @import("kvasir.zig");

/// Words of an outcome: decision and session are `long`, the times `float`, in ms, -1 = not known.
pub const Word = enum(u32) {
    end,
    reason,
    decision,
    tenant = 4,
    class,
    model,
    adapter,
    session,
    prefill = 10,
    decode,
    prompt_tokens,
    cached_tokens,
    fetched_blocks,
    decoded_tokens,
    ttft_predicted,
    ttft,
    tbt_predicted,
    tbt,
    queue_predicted,
    prefill_predicted,
    prefill_measured,
    host_run,
};

pub const End = enum(u32) { finished = 1, rejected, refused, given_up };

pub const Outcome = struct {
    end: End,
    record: kv.Record(Word),
};

/// `learning`, as the host calls it.
pub fn Host(comptime P: type) type {
    return struct {
        pub fn observe(stride: u32, words: []const u32) void {
            var rest = words;
            while (stride > 0 and rest.len >= stride) : (rest = rest[stride..]) {
                const end = @import("std").enums.fromInt(End, rest[0]) orelse continue;
                P.observe(Outcome{ .end = end, .record = .{ .words = rest[0..stride] } });
            }
        }

        pub fn publish() []const u8 {
            return P.publish();
        }

        pub fn adopt(knowledge: []const u8) void {
            P.adopt(knowledge);
        }
    };
}
