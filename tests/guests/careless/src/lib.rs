//! A scheduler whose answers say how often it was asked, and that is careless about it as its setting `mode` says.

use guest_harm::Harm;
use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Reason, Request};
use kvasir_policy::{Description, Scheduler, Settings};
use std::cell::Cell;

const MODES: [&str; 4] = ["explain-decides", "forgets", "chokes", "looks-into-nans"];

#[derive(Default)]
pub struct Careless {
    harm: Harm,
    turn: Cell<u64>,
}

impl Scheduler for Careless {
    fn describe(&self) -> Description {
        Harm::describe(Description::scheduler("careless", "0.1.0"))
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.harm.configure(settings, &MODES)
    }

    fn schedule(&mut self, cluster: &Cluster, _: &Request, candidates: Candidates<'_>) -> Decision {
        self.harm.call();
        self.turn.set(self.turn.get() + 1);
        let first = |available: &[f32], can: &dyn Fn(usize) -> bool| {
            available.iter().enumerate().position(|(slot, &a)| a == 1.0 && can(slot))
        };
        let prefill = first(&cluster.prefill.available, &|slot| candidates.can_prefill(slot));
        let decode = first(&cluster.decode.available, &|slot| candidates.can_decode(slot));
        let (Some(prefill), Some(decode)) = (prefill, decode) else {
            return Decision::reject(Reason::NoInstance, 1_000);
        };
        let mut decision = Decision::run(prefill as u32, decode as u32);
        if let Decision::Run(placement) = &mut decision {
            placement.session_memo = match self.harm.mode() {
                "looks-into-nans" => self.turn.get() + u64::from(bits_of_a_nan()),
                _ => self.turn.get(),
            };
        }
        decision
    }

    fn explain(&self, _: &Cluster, _: &Request, _: Candidates<'_>) -> Vec<f32> {
        if self.harm.mode() == "explain-decides" {
            self.turn.set(self.turn.get() + 1);
        }
        Vec::new()
    }

    fn export_state(&self) -> Vec<u8> {
        self.turn.get().to_le_bytes().to_vec()
    }

    fn import_state(&mut self, state: &[u8]) -> Result<(), String> {
        let turn = state.try_into().map(u64::from_le_bytes);
        match self.harm.mode() {
            "forgets" => {}
            "chokes" => self.turn.set(turn.unwrap()),
            _ => self.turn.set(turn.map_err(|_| "a state has 8 bytes")?),
        }
        Ok(())
    }
}

/// Arithmetic may keep what a NaN says, or not.
fn bits_of_a_nan() -> u32 {
    (std::hint::black_box(f32::from_bits(0x7fc0_0001)) + 1.0).to_bits()
}

kvasir_policy::export_scheduler!(Careless);
