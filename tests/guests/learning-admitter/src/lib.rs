//! An admitter that learns by how much first tokens are later than predicted, and refuses what would be too late by that.

use kvasir_policy::admitter::{Blocks, Forecast, Request, Store, Verdict};
use kvasir_policy::learning::Outcomes;
use kvasir_policy::scheduler::Reason;
use kvasir_policy::{Admitter, Description, Learner};

#[derive(Default)]
pub struct Late {
    /// Mean over the last ones, ms.
    late_ms: f32,
    heard: u32,
}

impl Admitter for Late {
    fn describe(&self) -> Description {
        Description::admitter("late", "0.1.0")
    }

    fn admit_request(&mut self, request: &Request, forecast: &Forecast) -> Verdict {
        let excess_ms = forecast.ttft + self.late_ms - request.ttft_slo;
        if excess_ms > 0.0 {
            return Verdict::Reject { reason: Reason::Ttft as u32, retry_after_ms: excess_ms as u32 };
        }
        Verdict::Accept
    }

    fn admit_blocks(&mut self, _: u32, blocks: Blocks<'_>, answers: &mut Vec<Store>) {
        answers.extend(blocks.iter().map(|_| Store::Store));
    }
}

impl Learner for Late {
    fn observe(&mut self, outcomes: Outcomes<'_>) {
        for outcome in outcomes.iter() {
            let (Some(predicted), Some(measured)) = (outcome.ttft_ms.predicted, outcome.ttft_ms.measured)
            else {
                continue;
            };
            self.heard = self.heard.saturating_add(1);
            let late_ms = (measured - predicted).clamp(-1e6, 1e6);
            self.late_ms += (late_ms - self.late_ms) / self.heard.min(100) as f32;
        }
    }

    fn publish(&mut self) -> Vec<u8> {
        self.late_ms.to_le_bytes().to_vec()
    }

    fn adopt(&mut self, knowledge: &[u8]) {
        if let Ok(bytes) = knowledge.try_into() {
            self.late_ms = f32::from_le_bytes(bytes);
            let late = if self.late_ms > 0.0 { "late" } else { "in time" };
            kvasir_policy::log::info(&format!("first tokens are {late}"));
        }
    }
}

kvasir_policy::export_learning_admitter!(Late);
