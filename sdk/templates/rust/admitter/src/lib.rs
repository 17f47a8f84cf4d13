//! Refuses a request whose predicted times miss its SLO, and stores blocks that were used often enough.

use kvasir_policy::admitter::{Blocks, Forecast, Request, Store, Verdict};
use kvasir_policy::scheduler::Reason;
use kvasir_policy::{Admitter, Description, Settings};

#[derive(Default)]
pub struct MyAdmitter {
    slack: f32,
    min_uses: u16,
}

fn refuse(reason: Reason) -> Verdict {
    Verdict::Reject { reason: reason as u32, retry_after_ms: 1_000 }
}

impl Admitter for MyAdmitter {
    fn describe(&self) -> Description {
        Description::admitter("my-admitter", env!("CARGO_PKG_VERSION"))
            .setting("slack", 1, "times its SLO that a predicted time may reach, 0.1 to 100")
            .setting("min-uses", 2, "uses a block must have had to be stored in a lower tier, 0 to 1000")
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.slack = settings.number("slack", 0.1..=100.0)? as f32;
        self.min_uses = settings.number("min-uses", 0.0..=1_000.0)? as u16;
        Ok(())
    }

    fn admit_request(&mut self, request: &Request, forecast: &Forecast) -> Verdict {
        if request.must_run() {
            return Verdict::Accept;
        }
        if forecast.ttft > self.slack * request.ttft_slo {
            return refuse(Reason::Ttft);
        }
        if forecast.tbt > self.slack * request.tbt_slo {
            return refuse(Reason::Tbt);
        }
        Verdict::Accept
    }

    fn admit_blocks(&mut self, _: u32, blocks: Blocks<'_>, answers: &mut Vec<Store>) {
        let used_enough = |uses: u16| if uses >= self.min_uses { Store::Store } else { Store::Skip };
        answers.extend(blocks.iter().map(|block| used_enough(block.uses)));
    }
}

kvasir_policy::export_admitter!(MyAdmitter);

#[cfg(test)]
mod tests {
    use super::*;

    fn configured(name: &str, value: &str) -> Result<MyAdmitter, String> {
        let mut policy = MyAdmitter::default();
        let settings = Settings::new(&policy.describe(), &[(name.to_owned(), value.to_owned())])?;
        policy.configure(&settings).map(|()| policy)
    }

    fn admit(policy: &mut MyAdmitter, ttft: f32, tbt: f32, hints: u32) -> Verdict {
        let request = Request { hints, ttft_slo: 200.0, tbt_slo: 50.0, ..Default::default() };
        policy.admit_request(&request, &Forecast { ttft, tbt, ..Default::default() })
    }

    #[test]
    fn what_misses_its_slo_is_refused() {
        let mut policy = configured("min-uses", "3").expect("fine settings");
        assert_eq!(admit(&mut policy, 200.0, 50.0, 0), Verdict::Accept);
        assert_eq!(admit(&mut policy, 201.0, 50.0, 0), refuse(Reason::Ttft));
        assert_eq!(admit(&mut policy, 200.0, 51.0, 0), refuse(Reason::Tbt));
        assert_eq!(admit(&mut policy, 201.0, 51.0, 1), Verdict::Accept);
        let mut slack = configured("slack", "1.5").expect("fine settings");
        assert_eq!(admit(&mut slack, 300.0, 75.0, 0), Verdict::Accept);
    }

    #[test]
    fn blocks_used_often_enough_are_stored() {
        let mut policy = configured("min-uses", "3").expect("fine settings");
        let blocks = [2 << 16, 0, 1, 0, 0, 77, 3 << 16, 0, 1, 0, 0, 77]; // records of 6 words
        let mut answers = Vec::new();
        policy.admit_blocks(3, Blocks::new(6, &blocks), &mut answers);
        assert_eq!(answers, [Store::Skip, Store::Store]);
    }

    #[test]
    fn settings_are_checked() {
        for (name, value) in [("slack", "x"), ("slack", "0"), ("min-uses", "-1"), ("slak", "1")] {
            assert!(configured(name, value).is_err_and(|error| error.contains(name)), "{name} = {value}");
        }
    }
}
