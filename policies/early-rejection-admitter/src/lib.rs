//! Early rejection (Mooncake, arXiv 2407.00079, section 7): what decode would have no room for in time is rejected before its
//! prompt is computed, and not after.
//!
//! `slo` does so by the load as it is, with everybody who is on the way to decode. Until a prompt is computed, sequences end; this
//! one counts them as gone. That is laxer at any one moment, and errs more: `docs/reproduce.md` has both.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::admitter::{Blocks, Forecast, Load, Request, Store, Verdict};
use kvasir_policy::scheduler::Reason;
use kvasir_policy::{Admitter, Description, Settings};

/// Which load of decode is held against the time between tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DecodeLoad {
    /// None: whether there is room shows when the prompt is computed.
    Ignored,
    /// As it is, with those who are on the way, less what will have ended at the end of the prefill.
    Predicted,
}

/// Rejects by the load of prefill and of decode, whichever is too much.
pub struct EarlyRejection {
    decode_load: DecodeLoad,
    slack: f32,
    load: Load,
}

impl Default for EarlyRejection {
    fn default() -> Self {
        Self { decode_load: DecodeLoad::Predicted, slack: 1.0, load: Load::default() }
    }
}

impl EarlyRejection {
    /// Time between tokens, ms, that a request may expect by the load of decode. The forecast of the host is for its placement, with
    /// everybody who is on the way there.
    fn tbt(&self, forecast: &Forecast) -> f32 {
        let leaving = self.load.decode_step_ms - self.load.decode_step_forecast_ms;
        match self.decode_load {
            DecodeLoad::Ignored => 0.0,
            DecodeLoad::Predicted => forecast.tbt - leaving.max(0.0),
        }
    }
}

impl Admitter for EarlyRejection {
    fn describe(&self) -> Description {
        Description::admitter("early-rejection", env!("CARGO_PKG_VERSION"))
            .setting(
                "decode-load",
                "predicted",
                "load of decode that is held against the SLO: `predicted` (for the end of the prefill) or `ignored`",
            )
            .setting(
                "slack",
                1.0,
                "factor on the SLOs: 1.2 admits requests expected to miss them by up to a fifth",
            )
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.slack = settings.number("slack", 0.01..=100.0)? as f32;
        self.decode_load = match settings.get::<String>("decode-load")?.as_str() {
            "predicted" => DecodeLoad::Predicted,
            "ignored" => DecodeLoad::Ignored,
            other => {
                return Err(format!("setting `decode-load`: `{other}` is not `predicted` or `ignored`"));
            }
        };
        Ok(())
    }

    fn update_load(&mut self, load: &Load) {
        self.load = *load;
    }

    fn admit_request(&mut self, request: &Request, forecast: &Forecast) -> Verdict {
        let late = forecast.ttft - request.ttft_slo * self.slack;
        if late > 0.0 {
            return Verdict::Reject {
                reason: Reason::Ttft as u32,
                retry_after_ms: late.min(60_000.0) as u32,
            };
        }
        if self.tbt(forecast) > request.tbt_slo * self.slack {
            return Verdict::Reject { reason: Reason::Tbt as u32, retry_after_ms: 1_000 };
        }
        Verdict::Accept
    }

    fn admit_blocks(&mut self, _tier: u32, blocks: Blocks<'_>, answers: &mut Vec<Store>) {
        answers.extend(blocks.iter().map(|_| Store::Store));
    }
}

kvasir_policy::export_admitter!(EarlyRejection);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn configured(given: &[(&str, &str)]) -> Result<EarlyRejection, String> {
        let mut policy = EarlyRejection::default();
        let given: Vec<_> = given.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        let settings = Settings::new(&policy.describe(), &given)?;
        policy.configure(&settings)?;
        Ok(policy)
    }

    fn request(ttft_slo: f32, tbt_slo: f32) -> Request {
        Request { ttft_slo, tbt_slo, ..Request::default() }
    }

    #[test]
    fn rejects_by_the_load_it_is_told_to_look_at() {
        let tbt = Verdict::Reject { reason: Reason::Tbt as u32, retry_after_ms: 1_000 };
        // The step as it is and as it is predicted.
        let (filling, emptying) = ((90.0, 120.0), (90.0, 60.0));
        for (decode_load, slack, (now, predicted), expected) in [
            ("predicted", "1", filling, tbt),
            ("predicted", "1", emptying, Verdict::Accept),
            ("predicted", "1.2", filling, Verdict::Accept),
            ("ignored", "1", filling, Verdict::Accept),
        ] {
            let mut policy = configured(&[("decode-load", decode_load), ("slack", slack)]).unwrap();
            let load = Load { decode_step_ms: now, decode_step_forecast_ms: predicted, ..Load::default() };
            policy.update_load(&load);
            let forecast = Forecast { ttft: 1.0, tbt: 110.0, ..Forecast::default() };
            let verdict = policy.admit_request(&request(100.0, 100.0), &forecast);
            assert_eq!(verdict, expected, "{decode_load} {slack} {load:?}");
        }
    }

    #[test]
    fn a_late_first_token_is_rejected_whatever_decode_does() {
        for decode_load in ["predicted", "ignored"] {
            let mut policy = configured(&[("decode-load", decode_load)]).unwrap();
            let forecast = Forecast { ttft: 130.0, ..Forecast::default() };
            let late = Verdict::Reject { reason: Reason::Ttft as u32, retry_after_ms: 30 };
            assert_eq!(policy.admit_request(&request(100.0, 50.0), &forecast), late);
        }
    }

    #[test]
    fn settings_that_it_does_not_know_are_refused_by_name() {
        for (name, value) in [("decode-load", "now"), ("slack", "0"), ("slack", "NaN"), ("step", "1")] {
            let refused = configured(&[(name, value)]).err().unwrap();
            assert!(refused.contains(name), "{refused}");
        }
    }

    proptest! {
        #[test]
        fn any_numbers_get_a_verdict(times in any::<[f32; 6]>()) {
            let [ttft, tbt, ttft_slo, tbt_slo, now, predicted] = times;
            let mut policy = EarlyRejection::default();
            policy.update_load(&Load { decode_step_ms: now, decode_step_forecast_ms: predicted, ..Load::default() });
            let forecast = Forecast { ttft, tbt, ..Forecast::default() };
            let verdict = policy.admit_request(&request(ttft_slo, tbt_slo), &forecast);
            let late = ttft > ttft_slo || tbt - (now - predicted).max(0.0) > tbt_slo;
            prop_assert_eq!(matches!(verdict, Verdict::Reject { .. }), late);
        }
    }
}
