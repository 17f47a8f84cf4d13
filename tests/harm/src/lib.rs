//! What the misbehaving test policies have in common: a mode, chosen by a setting, and the call from
//! which on it is in force, so that a policy can pass the checks of its load and do harm later.

use kvasir_policy::{Description, Settings};

/// The harms that every slot can do; the others are specific to a slot.
const COMMON: [&str; 6] = ["none", "loop", "trap", "grow", "recurse", "chatter"];

/// The settings `mode` and `after`.
#[derive(Debug, Default)]
pub struct Harm {
    mode: String,
    after: u64,
    calls: u64,
    hoard: Vec<Vec<u8>>,
}

impl Harm {
    /// Adds the settings to a description.
    pub fn describe(description: Description) -> Description {
        description.setting("mode", "none", "which harm to do").setting(
            "after",
            0,
            "well-behaved calls before the harm",
        )
    }

    /// `own`: modes that this policy has in addition to the common ones.
    ///
    /// # Errors
    /// Any other mode.
    pub fn configure(&mut self, settings: &Settings, own: &[&str]) -> Result<(), String> {
        let mode: String = settings.get("mode")?;
        if !COMMON.iter().chain(own).any(|known| *known == mode) {
            return Err(format!(
                "setting `mode`: `{mode}` is none of {}, {}",
                COMMON.join(", "),
                own.join(", ")
            ));
        }
        kvasir_policy::log::info(&format!("will do: {mode}"));
        self.after = settings.get("after")?;
        self.mode = mode;
        Ok(())
    }

    /// The mode as configured.
    pub fn mode(&self) -> &str {
        &self.mode
    }

    /// Counts one call; from the set one on, loops, traps or grows here, and returns the mode.
    pub fn call(&mut self) -> &str {
        self.calls += 1;
        if self.calls <= self.after {
            return "none";
        }
        match self.mode.as_str() {
            "loop" => Self::spin(),
            "trap" => panic!("as told"),
            "grow" => loop {
                self.hoard.push(vec![1; 1 << 20]);
            },
            "recurse" => {
                self.calls += Self::dig(self.calls);
                "none"
            }
            "chatter" => {
                (0..10_000).for_each(|_| kvasir_policy::log::info("noise"));
                "none"
            }
            other => other,
        }
    }

    /// Calls itself until the stack is full.
    fn dig(depth: u64) -> u64 {
        if std::hint::black_box(depth) == u64::MAX {
            0
        } else {
            std::hint::black_box(Self::dig(depth + 1)) + 1
        }
    }

    /// Never returns.
    pub fn spin() -> ! {
        let mut turns = 0u64;
        loop {
            turns = std::hint::black_box(turns.wrapping_add(1));
        }
    }
}
