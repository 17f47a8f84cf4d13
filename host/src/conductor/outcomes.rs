//! What came of requests, in the words of policies that learn from it.

use super::Rejected;
use crate::fleet::{Admission, Ask, Ended};
use kvasir_policy::learning::{End, Outcome, Times};

/// The outcome of a request that was booked.
pub(super) fn ended(end: End, ended: &Ended) -> Outcome {
    let placed = of_placement(&ended.ask, &ended.admission, ended.identities);
    Outcome {
        end,
        decision: ended.id,
        decoded_tokens: ended.decoded_tokens,
        ttft_ms: Times { measured: ms(ended.ttft_ms), ..placed.ttft_ms },
        tbt_ms: Times { measured: ms(ended.tbt_ms), ..placed.tbt_ms },
        prefill_ms: Times { measured: ms(ended.prefill_ms), ..placed.prefill_ms },
        ..placed
    }
}

/// The outcome of a request that was not. `identities` are those of the placement that the admitter refused.
pub(super) fn rejected(ask: &Ask, rejected: &Rejected, identities: [u32; 2]) -> Outcome {
    let reason = rejected.reason;
    match &rejected.refused {
        Some(admission) => Outcome { end: End::Refused, reason, ..of_placement(ask, admission, identities) },
        None => Outcome { end: End::Rejected, reason, ..of_request(ask) },
    }
}

fn of_request(ask: &Ask) -> Outcome {
    Outcome {
        tenant: ask.tenant,
        class: ask.class,
        model: ask.needs.model.unwrap_or(0),
        adapter: ask.needs.adapter,
        session: ask.session,
        prompt_tokens: ask.prompt_tokens,
        ..Outcome::default()
    }
}

fn of_placement(ask: &Ask, admission: &Admission, [prefill, decode]: [u32; 2]) -> Outcome {
    let predicted = |time| Times { predicted: ms(Some(time)), measured: None };
    Outcome {
        prefill,
        decode,
        cached_tokens: admission.cached_tokens,
        fetched_blocks: admission.fetched_blocks,
        ttft_ms: predicted(admission.ttft_ms),
        tbt_ms: predicted(admission.tbt_ms),
        queue_ms: ms(Some(admission.queue_ms)),
        prefill_ms: predicted(admission.prefill_ms),
        ..of_request(ask)
    }
}

fn ms(time: Option<f64>) -> Option<f32> {
    time.map(|ms| ms as f32)
}
