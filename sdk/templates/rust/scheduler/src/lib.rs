//! Sends a request where its first token comes soonest, and its decoding to the instance with the fewest
//! sequences.

use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Reason, Request};
use kvasir_policy::{Description, Scheduler};

#[derive(Default)]
pub struct MyScheduler;

/// Time until the prefill at each slot is done, ms; infinite if it cannot serve the request.
fn first_tokens(cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Vec<f32> {
    let prefill = &cluster.prefill;
    let first_token = |slot: usize| {
        if prefill.available[slot] != 1.0 || !candidates.can_prefill(slot) {
            return f32::INFINITY;
        }
        let stored = (candidates.prefix_of(slot) * cluster.block_size_tokens) as f32;
        let computed = (request.prompt_tokens as f32 - stored).max(0.0);
        (prefill.busy_until[slot] - cluster.now).max(0.0)
            + prefill.cost_fixed[slot]
            + prefill.cost_per_token[slot] * computed
            + prefill.cost_per_pair[slot] * computed * (stored + computed / 2.0)
    };
    (0..prefill.len()).map(first_token).collect()
}

/// Sequences decoded at each slot, now or soon; infinite if it cannot serve the request.
fn sequences(cluster: &Cluster, candidates: Candidates<'_>) -> Vec<f32> {
    let decode = &cluster.decode;
    let sequences = |slot: usize| match decode.available[slot] == 1.0 && candidates.can_decode(slot) {
        true => decode.sequences[slot] + decode.arriving_sequences[slot],
        false => f32::INFINITY,
    };
    (0..decode.len()).map(sequences).collect()
}

/// The first slot with the lowest finite score.
fn least(scores: &[f32]) -> Option<u32> {
    let finite = (0..).zip(scores).filter(|(_, score)| score.is_finite());
    finite.min_by(|a, b| a.1.total_cmp(b.1)).map(|(slot, _)| slot)
}

impl Scheduler for MyScheduler {
    fn describe(&self) -> Description {
        Description::scheduler("my-scheduler", env!("CARGO_PKG_VERSION"))
    }

    fn schedule(&mut self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Decision {
        let prefill = least(&first_tokens(cluster, request, candidates));
        let decode = least(&sequences(cluster, candidates));
        match (prefill, decode) {
            (Some(prefill), Some(decode)) => Decision::run(prefill, decode),
            _ => Decision::reject(Reason::NoInstance, 1_000),
        }
    }

    fn explain(&self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Vec<f32> {
        first_tokens(cluster, request, candidates)
    }
}

kvasir_policy::export_scheduler!(MyScheduler);

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_policy::scheduler::{Column, DecodeRow, Kept, Layout, PrefillRow, Question};

    fn prefill(policy: &mut Kept<MyScheduler>, slot: u16, busy_until: f32) {
        let row = PrefillRow {
            slot,
            available: true,
            busy_until,
            cost_fixed: 10.0,
            cost_per_token: 0.125,
            ..Default::default()
        };
        policy.update_prefill(&row.encode());
    }

    fn decode(policy: &mut Kept<MyScheduler>, slot: u16, available: bool, sequences: u32) {
        policy.update_decode(&DecodeRow { slot, available, sequences, ..Default::default() }.encode());
    }

    /// 1,000 tokens.
    fn schedule(policy: &mut Kept<MyScheduler>, prefix: [u32; 2], fit: [u32; 2]) -> Decision {
        let request = Request { prompt_tokens: 1_000, ..Default::default() };
        let question = Question::new(50.0, &request, 2, 2)
            .with(Column::Prefix, &prefix)
            .with(Column::EligiblePrefill, &fit);
        policy.schedule(question.now(), question.words())
    }

    #[test]
    fn goes_where_the_first_token_comes_soonest() {
        let policy = &mut Kept::new(Box::new(MyScheduler));
        policy.open(&Layout::of(2, 2, 16).encode());
        assert_eq!(schedule(policy, [0, 0], [1, 1]), Decision::reject(Reason::NoInstance, 1_000));
        prefill(policy, 0, 0.0);
        prefill(policy, 1, 100.0);
        decode(policy, 0, true, 5);
        decode(policy, 1, true, 4);
        assert_eq!(schedule(policy, [0, 0], [1, 1]), Decision::run(0, 1));
        assert_eq!(schedule(policy, [0, 50], [1, 1]), Decision::run(1, 1)); // 100 ms of prefill saved, 50 of waiting
        assert_eq!(schedule(policy, [0, 50], [1, 0]), Decision::run(0, 1)); // 1 cannot serve it
        decode(policy, 1, false, 4);
        assert_eq!(schedule(policy, [0, 0], [1, 1]), Decision::run(0, 0));
        let question = Question::new(50.0, &Request { prompt_tokens: 1_000, ..Default::default() }, 2, 2);
        assert_eq!(policy.explain(question.now(), question.words()), [135.0, 185.0]);
    }
}
