//! A balancer that misbehaves as its setting `mode` says.

use guest_harm::Harm;
use kvasir_policy::balancer::Snapshot;
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

    fn tick(&mut self, _: &Snapshot) -> Vec<f32> {
        match self.0.call() {
            "nan" => vec![f32::NAN],
            "infinite" => vec![f32::INFINITY],
            "flood" => vec![2.0; 1_000_000],
            _ => vec![1.5],
        }
    }
}

kvasir_policy::export_balancer!(Bad);
