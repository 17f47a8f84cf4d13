//! Admits a request while its predicted TTFT and TBT meet its SLOs; stores every offered block.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::admitter::{Blocks, Forecast, Request, Store, Verdict};
use kvasir_policy::scheduler::Reason;
use kvasir_policy::{Admitter, Description, Settings};

/// Rejects requests that would miss their SLO by more than the slack.
pub struct Slo {
    slack: f32,
}

impl Default for Slo {
    fn default() -> Self {
        Self { slack: 1.0 }
    }
}

impl Admitter for Slo {
    fn describe(&self) -> Description {
        Description::admitter("slo", env!("CARGO_PKG_VERSION")).setting(
            "slack",
            1.0,
            "factor on the SLOs: 1.2 admits requests predicted to miss them by up to a fifth",
        )
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.slack = settings.number("slack", 0.01..=100.0)? as f32;
        Ok(())
    }

    fn admit_request(&mut self, request: &Request, forecast: &Forecast) -> Verdict {
        let late = |predicted: f32, slo: f32| predicted - slo * self.slack;
        if late(forecast.ttft, request.ttft_slo) > 0.0 {
            let retry_after_ms = late(forecast.ttft, request.ttft_slo).min(60_000.0) as u32;
            return Verdict::Reject { reason: Reason::Ttft as u32, retry_after_ms };
        }
        if late(forecast.tbt, request.tbt_slo) > 0.0 {
            return Verdict::Reject { reason: Reason::Tbt as u32, retry_after_ms: 1_000 };
        }
        Verdict::Accept
    }

    fn admit_blocks(&mut self, _tier: u32, blocks: Blocks<'_>, answers: &mut Vec<Store>) {
        answers.extend(blocks.iter().map(|_| Store::Store));
    }
}

kvasir_policy::export_admitter!(Slo);

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_policy::admitter::{BLOCK_WORDS, Block};
    use proptest::prelude::*;

    fn ask(ttft: f32, tbt: f32, ttft_slo: f32, tbt_slo: f32) -> (Request, Forecast) {
        let request = Request { ttft_slo, tbt_slo, ..Request::default() };
        (request, Forecast { ttft, tbt, ..Forecast::default() })
    }

    fn configured(slack: &str) -> Result<Slo, String> {
        let mut slo = Slo::default();
        let values = [("slack".to_owned(), slack.to_owned())];
        let settings = Settings::new(&slo.describe(), &values).map_err(|error| error.to_string())?;
        slo.configure(&settings)?;
        Ok(slo)
    }

    #[test]
    fn rejects_what_would_be_late_and_says_how_long_to_wait() {
        let none = f32::INFINITY;
        let ttft = |retry_after_ms| Verdict::Reject { reason: Reason::Ttft as u32, retry_after_ms };
        let tbt = Verdict::Reject { reason: Reason::Tbt as u32, retry_after_ms: 1_000 };
        for (slack, ask, expected) in [
            ("1", ask(100.0, 50.0, 100.0, 50.0), Verdict::Accept),
            ("1", ask(130.0, 50.0, 100.0, 50.0), ttft(30)),
            ("1", ask(100.0, 51.0, 100.0, 50.0), tbt),
            ("1", ask(130.0, 51.0, 100.0, 50.0), ttft(30)),
            ("1.5", ask(150.0, 75.0, 100.0, 50.0), Verdict::Accept),
            ("0.5", ask(60.0, 1.0, 100.0, 50.0), ttft(10)),
            ("1", ask(1e30, 1e30, none, none), Verdict::Accept),
            ("1", ask(none, 1.0, 100.0, 50.0), ttft(60_000)),
            ("1", ask(none, none, none, none), Verdict::Accept),
        ] {
            assert_eq!(configured(slack).unwrap().admit_request(&ask.0, &ask.1), expected, "{slack} {ask:?}");
        }
        for bad in ["0", "-1", "NaN", "many", "1e9"] {
            assert!(configured(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_numbers_get_a_verdict_and_every_block_an_answer(
            times in any::<[f32; 4]>(), words in prop::collection::vec(any::<u32>(), 0..40), stride in 0..9u32,
        ) {
            let mut slo = Slo::default();
            let [ttft, tbt, ttft_slo, tbt_slo] = times;
            let (request, forecast) = ask(ttft, tbt, ttft_slo, tbt_slo);
            let verdict = slo.admit_request(&request, &forecast);
            let late = ttft > ttft_slo || tbt > tbt_slo;
            prop_assert_eq!(matches!(verdict, Verdict::Reject { .. }), late);
            let mut answers = Vec::new();
            slo.admit_blocks(2, Blocks::new(stride, &words), &mut answers);
            prop_assert_eq!(answers, vec![Store::Store; words.len() / stride.max(1) as usize]);
        }
    }

    #[test]
    fn blocks_are_all_stored() {
        let block = Block { class: 1, uses: 0, depth: 0, size_bytes: 1, last_offer_ms: Some(1), tenant: 0 };
        let mut answers = Vec::new();
        Slo::default().admit_blocks(1, Blocks::new(BLOCK_WORDS as u32, &block.encode()), &mut answers);
        assert_eq!(answers, [Store::Store]);
    }
}
