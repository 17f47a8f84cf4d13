//! A scheduler by its world that says it is an evictor.

use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Request};
use kvasir_policy::{Description, Scheduler};

#[derive(Default)]
pub struct Lies;

impl Scheduler for Lies {
    fn describe(&self) -> Description {
        Description::evictor("lies", "0.1.0")
    }

    fn schedule(&mut self, _: &Cluster, _: &Request, _: Candidates<'_>) -> Decision {
        Decision::run(0, 0)
    }
}

kvasir_policy::export_scheduler!(Lies);
