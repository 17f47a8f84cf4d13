//! A scheduler that misbehaves as its setting `mode` says.

use guest_harm::Harm;
use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Reason, Request};
use kvasir_policy::{Description, Scheduler, Settings};

const MODES: [&str; 7] = [
    "out-of-range",
    "unavailable",
    "false-transfer",
    "reason-99",
    "reject",
    "loop-on-class-13",
    "trap-on-import",
];

#[derive(Default)]
pub struct Bad(Harm);

impl Scheduler for Bad {
    fn describe(&self) -> Description {
        Harm::describe(Description::scheduler("bad", "0.1.0"))
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.0.configure(settings, &MODES)
    }

    fn schedule(&mut self, cluster: &Cluster, request: &Request, _: Candidates<'_>) -> Decision {
        let first = |table: &[f32], wanted| table.iter().position(|&a| a == wanted).unwrap_or(0) as u32;
        let decode = first(&cluster.decode.available, 1.0);
        let prefill = first(&cluster.prefill.available, 1.0);
        match self.0.call() {
            "out-of-range" => Decision::run(cluster.prefill.len() as u32, u32::MAX),
            "loop-on-class-13" if request.class == 13 => Harm::spin(),
            "unavailable" => Decision::run(first(&cluster.prefill.available, 0.0), decode),
            "reason-99" => Decision::Reject { reason: 99, retry_after_ms: 0 },
            "reject" => Decision::reject(Reason::Policy, 7),
            "false-transfer" => Decision::run(prefill, decode).fetching(prefill, u32::MAX),
            _ => Decision::run(prefill, decode),
        }
    }

    fn explain(&self, cluster: &Cluster, _: &Request, _: Candidates<'_>) -> Vec<f32> {
        vec![f32::NAN; cluster.prefill.len() + 1]
    }

    fn export_state(&self) -> Vec<u8> {
        if self.0.mode() == "trap-on-import" { vec![1] } else { Vec::new() }
    }

    fn import_state(&mut self, _: &[u8]) -> Result<(), String> {
        panic!("as told")
    }
}

kvasir_policy::export_scheduler!(Bad);
