//! The threshold that Mooncake leaves to the operator, by what blocks cost here and now.
//!
//! Algorithm 1 fetches a prefix that is longer than an instance's own by a factor. It weighs the transfer against waiting elsewhere,
//! never against computing the same blocks on the spot. Here: while a block is fetched at less than it costs to compute, every
//! longer prefix may be fetched, and hot ones spread; else (a slow or a crowded network, a small model) none.
//!
//! Computing costs more than its own time: who waits behind it waits as much longer. In a queue that is busy for a part ρ of the
//! time, that multiplies it by 1 / (1 - ρ) (M/M/1). Without this, what is right for an idle cluster drowns a busy one.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::balancer::Snapshot;
use kvasir_policy::{Balancer, Description, Settings};

/// A factor that no prefix has.
const NEVER: f32 = 1e6;
/// Part that a tick has in the costs: prompts differ from one second to the next.
const WEIGHT: f32 = 0.1;
/// How far the costs must pass each other before the answer changes, so that it does not change all the time.
const BAND: f32 = 0.1;
/// The most that a queue is taken to be busy.
const BUSY_MAX: f32 = 0.99;

pub struct Adaptive {
    /// While fetching pays.
    threshold: f32,
    /// Of a block, ms: means over the last ticks. `None` until one has told.
    costs: Option<Costs>,
    /// Part of the available prefill instances that have something to do, likewise.
    busy: Option<f32>,
    pays: bool,
}

#[derive(Clone, Copy)]
struct Costs {
    compute: f32,
    fetch: f32,
}

impl Default for Adaptive {
    fn default() -> Self {
        Self { threshold: 1.0, costs: None, busy: None, pays: true }
    }
}

impl Balancer for Adaptive {
    fn describe(&self) -> Description {
        Description::balancer("adaptive", env!("CARGO_PKG_VERSION")).setting(
            "kvcache-balancing-threshold",
            1.0,
            "best prefix over own prefix beyond which the scheduler considers a transfer, while that costs less than computing",
        )
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.threshold = settings.number("kvcache-balancing-threshold", 1.0..=1e6)? as f32;
        Ok(())
    }

    fn tick(&mut self, state: &Snapshot) -> Vec<f32> {
        let working = busy(&state.prefill_queue_ms);
        // The first tick counts whole: a policy may come into service in the middle of a rush.
        let busy = self.busy.map_or(working, |before| mean(before, working));
        self.busy = Some(busy);
        let now = Costs { compute: state.compute_block_ms, fetch: state.fetch_block_ms };
        // Without a request nothing is known of prompts.
        if state.accepted > 0 && now.is_known() {
            self.costs = Some(self.costs.map_or(now, |before| before.toward(now)));
        }
        let Some(costs) = self.costs else { return Vec::new() };
        let band = if self.pays { 1.0 + BAND } else { 1.0 - BAND };
        self.pays = costs.fetch * (1.0 - busy.min(BUSY_MAX)) < costs.compute * band;
        vec![if self.pays { self.threshold } else { NEVER }]
    }
}

/// Part of the available instances that have something to do.
fn busy(queue_ms: &[f32]) -> f32 {
    let (mut available, mut busy) = (0, 0);
    for &ms in queue_ms.iter().filter(|ms| **ms >= 0.0) {
        available += 1;
        busy += u32::from(ms > 0.0);
    }
    busy as f32 / available.max(1) as f32
}

/// A mean over ticks, of which the last one counts most.
fn mean(before: f32, now: f32) -> f32 {
    before + WEIGHT * (now - before)
}

impl Costs {
    fn is_known(self) -> bool {
        [self.compute, self.fetch].iter().all(|ms| ms.is_finite() && *ms > 0.0)
    }

    fn toward(self, now: Self) -> Self {
        Self { compute: mean(self.compute, now.compute), fetch: mean(self.fetch, now.fetch) }
    }
}

kvasir_policy::export_balancer!(Adaptive);

