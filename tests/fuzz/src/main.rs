//! libFuzzer on the target that `KVASIR_FUZZ_TARGET` names. `cargo xtask fuzz` builds and starts it.
#![no_main]

use kvasir_fuzz::{TARGETS, Target};
use libfuzzer_sys::Corpus;
use std::sync::LazyLock;

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("KVASIR_FUZZ_TARGET").unwrap_or_default();
    kvasir_fuzz::target(&name).unwrap_or_else(|| {
        let known = TARGETS.map(|target| target.name).join(", ");
        panic!("KVASIR_FUZZ_TARGET is `{name}`; targets: {known}")
    })
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| -> Corpus {
    if data.len() > TARGET.bytes_max {
        return Corpus::Reject;
    }
    (TARGET.run)(data);
    Corpus::Keep
});
