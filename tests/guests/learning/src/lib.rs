//! A scheduler that learns how many requests were finished, and says in its log what its deciding half knows of that, and
//! whether it was learned in an earlier run of the host. It misbehaves as its setting `mode` says: from the `after`-th outcome on, or at once.

use guest_harm::Harm;
use kvasir_policy::learning::{End, Outcomes};
use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Request};
use kvasir_policy::{Description, Learner, Scheduler, Settings};

const MODES: [&str; 4] = ["publish-too-much", "trap-on-adopt", "trap-on-import", "export-too-much"];

#[derive(Default)]
pub struct Counting {
    harm: Harm,
    finished: u64,
    /// Run of the host in which the last one was finished; 0: none was.
    run: u32,
    said: bool,
}

impl Scheduler for Counting {
    fn describe(&self) -> Description {
        Harm::describe(Description::scheduler("counting", "0.1.0"))
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.harm.configure(settings, &MODES)
    }

    fn schedule(&mut self, cluster: &Cluster, _: &Request, _: Candidates<'_>) -> Decision {
        if self.run != 0 && self.run != cluster.run && !std::mem::replace(&mut self.said, true) {
            kvasir_policy::log::info("what is known is of an earlier run");
        }
        let first = |table: &[f32]| table.iter().position(|&a| a == 1.0).unwrap_or(0) as u32;
        Decision::run(first(&cluster.prefill.available), first(&cluster.decode.available))
    }

    fn export_state(&self) -> Vec<u8> {
        if self.harm.mode() == "export-too-much" {
            return vec![0; (16 << 20) + 1];
        }
        self.state()
    }

    fn import_state(&mut self, state: &[u8]) -> Result<(), String> {
        assert!(self.harm.mode() != "trap-on-import", "as told");
        if self.take(state) { Ok(()) } else { Err("a state has 12 bytes".into()) }
    }
}

impl Counting {
    fn state(&self) -> Vec<u8> {
        [&self.finished.to_le_bytes()[..], &self.run.to_le_bytes()].concat()
    }

    /// Whether it is one.
    fn take(&mut self, state: &[u8]) -> bool {
        let Some((finished, run)) = state.split_first_chunk() else { return false };
        let Ok(run) = run.try_into() else { return false };
        (self.finished, self.run) = (u64::from_le_bytes(*finished), u32::from_le_bytes(run));
        true
    }
}

impl Learner for Counting {
    fn observe(&mut self, outcomes: Outcomes<'_>) {
        for outcome in outcomes.iter() {
            self.finished += u64::from(outcome.end == End::Finished);
            self.run = outcome.run;
            self.harm.call();
        }
    }

    fn publish(&mut self) -> Vec<u8> {
        if self.harm.mode() == "publish-too-much" {
            return vec![0; (1 << 20) + 1];
        }
        self.state()
    }

    fn adopt(&mut self, knowledge: &[u8]) {
        assert!(self.harm.mode() != "trap-on-adopt", "as told");
        if self.take(knowledge) {
            kvasir_policy::log::info(&format!("knows of {} finished requests", self.finished));
        }
    }
}

kvasir_policy::export_learning_scheduler!(Counting);
