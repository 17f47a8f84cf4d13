//! A balancer that misbehaves as its setting `mode` says.

use guest_harm::Harm;
use kvasir_policy::balancer::{Action, Plan, Snapshot};
use kvasir_policy::{Balancer, Description, Settings};

#[derive(Default)]
pub struct Bad(Harm);

impl Balancer for Bad {
    fn describe(&self) -> Description {
        Harm::describe(Description::balancer("bad", "0.1.0"))
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.0.configure(settings, &["nan", "infinite", "flood"])
    }

    fn tick(&mut self, _: &Snapshot) -> Plan {
        let thresholds = |value| Plan { thresholds: vec![value], actions: Vec::new() };
        match self.0.call() {
            "nan" => thresholds(f32::NAN),
            "infinite" => thresholds(f32::INFINITY),
            "flood" => {
                let action = Action { kind: 99, prefix: u32::MAX, source: u32::MAX, target: u32::MAX };
                Plan { thresholds: vec![2.0; 1_000], actions: vec![action; 10_000] }
            }
            _ => thresholds(1.5),
        }
    }
}

kvasir_policy::export_balancer!(Bad);