#[cfg(test)]
mod tests {
    use super::*;

    fn tick(balancer: &mut Adaptive, accepted: u32, compute_block_ms: f32, fetch_block_ms: f32) -> Vec<f32> {
        balancer.tick(&Snapshot { accepted, compute_block_ms, fetch_block_ms, ..Snapshot::default() })
    }

    #[test]
    fn fetches_where_that_is_faster_than_computing() {
        let check = |compute: f32, fetch: f32, expected: &[f32]| {
            assert_eq!(tick(&mut Adaptive::default(), 1, compute, fetch), expected, "{compute} {fetch}");
        };
        check(50.0, 13.0, &[1.0]);
        check(50.0, 170.0, &[NEVER]);
        // Nothing is known, as from a host that does not tell: what is in force stays.
        for unknown in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            check(unknown, 13.0, &[]);
            check(50.0, unknown, &[]);
        }
    }

    #[test]
    fn answers_slowly_and_not_to_and_fro() {
        let mut balancer = Adaptive::default();
        assert_eq!(tick(&mut balancer, 1, 50.0, 10.0), [1.0]);
        // One second of long transfers says little; a minute of them does.
        assert_eq!(tick(&mut balancer, 1, 50.0, 100.0), [1.0]);
        let answers: Vec<f32> = (0..60).map(|_| tick(&mut balancer, 1, 50.0, 100.0)[0]).collect();
        assert!(answers.is_sorted() && answers[59] == NEVER, "{answers:?}");
        // A little to either side of equal costs changes nothing.
        (0..100).for_each(|_| drop(tick(&mut balancer, 1, 50.0, 50.0)));
        let near: Vec<f32> = (0..60).map(|n| tick(&mut balancer, 1, 50.0, [46.0, 54.0][n % 2])[0]).collect();
        assert!(near.iter().all(|&threshold| threshold == NEVER), "{near:?}");
        // While nobody asks, the length of prompts is unknown, and what was learned stays.
        (0..1_000).for_each(|_| assert_eq!(tick(&mut balancer, 0, 50.0, 1.0), [NEVER]));
    }

    #[test]
    fn a_busy_cluster_fetches_what_an_idle_one_computes() {
        let mut balancer = Adaptive::default();
        let mut tick = |queue: &[f32]| {
            let state = Snapshot {
                accepted: 1,
                compute_block_ms: 50.0,
                fetch_block_ms: 150.0,
                prefill_queue_ms: queue.to_vec(),
                ..Snapshot::default()
            };
            (0..100).map(|_| balancer.tick(&state)[0]).last()
        };
        assert_eq!(tick(&[0.0, 0.0, -1.0]), Some(NEVER), "three times as dear");
        assert_eq!(tick(&[700.0, 0.0, -1.0]), Some(NEVER), "half of the time is worth twice as much");
        assert_eq!(tick(&[700.0, 9.0, -1.0]), Some(1.0));
        assert_eq!(tick(&[-1.0, f32::NAN]), Some(NEVER), "nobody is there");

        let rush = Snapshot { prefill_queue_ms: vec![700.0; 8], accepted: 1, ..Snapshot::default() };
        let rush = Snapshot { compute_block_ms: 50.0, fetch_block_ms: 150.0, ..rush };
        assert_eq!(Adaptive::default().tick(&rush), [1.0], "also when it has just come");
    }

    #[test]
    fn the_threshold_while_it_pays_is_the_operators() {
        let mut balancer = Adaptive::default();
        let set = |value: &str| vec![("kvcache-balancing-threshold".to_owned(), value.to_owned())];
        let settings = Settings::new(&balancer.describe(), &set("2.5")).expect("known setting");
        balancer.configure(&settings).expect("in range");
        assert_eq!(tick(&mut balancer, 1, 50.0, 13.0), [2.5]);
        let low = Settings::new(&balancer.describe(), &set("0.5"));
        assert!(low.is_err() || low.is_ok_and(|low| balancer.configure(&low).is_err()));
    }
}
