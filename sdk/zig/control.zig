//! `control`, as the host calls it, for a policy of any slot.
const std = @import("std");
const kv = @import("kvasir.zig");

pub fn Control(comptime P: type) type {
    return struct {
        pub const Pair = struct { name: []const u8, value: []const u8 };

        /// Each returns null, or the text of a refusal.
        pub fn configure(given: []const Pair) ?[]const u8 {
            const settings: []const kv.Setting = P.description.settings;
            for (given) |pair| {
                for (settings) |setting| {
                    if (std.mem.eql(u8, setting.name, pair.name)) break;
                } else return unknown(pair.name);
            }
            for (settings) |setting| {
                var value = setting.default;
                for (given) |pair| {
                    if (std.mem.eql(u8, setting.name, pair.name)) value = pair.value;
                }
                if (@hasDecl(P, "configure")) {
                    if (P.configure(setting.name, value)) |refusal| return refusal;
                }
            }
            return null;
        }

        pub fn exportState() []const u8 {
            return if (@hasDecl(P, "exportState")) P.exportState() else "";
        }

        pub fn importState(state: []const u8) ?[]const u8 {
            return if (@hasDecl(P, "importState")) P.importState(state) else "this policy keeps no state";
        }

        var text: [128]u8 = undefined;

        fn unknown(name: []const u8) []const u8 {
            return std.fmt.bufPrint(&text, "unknown setting: {s}", .{name}) catch "unknown setting";
        }
    };
}
