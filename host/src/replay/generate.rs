//! Synthetic workloads from published parameters, in the Mooncake trace format.
//!
//! Users arrive as a Poisson process and send requests in sessions; a session's turns follow each
//! other after exponential times, each turn's input being everything said so far. What is published is
//! used as it is; the other values are marked as choices:
//!
//! * chat: "KVCache Cache in the Wild" (USENIX ATC '25), trace A: about half of the requests are later
//!   turns; first turns have 973 tokens in total and later ones 5,953 on average;
//!   19 % of the users send half of the requests.
//! * api: same paper, trace B: single turns, each user with a system prompt of its own; 15 % of the
//!   users send 90 % of the requests; 54 % of the blocks could be hits.
//! * agent: Mooncake (FAST '25), tool & agent trace: 8,596 tokens of input and 182 of output on
//!   average, 59 % of it cached.
//!
//! One seed gives one trace, byte for byte.

use super::trace::{BLOCK_SIZE_TOKENS, Request, WriteError, Writer};
use hashbrown::HashMap;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::num::NonZeroU16;
use std::path::Path;

/// Kinds of workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Workload {
    /// People in conversations of several turns.
    Chat,
    /// Programs that send single requests behind a system prompt of their own.
    Api,
    /// Agents: a shared tool prompt, then many quick turns.
    Agent,
}

/// What to generate.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub workload: Workload,
    pub requests: u64,
    /// Mean arrival rate of requests, per second.
    pub rate_rps: f64,
    pub seed: u64,
}

/// Most requests a plan may ask for.
pub const MAX_REQUESTS: u64 = 10_000_000;
/// Longest input; a session that would outgrow it ends.
const MAX_INPUT_TOKENS: u32 = 128 * 1024;

/// Why nothing was generated.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0} requests are outside 1 to {MAX_REQUESTS}")]
    Requests(u64),
    #[error("a rate of {0} requests per second is outside 0.001 to 100000")]
    Rate(f64),
}

/// Parameters of one kind of workload; lengths are means of exponential distributions, in tokens.
struct Shape {
    /// The number of users, and the exponent of their Zipf-like shares of the sessions.
    users: u64,
    skew: f64,
    /// Probability that a turn is followed by another.
    next_turn: f64,
    /// Mean seconds to the next turn, counted from the turn before.
    think_s: f64,
    /// Distinct system prompts and their mean length. There are at most as many as users; each user keeps to one.
    prompts: u64,
    prompt_tokens: f64,
    /// New input of a session's first turn, and of each later one.
    input_tokens: f64,
    later_input_tokens: f64,
    output_tokens: f64,
}

impl Workload {
    fn shape(self) -> Shape {
        match self {
            // A first turn has 973 tokens in total, a later one adds 2,490: a later turn is the third on average.
            // Exponent 0.58 over 2,000 users. Choices: prompt, answer and thinking time.
            Self::Chat => Shape {
                users: 2_000,
                skew: 0.58,
                next_turn: 0.5,
                think_s: 60.0,
                prompts: 2_000,
                prompt_tokens: 150.0,
                input_tokens: 423.0,
                later_input_tokens: 2_090.0,
                output_tokens: 400.0,
            },
            // Exponent 1.37 over 400 users: 15 % of them send 90 %. Choices: lengths.
            Self::Api => Shape {
                users: 400,
                skew: 1.37,
                next_turn: 0.0,
                think_s: 0.0,
                prompts: 400,
                prompt_tokens: 3_700.0,
                input_tokens: 1_000.0,
                later_input_tokens: 0.0,
                output_tokens: 200.0,
            },
            // Choices: 3,000 tokens of tools, two turns a session on average, seconds apart.
            Self::Agent => Shape {
                users: 500,
                skew: 1.0,
                next_turn: 0.5,
                think_s: 8.0,
                prompts: 40,
                prompt_tokens: 3_000.0,
                input_tokens: 3_000.0,
                later_input_tokens: 2_400.0,
                output_tokens: 182.0,
            },
        }
    }
}

/// A session between two turns; ordered by time, then by number.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Pending {
    time_us: u64,
    session: u64,
    prompt: u64,
    prompt_tokens: u32,
    /// Tokens of all turns so far, including the system prompt.
    history_tokens: u32,
}

