//! A scheduler that traps when it is asked what it is.

use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Request};
use kvasir_policy::{Description, Scheduler};

#[derive(Default)]
pub struct Traps;

impl Scheduler for Traps {
    fn describe(&self) -> Description {
        panic!("as told")
    }

    fn schedule(&mut self, _: &Cluster, _: &Request, _: Candidates<'_>) -> Decision {
        Decision::run(0, 0)
    }
}

kvasir_policy::export_scheduler!(Traps);
