//! Kvasir policies in Zig: what those of every slot share. A policy is a file that declares `description` and the
//! functions of its slot, listed in scheduler.zig, evictor.zig, admitter.zig and balancer.zig; one that learns declares
//! those of learning.zig, too. What each call means stands in the WIT text (sdk/wit).
//!
//! Whatever its slot, a policy may also declare
//!
//! * `configure(name: []const u8, value: []const u8) ?[]const u8`: gets each setting once, with the operator's value or
//!   the default, and returns null or the text of a refusal. Unknown settings are refused before.
//! * `exportState() []const u8` and `importState(state: []const u8) ?[]const u8`: see `control` in common.wit.
const std = @import("std");
const builtin = @import("builtin");

pub const scheduler = @import("scheduler.zig");
pub const evictor = @import("evictor.zig");
pub const admitter = @import("admitter.zig");
pub const balancer = @import("balancer.zig");
pub const learning = @import("learning.zig");
pub const Control = @import("control.zig").Control;

/// No slot, no parent, never.
pub const none: u32 = std.math.maxInt(u32);

pub const Setting = struct {
    name: []const u8,
    /// As text.
    default: []const u8,
    /// What it does, with its unit.
    doc: []const u8,
};

pub const Description = struct {
    name: []const u8,
    version: []const u8,
    settings: []const Setting = &.{},
};

/// Reasons of a rejection.
pub const Reason = enum(u32) { ttft = 1, tbt, no_instance, no_memory, own, _ };

/// What a policy keeps beyond a call is allocated here.
pub const allocator = if (builtin.cpu.arch.isWasm()) std.heap.wasm_allocator else std.heap.page_allocator;

/// Frees what `slice` points to and gives it `count` times `value`: for `open`, which comes again. Traps without memory.
pub fn renew(comptime T: type, slice: *[]T, count: usize, value: T) void {
    allocator.free(slice.*);
    slice.* = allocator.alloc(T, count) catch @panic("out of memory");
    @memset(slice.*, value);
}

/// The number that a setting's text says, if it is within `low` to `high`.
pub fn number(text: []const u8, low: f64, high: f64) ?f64 {
    const value = std.fmt.parseFloat(f64, text) catch return null;
    return if (value >= low and value <= high) value else null;
}

pub const Level = enum(u32) { err = 1, warn, info, debug };

/// Adds a line to the policy's log; so do the functions of `std.log`. In tests it goes to standard error.
pub fn log(level: Level, text: []const u8) void {
    if (builtin.cpu.arch.isWasm()) {
        hostLog(@backingInt(level), text.ptr, text.len);
    } else {
        std.debug.print("log {s}: {s}\n", .{ @tagName(level), text });
    }
}

const hostLog = @extern(*const fn (u32, [*]const u8, usize) callconv(.c) void, .{
    .name = "log",
    .library_name = "kvasir:policy/log@0.1.0",
});

/// A record of words, as long as the host says; what `Word` does not name is of a later host.
pub fn Record(comptime Word: type) type {
    return struct {
        words: []const u32,

        const Self = @This();

        pub inline fn get(self: Self, word: Word) u32 {
            return self.words[@backingInt(word)];
        }

        /// The float whose bits stand there.
        pub inline fn float(self: Self, word: Word) f32 {
            return @bitCast(self.get(word));
        }

        /// The u64 that begins there.
        pub inline fn long(self: Self, word: Word) u64 {
            const at = @backingInt(word);
            return self.words[at] | @as(u64, self.words[at + 1]) << 32;
        }
    };
}

/// Words of a request: session, seed and the memos are `long`, the SLOs `float`, in ms.
pub const RequestWord = enum(u32) {
    prompt_tokens,
    output_tokens,
    class,
    tenant,
    priority,
    hints,
    session,
    seed = 8,
    ttft_slo = 10,
    tbt_slo,
    model,
    adapter,
    session_memo,
    tenant_memo = 16,
    columns = 18,
};

/// Rows of floats, each as wide as the host says.
pub const Rows = struct {
    values: []const f32,
    width: usize,

    pub fn count(rows: Rows) usize {
        return if (rows.width == 0) 0 else rows.values.len / rows.width;
    }

    pub fn row(rows: Rows, index: usize) []const f32 {
        return rows.values[index * rows.width ..][0..rows.width];
    }
};

/// Optional functions of a policy are called if it declares them.
pub inline fn callIfDeclared(comptime P: type, comptime name: []const u8, arguments: anytype) void {
    if (@hasDecl(P, name)) @call(.auto, @field(P, name), arguments);
}