/// Iterator over the requests of a plan, sorted by time.
pub struct Generator {
    shape: Shape,
    random: ChaCha8Rng,
    left: u64,
    session_rate: f64,
    /// Cumulative shares of the users.
    shares: Vec<f64>,
    prompt_tokens: Vec<u32>,
    next_session_us: u64,
    sessions: u64,
    pending: BinaryHeap<Reverse<Pending>>,
    /// Ids of blocks by what they contain: (prompt, or session after it; position).
    ids: HashMap<(Holder, u32), u64>,
    next_id: u64,
    tenants: u16,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Holder {
    Prompt(u64),
    Session(u64),
}

impl Generator {
    /// # Errors
    /// The plan asks for too much, or for nothing.
    pub fn new(plan: &Plan) -> Result<Self, Error> {
        if !(1..=MAX_REQUESTS).contains(&plan.requests) {
            return Err(Error::Requests(plan.requests));
        }
        if !(0.001..=100_000.0).contains(&plan.rate_rps) {
            return Err(Error::Rate(plan.rate_rps));
        }
        let shape = plan.workload.shape();
        let mut random = ChaCha8Rng::seed_from_u64(plan.seed);
        let mut total = 0.0;
        let share = |rank: u64| {
            total += kvasir_policy::math::pow(rank as f64, -shape.skew);
            total
        };
        let shares = (1..=shape.users).map(share).collect();
        let prompt_tokens = (0..shape.prompts)
            .map(|_| tokens(&mut random, shape.prompt_tokens, MAX_INPUT_TOKENS / 2))
            .collect();
        Ok(Self {
            session_rate: plan.rate_rps * (1.0 - shape.next_turn),
            shape,
            random,
            left: plan.requests,
            shares,
            prompt_tokens,
            next_session_us: 0,
            sessions: 0,
            pending: BinaryHeap::new(),
            ids: HashMap::new(),
            next_id: 0,
            tenants: 1,
        })
    }

    /// The same requests, of so many tenants. Everybody who has a system prompt is of one of them.
    pub fn of_tenants(self, tenants: NonZeroU16) -> Self {
        Self { tenants: tenants.get(), ..self }
    }

    /// Starts every session that begins before the next pending turn.
    fn start_sessions(&mut self) {
        while self.pending.peek().is_none_or(|Reverse(turn)| turn.time_us >= self.next_session_us) {
            let total = self.shares.last().copied().unwrap_or(1.0);
            let draw = self.random.random::<f64>() * total;
            let user = self.shares.partition_point(|&share| share < draw) as u64;
            let prompt = user % self.shape.prompts;
            let prompt_tokens = self.prompt_tokens[prompt as usize];
            self.pending.push(Reverse(Pending {
                time_us: self.next_session_us,
                session: self.sessions,
                prompt,
                prompt_tokens,
                history_tokens: prompt_tokens,
            }));
            self.sessions += 1;
            self.next_session_us += exponential_us(&mut self.random, 1.0 / self.session_rate);
        }
    }

    fn blocks(&mut self, turn: &Pending, input_tokens: u32) -> Vec<u64> {
        let full = input_tokens / BLOCK_SIZE_TOKENS;
        let shared = turn.prompt_tokens / BLOCK_SIZE_TOKENS;
        let mut blocks: Vec<u64> = Vec::with_capacity(full as usize + 1);
        for position in 0..full {
            let holder =
                if position < shared { Holder::Prompt(turn.prompt) } else { Holder::Session(turn.session) };
            let next_id = &mut self.next_id;
            blocks.push(*self.ids.entry((holder, position)).or_insert_with(|| take(next_id)));
        }
        if input_tokens > full * BLOCK_SIZE_TOKENS {
            blocks.push(take(&mut self.next_id)); // partly filled: never seen again
        }
        blocks
    }

    /// Queues the session's next turn, or forgets the session.
    fn follow(&mut self, turn: Pending, said_tokens: u32) {
        if self.random.random::<f64>() < self.shape.next_turn && said_tokens < MAX_INPUT_TOKENS {
            let time_us = turn.time_us + exponential_us(&mut self.random, self.shape.think_s);
            self.pending.push(Reverse(Pending { time_us, history_tokens: said_tokens, ..turn }));
        } else {
            for position in 0..=said_tokens / BLOCK_SIZE_TOKENS {
                self.ids.remove(&(Holder::Session(turn.session), position));
            }
        }
    }
}

impl Iterator for Generator {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        self.left = self.left.checked_sub(1)?;
        self.start_sessions();
        let Reverse(turn) = self.pending.pop()?;
        let room = MAX_INPUT_TOKENS.saturating_sub(turn.history_tokens).max(1);
        let first = turn.history_tokens == turn.prompt_tokens;
        let mean = if first { self.shape.input_tokens } else { self.shape.later_input_tokens };
        let input_tokens = turn.history_tokens + tokens(&mut self.random, mean, room);
        let output_tokens = tokens(&mut self.random, self.shape.output_tokens, 8 * 1024);
        let blocks = self.blocks(&turn, input_tokens);
        let time_us = turn.time_us / 1_000 * 1_000; // in files by whole milliseconds
        let tenant = (turn.prompt % u64::from(self.tenants)) as u16;
        self.follow(turn, input_tokens + output_tokens);
        Some(Request { time_us, input_tokens, output_tokens, blocks, tenant, ..Request::default() })
    }
}

fn take(next_id: &mut u64) -> u64 {
    *next_id += 1;
    *next_id - 1
}

/// An exponential draw, from the portable logarithm: the same bits on every machine.
pub(super) fn exponential(random: &mut ChaCha8Rng, mean: f64) -> f64 {
    -mean * kvasir_policy::math::ln(1.0 - random.random::<f64>())
}

