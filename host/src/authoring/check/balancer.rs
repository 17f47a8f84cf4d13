//! Clusters as balancers see them.

use super::Trial;
use super::panel::{Failure, Panel};
use super::trials::World;
use crate::policy::balancer::{BalancerHook, checked};
use crate::policy::record::{Call, Push};
use kvasir_policy::balancer::Snapshot;
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;

/// Prefill and decode slots, and what part of them is unavailable.
const KINDS: [(usize, usize, f64); 4] = [(0, 0, 0.0), (3, 2, 0.1), (4, 4, 1.0), (512, 512, 0.1)];

pub(super) struct Load {
    kind: usize,
    rng: ChaCha8Rng,
    now_ms: u64,
}

impl World for Load {
    type Hook = BalancerHook;
    const KINDS: &'static [&'static str] = &[
        "no instances",
        "3 prefill and 2 decode instances",
        "all instances unavailable",
        "512 and 512 instances",
    ];
    const ORDINARY: usize = 1;
    const SUCCESSOR_DECIDES_ALIKE: bool = true;

    fn new(kind: usize, _: &Trial, rng: ChaCha8Rng) -> Self {
        Self { kind, rng, now_ms: 0 }
    }

    /// A balancer is told everything with each tick.
    fn told(&self) -> Vec<Push> {
        Vec::new()
    }

    fn asked(&mut self) -> Call {
        Call::tick(&self.snapshot())
    }

    fn step(&mut self, panel: &mut Panel<BalancerHook>) -> Result<(), Failure> {
        let snapshot = self.snapshot();
        panel.ask("tick", |engine| checked(engine.tick(&snapshot)?)).map(drop)
    }
}

impl Load {
    fn snapshot(&mut self) -> Snapshot {
        self.now_ms += self.rng.random_range(100..2_000);
        let (prefill, decode, _) = KINDS[self.kind];
        Snapshot {
            now_ms: self.now_ms,
            prefill_queue_ms: self.column(prefill, 5_000.0),
            decode_step_ms: self.column(decode, 100.0),
            hit_rate_percent: self.rng.random_range(0.0..=100.0),
            rejected: self.rng.random_range(0..100),
            accepted: self.rng.random_range(0..1_000),
            compute_block_ms: self.rng.random_range(0.0..100.0),
            fetch_block_ms: self.rng.random_range(0.0..100.0),
        }
    }

    fn column(&mut self, slots: usize, most: f32) -> Vec<f32> {
        let (.., unavailable) = KINDS[self.kind];
        let rng = &mut self.rng;
        (0..slots)
            .map(|_| if rng.random_bool(unavailable) { -1.0 } else { rng.random_range(0.0..most) })
            .collect()
    }
}
