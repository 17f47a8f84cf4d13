//! Fixed thresholds: what the operator sets is what the scheduler reads.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::balancer::Snapshot;
use kvasir_policy::{Balancer, Description, Settings};

/// The thresholds, repeated on every tick.
pub struct Static {
    kvcache_balancing: f32,
}

impl Default for Static {
    fn default() -> Self {
        Self { kvcache_balancing: 1.5 }
    }
}

impl Balancer for Static {
    fn describe(&self) -> Description {
        Description::balancer("static", env!("CARGO_PKG_VERSION")).setting(
            "kvcache-balancing-threshold",
            1.5,
            "best prefix over own prefix beyond which the scheduler considers a transfer",
        )
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.kvcache_balancing = settings.number("kvcache-balancing-threshold", 1.0..=1e6)? as f32;
        Ok(())
    }

    fn tick(&mut self, _: &Snapshot) -> Vec<f32> {
        vec![self.kvcache_balancing]
    }
}

kvasir_policy::export_balancer!(Static);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeats_what_the_operator_set_whatever_the_cluster_does() {
        let busy = Snapshot {
            now_ms: u64::MAX,
            prefill_queue_ms: vec![f32::NAN, -1.0, 1e30],
            decode_step_ms: vec![f32::INFINITY],
            hit_rate_percent: 100.0,
            rejected: u32::MAX,
            accepted: 0,
            compute_block_ms: 1.0,
            fetch_block_ms: f32::NAN,
        };
        let mut balancer = Static::default();
        for (set, expected) in [(None, 1.5), (Some("4"), 4.0), (Some("1.0"), 1.0)] {
            if let Some(value) = set {
                let values = [("kvcache-balancing-threshold".to_owned(), value.to_owned())];
                let settings = Settings::new(&balancer.describe(), &values).expect("known setting");
                balancer.configure(&settings).expect("in range");
            }
            for state in [&Snapshot::default(), &busy] {
                assert_eq!(balancer.tick(state), [expected]);
            }
        }
    }

    #[test]
    fn refuses_thresholds_that_mean_nothing() {
        let mut balancer = Static::default();
        for bad in ["0.9", "-1", "NaN", "inf", "high"] {
            let values = [("kvcache-balancing-threshold".to_owned(), bad.to_owned())];
            let refused = match Settings::new(&balancer.describe(), &values) {
                Ok(settings) => balancer.configure(&settings).is_err(),
                Err(_) => true,
            };
            assert!(refused, "{bad}");
        }
        assert_eq!(balancer.tick(&Snapshot::default()), [1.5]);
    }
}
