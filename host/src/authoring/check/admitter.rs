//! Requests and blocks that admitters are tried with.

use super::Trial;
use super::panel::{Failure, Panel};
use super::trials::World;
use crate::policy::admitter::AdmitterHook;
use crate::policy::record::{Call, Push, bits};
use kvasir_policy::admitter::{Block, Forecast, Load, Request};
use rand::{Rng as _, RngExt as _};
use rand_chacha::ChaCha8Rng;

const IDLE: usize = 1;
const OVERLOADED: usize = 2;

pub(super) struct Door {
    kind: usize,
    rng: ChaCha8Rng,
    load: Load,
}

impl World for Door {
    type Hook = AdmitterHook;
    const KINDS: &'static [&'static str] = &[
        "an ordinary load",
        "an idle cluster, empty requests and lists",
        "an overload, batches of 256 blocks",
    ];
    const ORDINARY: usize = 0;
    const SUCCESSOR_DECIDES_ALIKE: bool = true;

    fn new(kind: usize, _: &Trial, rng: ChaCha8Rng) -> Self {
        Self { kind, rng, load: Load::default() }
    }

    fn told(&self) -> Vec<Push> {
        vec![("update-load".to_owned(), bits(&self.load.encode()))]
    }

    fn asked(&mut self) -> Call {
        if self.rng.random_bool(0.5) {
            return Call::admit_request(&self.request().encode(), &self.forecast());
        }
        let tier = self.rng.random_range(1..=4);
        Call::admit_blocks(tier, self.blocks())
    }

    fn step(&mut self, panel: &mut Panel<AdmitterHook>) -> Result<(), Failure> {
        if self.rng.random_bool(0.2) {
            self.load = self.new_load();
            let load = self.load;
            panel.tell("update-load", |engine| engine.update_load(&load))?;
        }
        for _ in 0..4 {
            let (request, forecast) = (self.request().encode(), self.forecast());
            panel.ask("admit-request", |engine| engine.admit_request(&request, &forecast))?;
        }
        let tier = self.rng.random_range(1..=4);
        let words = self.blocks();
        panel.ask("admit-blocks", |engine| engine.admit_blocks(tier, &words))?;
        Ok(())
    }
}

impl Door {
    /// Up to `most` in an ordinary load, nothing in an idle cluster, a thousand times as much in an overload.
    fn amount(&mut self, most: f32) -> f32 {
        match self.kind {
            IDLE => 0.0,
            OVERLOADED => self.rng.random_range(most..1e3 * most),
            _ => self.rng.random_range(0.0..most),
        }
    }

    fn new_load(&mut self) -> Load {
        Load {
            prefill_queue_mean_ms: self.amount(500.0),
            prefill_queue_least_ms: self.amount(100.0),
            decode_step_ms: self.amount(50.0),
            decode_step_forecast_ms: self.amount(80.0),
            admitted_per_second: self.amount(100.0),
            decode_memory_used: self.amount(1.0).min(1.0),
        }
    }

    fn request(&mut self) -> Request {
        if self.kind == IDLE {
            return Request::default();
        }
        let rng = &mut self.rng;
        let slo = |rng: &mut ChaCha8Rng, most: f32| {
            if rng.random_bool(0.3) { f32::INFINITY } else { rng.random_range(0.0..most) }
        };
        Request {
            prompt_tokens: rng.random_range(0..100_000),
            output_tokens: rng.random_range(0..2_000),
            class: rng.random_range(0..4),
            tenant: rng.random_range(0..3),
            priority: rng.random_range(0..3),
            hints: rng.random_range(0..4),
            session: rng.random_range(0..5),
            seed: rng.next_u64(),
            ttft_slo: slo(rng, 5_000.0),
            tbt_slo: slo(rng, 100.0),
            model: rng.random_range(0..3),
            adapter: rng.random_range(0..3),
            session_memo: rng.next_u64(),
            tenant_memo: rng.next_u64(),
        }
    }

    fn forecast(&mut self) -> Forecast {
        Forecast {
            ttft: self.amount(4_000.0),
            tbt: self.amount(100.0),
            tenant_share: self.amount(1.0),
            queue: self.amount(1_000.0),
            prefill: self.amount(2_000.0),
            transfer: self.amount(100.0),
            cached_tokens: self.amount(10_000.0),
            handover: self.amount(50.0),
        }
    }

    fn blocks(&mut self) -> Vec<u32> {
        let count = match self.kind {
            IDLE => 0,
            OVERLOADED => 256,
            _ => self.rng.random_range(1..20),
        };
        let rng = &mut self.rng;
        let mut block = || Block {
            class: rng.random_range(0..4),
            uses: if rng.random_bool(0.05) { u16::MAX } else { rng.random_range(0..9) },
            depth: rng.random_range(0..1_000),
            size_bytes: rng.random_range(0..8 << 20),
            last_offer_ms: rng.random_bool(0.5).then(|| rng.random_range(0..1_000_000)),
            tenant: rng.random_range(0..3),
        };
        (0..count).flat_map(|_| block().encode()).collect()
    }
}
