//! What the conductor's decisions cost while an instance tells of up to two million blocks a second.

use super::{Row, Times, time_calls};
use crate::conductor::{Conductor, Registration, Stage};
use crate::config;
use crate::fleet::{Ask, DecodeCost, DecodeSpec, PrefillCost, PrefillSpec, TransferCost};
use crate::policy::{Error, PolicyConfig, PolicyHost, Wanted};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Blocks of a prompt.
const PROMPT: u64 = 256;
const BLOCK_TOKENS: u32 = 16;
/// Blocks of one message: a prompt of 32 k tokens.
const MESSAGE: u64 = 2_048;
/// When the next message follows.
const EVERY: Duration = Duration::from_millis(1);
/// Messages until the instance starts over, so that the index does not fill up.
const MESSAGES: u64 = 512;

/// The time that a decision and the end of its request take: value p99.9, beside the same with nothing else going on.
///
/// # Errors
/// A default policy does not start.
pub(super) fn row(config: &PolicyConfig, calls: usize) -> Result<Row, Error> {
    let policies = PolicyHost::open(config, Wanted::default(), None)?;
    let settings = config::Conductor { block_size_tokens: BLOCK_TOKENS, ..Default::default() };
    let conductor = Conductor::new(&settings, &policies, 0);
    for n in 1..=8 {
        let name = format!("engine-{n}");
        let epoch = register(&conductor, &name);
        let blocks: Vec<u64> = (1..=PROMPT / 8 * n).collect();
        conductor.stored(&name, epoch, 1, None, None, &blocks).expect("its first message");
    }
    let quiet = decide(&conductor, calls);
    let done = AtomicBool::new(false);
    let busy = std::thread::scope(|scope| {
        scope.spawn(|| tell(&conductor, &done));
        let busy = decide(&conductor, calls);
        done.store(true, Ordering::Relaxed);
        busy
    });
    let row = Row::of_times("decide/beside-events", &busy);
    Ok(Row { value: busy.ns(0.999), ..row }.beside(quiet.ns(0.999)))
}

fn register(conductor: &Conductor, name: &str) -> u64 {
    let prefill = PrefillSpec {
        cost: PrefillCost { fixed_ms: 5.0, ms_per_token: 0.1, ms_per_pair: 1e-6 },
        transfer: TransferCost { fixed_ms: 1.0, ms_per_block: 8.0 },
        capacity_blocks: 1 << 20,
    };
    let decode = DecodeSpec {
        cost: DecodeCost { fixed_ms: 15.0, ms_per_sequence: 0.1, ms_per_context_token: 1e-4 },
        handover: prefill.transfer,
        capacity_blocks: 1 << 20,
    };
    let given = Registration { prefill: Some(prefill), decode: Some(decode), ..Registration::default() };
    conductor.register(name, given, 0).expect("there is room for a few instances")
}

/// Schedules and ends one request after the other.
fn decide(conductor: &Conductor, calls: usize) -> Times {
    let chain: Vec<u64> = (1..=PROMPT).collect();
    let ask = Ask { prompt_tokens: PROMPT as u32 * BLOCK_TOKENS, output_tokens: 100, ..Ask::default() };
    time_calls(calls, |_| {
        let scheduled = conductor.schedule(&ask, &chain, false, 1).expect("the last request has ended");
        if scheduled.request_id != 0 {
            conductor.complete(scheduled.request_id, Stage::Finished, 1).expect("it is in flight");
        }
    })
}

/// Tells of new blocks until it is `done`.
fn tell(conductor: &Conductor, done: &AtomicBool) {
    let epoch = register(conductor, "storing");
    let mut next = 1 << 32;
    loop {
        for sequence in 1..=MESSAGES {
            if done.load(Ordering::Relaxed) {
                return;
            }
            let blocks: Vec<u64> = (next..next + MESSAGE).collect();
            next += MESSAGE;
            conductor.stored("storing", epoch, sequence, None, None, &blocks).expect("messages are in order");
            std::thread::sleep(EVERY);
        }
        conductor.reset_blocks("storing", epoch).expect("it is registered");
        conductor.sweep();
    }
}
