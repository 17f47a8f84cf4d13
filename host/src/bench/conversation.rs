//! A recorded trace through the daemon's own conductor: what a request costs from its chain to the blocks it
//! leaves behind.

use super::{Row, thread_cpu_time};
use crate::conductor::{self, Conductor, Placed, Registration, Stage};
use crate::config;
use crate::explain::Explain;
use crate::fleet::{Ask, DecodeCost, DecodeSpec, PrefillCost, PrefillSpec, TransferCost};
use crate::policy::{self, PolicyConfig, PolicyHost, Wanted};
use crate::replay::trace::{self, BLOCK_SIZE_TOKENS, Reader, Request};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The number of prefill instances and of decode instances, as in the scheduling study of the Mooncake paper.
const INSTANCES: usize = 16;
/// Tokens of a block, as engines cut them; the trace has blocks of 512.
const BLOCK_TOKENS: u32 = 16;
const PARTS: u32 = BLOCK_SIZE_TOKENS / BLOCK_TOKENS;

/// Why the trace did not go through.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Trace(#[from] trace::Error),
    #[error(transparent)]
    Policy(#[from] policy::Error),
    #[error("request {done} of the trace: {source}")]
    Conductor { done: u64, source: conductor::Error },
}

/// Where the conversation trace is looked for: in `KVASIR_TRACES`, else in `../shared/traces`.
pub fn path() -> PathBuf {
    let folder = std::env::var_os("KVASIR_TRACES").map_or_else(|| "../shared/traces".into(), PathBuf::from);
    folder.join("conversation.jsonl.gz")
}

/// The rows of the first `limit` requests of the trace. Without a trace there are none, and a note says so.
///
/// # Errors
/// The trace is damaged, or a default policy does not start.
pub fn rows(limit: usize) -> Result<Vec<Row>, Error> {
    let path = path();
    if !path.exists() {
        eprintln!(
            "skipped: replay/conversation-16: no trace at {}; set KVASIR_TRACES to its folder",
            path.display()
        );
        return Ok(Vec::new());
    }
    let outcome = replay(Reader::open(&path)?.take(limit), Explain::off())?;
    let kept = Explain::new(config::Explain::default().limits());
    let explained = replay(Reader::open(&path)?.take(limit), kept)?;
    let plain = outcome.requests_per_cpu_second();
    Ok(vec![
        Row::new("replay/conversation-16", plain, "requests/cpu-s"),
        Row::new("replay/conversation-16/explained", explained.requests_per_cpu_second(), "requests/cpu-s")
            .beside(plain),
        Row::new("replay/conversation-16/hit-rate", outcome.hit_rate_percent(), "%"),
    ])
}

/// What went through.
#[derive(Debug, Default)]
struct Outcome {
    requests: u64,
    blocks: u64,
    hit_blocks: u64,
    /// Lookup, decision, booking, the blocks stored, and the end of the request.
    cpu: Duration,
}

impl Outcome {
    fn requests_per_cpu_second(&self) -> f64 {
        self.requests as f64 / self.cpu.as_secs_f64()
    }

    fn hit_rate_percent(&self) -> f64 {
        100.0 * self.hit_blocks as f64 / self.blocks.max(1) as f64
    }
}

fn replay(
    requests: impl Iterator<Item = Result<Request, trace::Error>>,
    explain: Arc<Explain>,
) -> Result<Outcome, Error> {
    let policies = PolicyHost::open(&PolicyConfig::default(), Wanted::default(), None)?;
    let mut cluster =
        Cluster::new(&policies, explain).map_err(|source| Error::Conductor { done: 0, source })?;
    let (mut outcome, mut chain) = (Outcome::default(), Vec::new());
    for request in requests {
        let request = request?;
        cut(&request, &mut chain);
        let start = thread_cpu_time();
        let served = cluster.serve(&request, &chain);
        outcome.cpu += thread_cpu_time().saturating_sub(start);
        outcome.hit_blocks += served.map_err(|source| Error::Conductor { done: outcome.requests, source })?;
        outcome.blocks += chain.len() as u64;
        outcome.requests += 1;
    }
    Ok(outcome)
}

/// The whole blocks of 16 tokens of a request. An id of the trace stands for the prefix up to it, and so does an id
/// together with a part.
fn cut(request: &Request, chain: &mut Vec<u64>) {
    let parts = request.blocks.iter().flat_map(|&id| (0..u64::from(PARTS)).map(move |part| (id, part)));
    chain.clear();
    chain
        .extend(parts.take((request.input_tokens / BLOCK_TOKENS) as usize).map(|(id, part)| mixed(id, part)));
}

