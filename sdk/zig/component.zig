//! The root of a component: exports the functions of the policy, which is the module `policy`, by the names and the
//! memory rules of the canonical ABI (docs/policy-languages.md).
const std = @import("std");
const kv = @import("kvasir");
const policy = @import("policy");

pub const panic = std.debug.FullPanic(trap);
pub const std_options: std.Options = .{ .logFn = logFn };

fn trap(message: []const u8, _: ?usize) noreturn {
    kv.log(.err, message);
    @trap();
}

fn logFn(
    comptime level: std.log.Level,
    comptime _: @EnumLiteral(),
    comptime format: []const u8,
    arguments: anytype,
) void {
    var buffer: [1024]u8 = undefined;
    kv.log(@field(kv.Level, @tagName(level)), std.fmt.bufPrint(&buffer, format, arguments) catch &buffer);
}

/// Lists of the host, from `cabi_realloc` to the end of the call that they are for.
var lists: std.heap.ArenaAllocator = .init(kv.allocator);
/// Kept from call to call: a full batch of events has 74 KB.
const lists_kept_bytes = 1 << 20;

fn done() void {
    _ = lists.reset(.{ .retain_with_limit = lists_kept_bytes });
}

fn cabiRealloc(old: [*]u8, old_size: usize, alignment: usize, size: usize) callconv(.c) [*]u8 {
    if (size == 0) return @ptrFromInt(alignment);
    const memory = lists.allocator().rawAlloc(size, .fromByteUnits(alignment), 0) orelse @panic("out of memory");
    const kept = @min(old_size, size);
    @memcpy(memory[0..kept], old[0..kept]);
    return memory;
}

/// A list or a string in memory.
fn Span(comptime T: type) type {
    return extern struct {
        at: [*]const T,
        length: usize,

        fn of(list: []const T) @This() {
            // An empty slice may point beyond the memory, which hosts refuse.
            const at = if (list.len == 0) @as([*]const T, @ptrFromInt(@alignOf(T))) else list.ptr;
            return .{ .at = at, .length = list.len };
        }

        fn slice(span: @This()) []const T {
            return span.at[0..span.length];
        }
    };
}
const Text = Span(u8);

/// An answer that is a list stays here until the next call.
fn Answer(comptime T: type) type {
    return struct {
        var span: Span(T) = undefined;

        fn of(list: []const T) *const Span(T) {
            span = .of(list);
            return &span;
        }
    };
}

fn expose(comptime interface: []const u8, comptime name: []const u8, comptime function: anytype) void {
    @export(&function, .{ .name = "kvasir:policy/" ++ interface ++ "@0.1.0#" ++ name });
}

fn exposeControl(comptime slot: []const u8) void {
    const Host = kv.Control(policy);
    const Setting = extern struct { name: Text, default: Text, doc: Text };
    const Description = extern struct { name: Text, version: Text, slot: Text, settings: Span(Setting) };
    const Result = extern struct { failed: u32, text: Text };
    const abi = struct {
        const settings = of: {
            var list: [policy.description.settings.len]Setting = undefined;
            for (&list, policy.description.settings) |*entry, s| {
                entry.* = .{ .name = .of(s.name), .default = .of(s.default), .doc = .of(s.doc) };
            }
            break :of list;
        };
        const description: Description = .{
            .name = .of(policy.description.name),
            .version = .of(policy.description.version),
            .slot = .of(slot),
            .settings = .of(&settings),
        };
        var result: Result = undefined;

        fn say(refusal: ?[]const u8) *const Result {
            result = .{ .failed = @intFromBool(refusal != null), .text = .of(refusal orelse "") };
            return &result;
        }

        fn describe() callconv(.c) *const Description {
            return &description;
        }

        fn configure(pairs: [*]const [2]Text, count: usize) callconv(.c) *const Result {
            defer done();
            const given = lists.allocator().alloc(Host.Pair, count) catch @panic("out of memory");
            for (given, pairs) |*pair, texts| pair.* = .{ .name = texts[0].slice(), .value = texts[1].slice() };
            return say(Host.configure(given));
        }

        fn exportState() callconv(.c) *const Text {
            return Answer(u8).of(Host.exportState());
        }

        fn importState(at: [*]const u8, length: usize) callconv(.c) *const Result {
            defer done();
            return say(Host.importState(at[0..length]));
        }
    };
    expose("control", "describe", abi.describe);
    expose("control", "configure", abi.configure);
    expose("control", "export-state", abi.exportState);
    expose("control", "import-state", abi.importState);
}

