//! An admitter that misbehaves as its setting `mode` says. Exported by hand: the SDK's types cannot
//! express an unknown verdict.

use guest_harm::Harm;
use kvasir_policy::admitter::{Blocks, Forecast, Request, Store, Verdict};
use kvasir_policy::{Admitter, Description, Settings};

#[derive(Default)]
pub struct Bad(Harm);

impl Bad {
    /// Packed verdict: 99 is none that the contract knows, and no reason either.
    pub fn verdict(&mut self) -> u64 {
        match self.0.call() {
            "unknown" => 99,
            "reason-99" => Verdict::Reject { reason: 99, retry_after_ms: 0 }.pack(),
            _ => Verdict::Accept.pack(),
        }
    }

    /// Answers for this many blocks.
    pub fn answers(&mut self, blocks: usize) -> Vec<u32> {
        match self.0.call() {
            "unknown" => vec![99; blocks],
            "short" => vec![1; blocks.saturating_sub(1)],
            "huge" => vec![1; 1 << 20],
            _ => vec![1; blocks],
        }
    }
}

impl Admitter for Bad {
    fn describe(&self) -> Description {
        Harm::describe(Description::admitter("bad", "0.1.0"))
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.0.configure(settings, &["unknown", "reason-99", "short", "huge"])
    }

    fn admit_request(&mut self, _: &Request, _: &Forecast) -> Verdict {
        Verdict::unpack(self.verdict()).unwrap_or(Verdict::Accept)
    }

    fn admit_blocks(&mut self, _: u32, blocks: Blocks<'_>, answers: &mut Vec<Store>) {
        let words = self.answers(blocks.len());
        answers.extend(words.into_iter().filter_map(Store::unpack));
    }
}

#[cfg(target_arch = "wasm32")]
#[allow(unsafe_code)]
mod component {
    use super::{Bad, Blocks};
    use kvasir_policy::Admitter as _;
    use kvasir_policy::bindings::admitter::exports::kvasir::policy::admission;
    use std::cell::RefCell;

    struct Component;

    std::thread_local! {
        static BAD: RefCell<Bad> = RefCell::new(Bad::default());
    }

    fn bad<R>(f: impl FnOnce(&mut Bad) -> R) -> R {
        BAD.with_borrow_mut(f)
    }

    kvasir_policy::__export_control!(admitter, bad);

    impl admission::Guest for Component {
        fn update_load(_: Vec<f32>) {}

        fn admit_request(_: Vec<u32>, _: Vec<f32>) -> u64 {
            bad(|b| b.verdict())
        }

        fn admit_blocks(_: u32, stride: u32, blocks: Vec<u32>) -> Vec<u32> {
            bad(|b| b.answers(Blocks::new(stride, &blocks).len()))
        }
    }

    kvasir_policy::bindings::admitter::export!(Component with_types_in kvasir_policy::bindings::admitter);
}