/// Spreads ids as a hash of a block would; the finaliser of splitmix64 maps no two numbers to one.
fn mixed(id: u64, part: u64) -> u64 {
    let mut bits = (id * u64::from(PARTS) + part).wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Instances that keep every block, and requests that end when the conductor expects them to.
struct Cluster {
    conductor: Conductor,
    /// Epoch and messages sent, by name of the instance.
    sent: HashMap<String, (u64, u64)>,
    /// When each request takes which step.
    ends: BinaryHeap<Reverse<(u64, u64, bool)>>,
}

impl Cluster {
    fn new(policies: &PolicyHost, explain: Arc<Explain>) -> Result<Self, conductor::Error> {
        let config = config::Conductor { block_size_tokens: BLOCK_TOKENS, workers: 1, ..Default::default() };
        let conductor = Conductor::with_explain(&config, policies, explain, 0, 0);
        let transfer = TransferCost { fixed_ms: 1.0, ms_per_block: 0.25 };
        let prefill = PrefillSpec {
            cost: PrefillCost { fixed_ms: 5.0, ms_per_token: 0.1, ms_per_pair: 1e-6 },
            transfer,
            capacity_blocks: 1 << 24,
        };
        let decode = DecodeSpec {
            cost: DecodeCost { fixed_ms: 15.0, ms_per_sequence: 0.1, ms_per_context_token: 1e-4 },
            handover: transfer,
            capacity_blocks: 1 << 24,
        };
        let mut sent = HashMap::new();
        for i in 0..INSTANCES {
            let name = format!("prefill-{i}");
            let epoch = conductor.register(
                &name,
                Registration { prefill: Some(prefill), ..Registration::default() },
                0,
            )?;
            sent.insert(name, (epoch, 0));
            let given = Registration { decode: Some(decode), ..Registration::default() };
            conductor.register(&format!("decode-{i}"), given, 0)?;
        }
        Ok(Self { conductor, sent, ends: BinaryHeap::new() })
    }

    /// Leading blocks of the request that were there.
    fn serve(&mut self, request: &Request, chain: &[u64]) -> Result<u64, conductor::Error> {
        let now_ms = request.time_ms();
        self.end_until(now_ms)?;
        let ask = Ask {
            prompt_tokens: request.input_tokens,
            output_tokens: request.output_tokens,
            seed: request.time_ms(),
            must_run: true,
            ..Ask::default()
        };
        let scheduled = self.conductor.schedule(&ask, chain, false, now_ms)?;
        let Ok(placed) = scheduled.result else { return Ok(0) };
        let prefilled_ms = now_ms + placed.admission.ttft_ms as u64;
        let decode_ms = f64::from(request.output_tokens) * placed.admission.tbt_ms;
        self.ends.push(Reverse((prefilled_ms, scheduled.request_id, false)));
        self.ends.push(Reverse((prefilled_ms + decode_ms as u64, scheduled.request_id, true)));
        self.store(&placed, chain)
    }

    /// The instance reports the blocks that it did not have. Returns how many leading ones anybody sent or
    /// had.
    fn store(&mut self, placed: &Placed, chain: &[u64]) -> Result<u64, conductor::Error> {
        let held = placed.prefix_blocks as usize;
        let fetched = placed.transfer.as_ref().map_or(0, |&(_, blocks)| blocks as usize);
        if let Some((epoch, sequence)) = self.sent.get_mut(&placed.prefill)
            && held < chain.len()
        {
            *sequence += 1;
            let parent = held.checked_sub(1).map(|last| chain[last]);
            self.conductor.stored(&placed.prefill, *epoch, *sequence, None, parent, &chain[held..])?;
        }
        Ok((held + fetched) as u64)
    }

    fn end_until(&mut self, now_ms: u64) -> Result<(), conductor::Error> {
        while let Some(&Reverse((at_ms, id, finished))) = self.ends.peek()
            && at_ms <= now_ms
        {
            self.ends.pop();
            self.conductor.complete(
                id,
                if finished { Stage::Finished } else { Stage::Prefill { took_ms: None } },
                at_ms,
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::generate::{Generator, Plan, Workload};

    #[test]
    fn ids_are_cut_into_distinct_blocks_that_share_what_the_ids_share() {
        let request = |input_tokens, blocks: &[u64]| Request {
            input_tokens,
            output_tokens: 1,
            blocks: blocks.to_vec(),
            ..Request::default()
        };
        let cut = |request: &Request| {
            let mut chain = vec![1, 2, 3];
            super::cut(request, &mut chain);
            chain
        };
        let (long, short) = (cut(&request(1_024, &[7, 8])), cut(&request(600, &[7, 9])));
        assert_eq!((long.len(), short.len()), (64, 37), "the last 8 tokens of 600 make no block");
        assert_eq!(long[..32], short[..32]);
        assert_ne!(long[32], short[32]);
        assert_eq!(long.iter().collect::<std::collections::HashSet<_>>().len(), 64);
        assert!(cut(&request(15, &[3])).is_empty());
    }

    #[test]
    fn a_trace_goes_through_and_finds_what_it_left() {
        let plan = Plan { workload: Workload::Chat, requests: 300, rate_rps: 4.0, seed: 1 };
        let outcome = replay(Generator::new(&plan).unwrap().map(Ok), Explain::off()).unwrap();
        assert_eq!(outcome.requests, 300);
        assert!(outcome.requests_per_cpu_second() > 0.0);
        assert!((1.0..100.0).contains(&outcome.hit_rate_percent()), "{outcome:?}");
    }
}
