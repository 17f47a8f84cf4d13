//! What a host reads from outside, one [`Target`] for each kind of input: any bytes at all may come, and none may
//! cause a panic. A target says more where there is more to say: what reads prints and reads again as the same, limits hold,
//! a refusal names what it refuses.
//!
//! `cargo xtask fuzz` looks for inputs that break this, guided by the branches that they take; `tests/corpora.rs` runs those
//! that were kept, as an ordinary test.

mod answers;
mod bundle;
mod cluster;
mod component;
mod config;
mod grpc;
mod hello;
mod input;
mod manifests;
mod nvme;
mod record;
mod remote;
mod settings;
mod state;
mod text;
mod threads;
mod trace;
mod trust;
mod twins;
mod wire;

/// A kind of input.
pub struct Target {
    /// Of its folder in `corpus/`, too.
    pub name: &'static str,
    /// Longest input that is tried; more would cost time and find nothing new.
    pub bytes_max: usize,
    /// Panics where a promise is broken.
    pub run: fn(&[u8]),
}

pub const TARGETS: [Target; 16] = [
    Target { name: "answers", bytes_max: 2 << 10, run: answers::run },
    Target { name: "bundle", bytes_max: 16 << 10, run: bundle::run },
    Target { name: "cluster", bytes_max: 8 << 10, run: cluster::run },
    Target { name: "component", bytes_max: 24 << 10, run: component::run },
    Target { name: "config", bytes_max: 4 << 10, run: config::run },
    Target { name: "grpc", bytes_max: 8 << 10, run: grpc::run },
    Target { name: "hello", bytes_max: 4 << 10, run: hello::run },
    Target { name: "manifests", bytes_max: 4 << 10, run: manifests::run },
    Target { name: "nvme", bytes_max: 8 << 10, run: nvme::run },
    Target { name: "record", bytes_max: 16 << 10, run: record::run },
    Target { name: "remote", bytes_max: 4 << 10, run: remote::run },
    Target { name: "settings", bytes_max: 1 << 10, run: settings::run },
    Target { name: "state", bytes_max: 8 << 10, run: state::run },
    Target { name: "trace", bytes_max: 8 << 10, run: trace::run },
    Target { name: "trust", bytes_max: 8 << 10, run: trust::run },
    Target { name: "wire", bytes_max: 4 << 10, run: wire::run },
];

/// The target of that name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

/// What kind of input follows, and the input.
fn kind(data: &[u8]) -> Option<(u8, &[u8])> {
    data.split_first().map(|(kind, rest)| (*kind, rest))
}