fn exponential_us(random: &mut ChaCha8Rng, mean_s: f64) -> u64 {
    (exponential(random, mean_s) * 1e6) as u64
}

pub(super) fn tokens(random: &mut ChaCha8Rng, mean: f64, most: u32) -> u32 {
    (exponential(random, mean).ceil() as u32).clamp(1, most)
}

/// Writes the requests to `path`, compressed if it ends in `.gz`; `progress` is called for every one.
/// The file appears whole or not at all.
///
/// # Errors
/// The file cannot be written.
pub fn write(generator: Generator, path: &Path, mut progress: impl FnMut()) -> Result<(), WriteError> {
    let mut file = Writer::create(path)?;
    for request in generator {
        file.write(&request)?;
        progress();
    }
    file.finish()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::stats::Stats;
    use super::super::trace::Reader;
    use super::*;

    const WORKLOADS: [Workload; 3] = [Workload::Chat, Workload::Api, Workload::Agent];

    fn plan(workload: Workload, seed: u64) -> Plan {
        Plan { workload, requests: 2_000, rate_rps: 5.0, seed }
    }

    #[test]
    fn same_seed_same_bytes_and_the_reader_accepts_them() {
        let folder = tempfile::tempdir().unwrap();
        for workload in WORKLOADS {
            for name in ["t.jsonl", "t.jsonl.gz"] {
                let path = folder.path().join(name);
                let bytes = |seed| {
                    write(Generator::new(&plan(workload, seed)).unwrap(), &path, || ()).unwrap();
                    std::fs::read(&path).unwrap()
                };
                let (a, b, other) = (bytes(1), bytes(1), bytes(2));
                assert!(a == b && a != other, "{workload:?} {name}");
                let requests: Vec<_> = Reader::open(&path).unwrap().collect::<Result<_, _>>().unwrap();
                assert_eq!(requests.len(), 2_000);
            }
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "no partial files");
    }

    #[test]
    fn workloads_have_the_published_shape() {
        let stats = |workload| {
            let mut stats = Stats::default();
            let mut generator = Generator::new(&Plan { requests: 10_000, ..plan(workload, 7) }).unwrap();
            generator.by_ref().for_each(|r| stats.add(&r).unwrap());
            let turns = 10_000.0 / generator.sessions as f64;
            let expected = 1.0 / (1.0 - generator.shape.next_turn);
            assert!(
                (0.9 * expected..1.1 * expected).contains(&turns),
                "{workload:?} {turns} turns a session"
            );
            stats.report()
        };
        let [chat, api, agent] = WORKLOADS.map(stats);
        assert!((49.0..59.0).contains(&api.best_hit_rate_percent), "{api:?}");
        assert!((54.0..64.0).contains(&agent.best_hit_rate_percent), "{agent:?}");
        assert!((7_000.0..10_500.0).contains(&agent.input_tokens_mean), "{agent:?}");
        assert!((150.0..210.0).contains(&agent.output_tokens_mean), "{agent:?}");
        assert!((4.0..6.0).contains(&chat.rate_rps) && (4.0..6.0).contains(&api.rate_rps));
    }

    #[test]
    fn tenants_share_the_requests_and_no_blocks() {
        for workload in WORKLOADS {
            let of = |tenants| {
                let generator = Generator::new(&plan(workload, 3)).unwrap();
                generator.of_tenants(NonZeroU16::new(tenants).unwrap()).collect::<Vec<_>>()
            };
            let (one, three) = (of(1), of(3));
            let mut holders = HashMap::new();
            for (alone, request) in one.iter().zip(&three) {
                assert_eq!((alone.tenant, &alone.blocks), (0, &request.blocks));
                for block in &request.blocks {
                    assert_eq!(*holders.entry(block).or_insert(request.tenant), request.tenant);
                }
            }
            let of_tenant = |tenant| three.iter().filter(|request| request.tenant == tenant).count();
            let counts = [0, 1, 2].map(of_tenant);
            assert!(
                counts.iter().all(|&n| n > 200) && counts.iter().sum::<usize>() == one.len(),
                "{counts:?}"
            );
        }
    }

    #[test]
    fn bad_plans_are_refused() {
        let new = |requests, rate_rps| {
            Generator::new(&Plan { requests, rate_rps, ..plan(Workload::Chat, 1) })
                .err()
                .map(|e| e.to_string())
        };
        assert!(new(0, 1.0).unwrap().contains("outside 1 to"));
        assert!(new(1, f64::NAN).unwrap().contains("NaN requests per second"));
        assert!(new(1, 1.0).is_none());
        let generator = Generator::new(&plan(Workload::Api, 1)).unwrap();
        let error = write(generator, Path::new("/none/t.jsonl"), || ()).unwrap_err();
        assert!(error.to_string().starts_with("cannot write /none/t.jsonl after 0 requests"), "{error}");
    }
}
