//! A scheduler whose name is no UTF-8.

use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Request};
use kvasir_policy::{Description, Scheduler};

#[derive(Default)]
pub struct Garbles;

impl Scheduler for Garbles {
    #[allow(unsafe_code)]
    fn describe(&self) -> Description {
        // SAFETY: none, on purpose: nothing in this component looks at the string, and the host has to.
        let name = unsafe { String::from_utf8_unchecked(vec![0xff, 0xfe]) };
        Description { name, ..Description::scheduler("garbles", "0.1.0") }
    }

    fn schedule(&mut self, _: &Cluster, _: &Request, _: Candidates<'_>) -> Decision {
        Decision::run(0, 0)
    }
}

kvasir_policy::export_scheduler!(Garbles);
