//! The Mooncake paper's cache-aware scheduling, beside which it shows what fetching is worth (FAST '25, fig. 5): Algorithm 1 without
//! transfers.
//!
//! The prefill instance is the one with the least estimated TTFT, queue and prefill of what is not stored on itself; the decode instance
//! the one with the least time between tokens. Nothing is fetched, so a prefix is where it was computed and nowhere else.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Request};
use kvasir_policy::{Description, Scheduler};

/// See the module documentation.
#[derive(Default)]
pub struct LocalCacheAware {
    /// Kept to spare an allocation per decision.
    ttft: Vec<f32>,
}

impl Scheduler for LocalCacheAware {
    fn describe(&self) -> Description {
        Description::scheduler("local-cache-aware", env!("CARGO_PKG_VERSION"))
    }

    fn schedule(&mut self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Decision {
        self.ttft.clear();
        self.ttft.extend(expected(cluster, request, candidates));
        cluster.fastest(request, candidates, &self.ttft)
    }

    fn explain(&self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Vec<f32> {
        expected(cluster, request, candidates).collect()
    }
}

fn expected(cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> impl Iterator<Item = f32> {
    (0..cluster.prefill.len()).map(move |slot| cluster.ttft_ms(slot, request, candidates))
}

kvasir_policy::export_scheduler!(LocalCacheAware);

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_policy::scheduler::{Column, DecodeRow, Kept, Layout, PrefillRow, Question, Reason};
    use kvasir_policy_testing::{asked, chooses_what_is_there};
    use proptest::prelude::*;

    /// Three prefill slots with queues of so many ms, and two decode slots, the second of which steps faster.
    fn cluster(queues: [f32; 3]) -> Kept<LocalCacheAware> {
        let mut kept = Kept::new(Box::<LocalCacheAware>::default());
        kept.open(&Layout::of(3, 2, 16).encode());
        for (slot, busy_until) in (0..).zip(queues) {
            let prefill = PrefillRow {
                slot,
                available: true,
                busy_until,
                cost_per_token: 1.0,
                ..PrefillRow::default()
            };
            kept.update_prefill(&prefill.encode());
        }
        for (slot, step_fixed) in [(0, 20.0), (1, 10.0)] {
            let decode =
                DecodeRow { slot, available: true, free_blocks: 100, step_fixed, ..DecodeRow::default() };
            kept.update_decode(&decode.encode());
        }
        kept
    }

    /// A prompt of 160 tokens, of which so many blocks are stored in each slot.
    fn ask(kept: &mut Kept<LocalCacheAware>, stored: [u32; 3]) -> Decision {
        let request = Request { prompt_tokens: 160, ttft_slo: 500.0, tbt_slo: 100.0, ..Request::default() };
        let question = Question::new(0.0, &request, 3, 2).with(Column::Prefix, &stored);
        kept.schedule(0.0, question.words())
    }

    #[test]
    fn a_prefix_is_worth_the_prefill_it_spares_and_a_queue_what_it_takes() {
        let mut kept = cluster([0.0, 30.0, 50.0]);
        assert_eq!(ask(&mut kept, [0; 3]), Decision::run(0, 1), "160 ms there");
        assert_eq!(ask(&mut kept, [0, 2, 0]), Decision::run(1, 1), "30 and 128 ms");
        assert_eq!(ask(&mut kept, [0, 1, 0]), Decision::run(0, 1), "30 and 144 ms are more than 160");
        assert_eq!(
            ask(&mut kept, [3, 9, 10]),
            Decision::run(1, 1),
            "46 ms beside 112 and 50; the longest is not fetched"
        );
    }

    #[test]
    fn who_would_miss_an_slo_is_told_by_how_much() {
        let late = ask(&mut cluster([400.0, 600.0, 700.0]), [0; 3]);
        assert_eq!(late, Decision::reject(Reason::Ttft, 60));
        assert_eq!(ask(&mut cluster([400.0, 600.0, 700.0]), [4, 0, 0]), Decision::run(0, 1), "496 ms");
    }

    proptest! {
        #[test]
        fn no_input_panics_and_what_is_chosen_is_there(asked in asked()) {
            chooses_what_is_there(LocalCacheAware::default(), &asked);
        }
    }
}