/// A function that takes one list and answers nothing.
fn taking(comptime T: type, comptime function: fn ([]const T) void) fn ([*]const T, usize) callconv(.c) void {
    return struct {
        fn call(at: [*]const T, length: usize) callconv(.c) void {
            defer done();
            function(at[0..length]);
        }
    }.call;
}

fn exposeScheduling() void {
    const Host = kv.scheduler.Host(policy);
    const abi = struct {
        var decision: kv.scheduler.Decision = undefined;

        fn schedule(now: f32, question: [*]const u32, length: usize) callconv(.c) *const kv.scheduler.Decision {
            defer done();
            decision = Host.schedule(now, question[0..length]);
            return &decision;
        }

        fn explain(now: f32, question: [*]const u32, length: usize) callconv(.c) *const Span(f32) {
            defer done();
            return Answer(f32).of(Host.explain(now, question[0..length]));
        }
    };
    expose("scheduling", "open", taking(u32, Host.open));
    expose("scheduling", "update-prefill", taking(f32, Host.updatePrefill));
    expose("scheduling", "update-decode", taking(f32, Host.updateDecode));
    expose("scheduling", "update-links", taking(f32, Host.updateLinks));
    expose("scheduling", "set-thresholds", taking(f32, Host.setThresholds));
    expose("scheduling", "schedule", abi.schedule);
    expose("scheduling", "explain", abi.explain);
}

fn exposeEviction() void {
    const Host = kv.evictor.Host(policy);
    const abi = struct {
        fn onEvents(base_ms: u64, words: [*]const u32, length: usize) callconv(.c) void {
            defer done();
            Host.onEvents(base_ms, words[0..length]);
        }

        fn selectVictims(now_ms: u64, want: u32) callconv(.c) *const Span(kv.evictor.Victim) {
            return Answer(kv.evictor.Victim).of(Host.selectVictims(now_ms, want));
        }
    };
    expose("eviction", "open", taking(u32, Host.open));
    expose("eviction", "update-tiers", taking(f32, Host.updateTiers));
    expose("eviction", "on-events", abi.onEvents);
    expose("eviction", "select-victims", abi.selectVictims);
}

fn exposeAdmission() void {
    const Host = kv.admitter.Host(policy);
    const abi = struct {
        fn admitRequest(words: [*]const u32, length: usize, values: [*]const f32, count: usize) callconv(.c) u64 {
            defer done();
            return Host.admitRequest(words[0..length], values[0..count]);
        }

        fn admitBlocks(tier: u32, stride: u32, words: [*]const u32, length: usize) callconv(.c) *const Span(kv.admitter.Store) {
            defer done();
            return Answer(kv.admitter.Store).of(Host.admitBlocks(tier, stride, words[0..length]));
        }
    };
    expose("admission", "update-load", taking(f32, Host.updateLoad));
    expose("admission", "admit-request", abi.admitRequest);
    expose("admission", "admit-blocks", abi.admitBlocks);
}

fn exposeBalancing() void {
    const Host = kv.balancer.Host(policy);
    const abi = struct {
        fn tick(
            now_ms: u64,
            cluster: [*]const f32,
            cluster_length: usize,
            prefill: [*]const f32,
            prefill_length: usize,
            decode: [*]const f32,
            decode_length: usize,
        ) callconv(.c) *const Span(f32) {
            defer done();
            const answer = Host.tick(now_ms, cluster[0..cluster_length], prefill[0..prefill_length], decode[0..decode_length]);
            return Answer(f32).of(answer);
        }
    };
    expose("balancing", "tick", abi.tick);
}

fn exposeLearning() void {
    const Host = kv.learning.Host(policy);
    const abi = struct {
        fn observe(stride: u32, words: [*]const u32, length: usize) callconv(.c) void {
            defer done();
            Host.observe(stride, words[0..length]);
        }

        fn publish() callconv(.c) *const Text {
            return Answer(u8).of(Host.publish());
        }
    };
    expose("learning", "observe", abi.observe);
    expose("learning", "publish", abi.publish);
    expose("learning", "adopt", taking(u8, Host.adopt));
}

comptime {
    @export(&cabiRealloc, .{ .name = "cabi_realloc" });
    if (@hasDecl(policy, "schedule")) {
        exposeScheduling();
        exposeControl("scheduler");
    } else if (@hasDecl(policy, "selectVictims")) {
        exposeEviction();
        exposeControl("evictor");
    } else if (@hasDecl(policy, "admitRequest")) {
        exposeAdmission();
        exposeControl("admitter");
    } else if (@hasDecl(policy, "tick")) {
        exposeBalancing();
        exposeControl("balancer");
    } else @compileError("policy.zig declares none of schedule, selectVictims, admitRequest, tick");
    if (@hasDecl(policy, "observe")) exposeLearning();
}
