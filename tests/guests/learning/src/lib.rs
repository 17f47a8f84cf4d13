//! A scheduler that learns how many requests were finished, and says in its log what its deciding half knows of that. It
//! misbehaves as its setting `mode` says: from the `after`-th outcome on, or at once.

use guest_harm::Harm;
use kvasir_policy::learning::{End, Outcomes};
use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Request};
use kvasir_policy::{Description, Learner, Scheduler, Settings};

const MODES: [&str; 4] = ["publish-too-much", "trap-on-adopt", "trap-on-import", "export-too-much"];

#[derive(Default)]
pub struct Counting {
    harm: Harm,
    finished: u64,
}

impl Scheduler for Counting {
    fn describe(&self) -> Description {
        Harm::describe(Description::scheduler("counting", "0.1.0"))
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.harm.configure(settings, &MODES)
    }

    fn schedule(&mut self, cluster: &Cluster, _: &Request, _: Candidates<'_>) -> Decision {
        let first = |table: &[f32]| table.iter().position(|&a| a == 1.0).unwrap_or(0) as u32;
        Decision::run(first(&cluster.prefill.available), first(&cluster.decode.available))
    }

    fn export_state(&self) -> Vec<u8> {
        if self.harm.mode() == "export-too-much" {
            return vec![0; (16 << 20) + 1];
        }
        self.finished.to_le_bytes().to_vec()
    }

    fn import_state(&mut self, state: &[u8]) -> Result<(), String> {
        assert!(self.harm.mode() != "trap-on-import", "as told");
        self.finished = u64::from_le_bytes(state.try_into().map_err(|_| "a state has 8 bytes")?);
        Ok(())
    }
}

impl Learner for Counting {
    fn observe(&mut self, outcomes: Outcomes<'_>) {
        for outcome in outcomes.iter() {
            self.finished += u64::from(outcome.end == End::Finished);
            self.harm.call();
        }
    }

    fn publish(&mut self) -> Vec<u8> {
        if self.harm.mode() == "publish-too-much" {
            return vec![0; (1 << 20) + 1];
        }
        self.finished.to_le_bytes().to_vec()
    }

    fn adopt(&mut self, knowledge: &[u8]) {
        assert!(self.harm.mode() != "trap-on-adopt", "as told");
        if let Ok(bytes) = knowledge.try_into() {
            self.finished = u64::from_le_bytes(bytes);
            kvasir_policy::log::info(&format!("knows of {} finished requests", self.finished));
        }
    }
}

kvasir_policy::export_learning_scheduler!(Counting);
