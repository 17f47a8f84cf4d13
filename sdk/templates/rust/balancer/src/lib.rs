//! Lets the scheduler move prefixes sooner while queues are uneven.

use kvasir_policy::balancer::Snapshot;
use kvasir_policy::{Balancer, Description, Settings};

#[derive(Default)]
pub struct MyBalancer {
    even: f32,
    uneven: f32,
}

impl Balancer for MyBalancer {
    fn describe(&self) -> Description {
        Description::balancer("my-balancer", env!("CARGO_PKG_VERSION"))
            .setting("even", 4, "kvcache-balancing-threshold while queues are even, 1 to 1000")
            .setting("uneven", 1.5, "the same while the longest queue is over twice the mean, 1 to 1000")
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.even = settings.number("even", 1.0..=1_000.0)? as f32;
        self.uneven = settings.number("uneven", 1.0..=1_000.0)? as f32;
        Ok(())
    }

    fn tick(&mut self, state: &Snapshot) -> Vec<f32> {
        // Negative: unavailable.
        let queues = || state.prefill_queue_ms.iter().copied().filter(|&queue| queue >= 0.0);
        if queues().next().is_none() {
            return Vec::new(); // keep what is in force
        }
        let mean = queues().sum::<f32>() / queues().count() as f32;
        vec![if queues().fold(0.0, f32::max) > 2.0 * mean { self.uneven } else { self.even }]
    }
}

kvasir_policy::export_balancer!(MyBalancer);

#[cfg(test)]
mod tests {
    use super::*;

    fn configured(name: &str, value: &str) -> Result<MyBalancer, String> {
        let mut policy = MyBalancer::default();
        let settings = Settings::new(&policy.describe(), &[(name.to_owned(), value.to_owned())])?;
        policy.configure(&settings).map(|()| policy)
    }

    #[test]
    fn uneven_queues_are_answered() {
        let mut policy = configured("even", "8").expect("fine settings");
        let mut tick = |queues: [f32; 3]| {
            policy.tick(&Snapshot { prefill_queue_ms: queues.into(), ..Default::default() })
        };
        assert_eq!(tick([10.0; 3]), [8.0]);
        assert_eq!(tick([1.0, 1.0, 100.0]), [1.5]);
        assert_eq!(tick([5.0, 20.0, -1.0]), [8.0]); // 20 is less than twice 12.5
        assert_eq!(tick([-1.0; 3]), []);
    }

    #[test]
    fn settings_are_checked() {
        for (name, value) in [("even", "0.5"), ("uneven", ""), ("odd", "1")] {
            assert!(configured(name, value).is_err_and(|error| error.contains(name)), "{name} = {value}");
        }
    }
}
