//! A small cluster in virtual time: the real conductor, scheduler, admitter, balancer and evictors, before instances that
//! are a cost model.
//!
//! What is simulated:
//! * **Prefill**: first come, first served, one prompt at a time, for as long as the cost model says. What is computed are
//!   the blocks that the instance does not hold when it begins: a prefix that was evicted while the request waited is a
//!   miss, whatever the decision counted on. The blocks of the prompt are resident from the end of its prefill.
//! * **Pools**: each instance that does prefill has a pool of blocks with an evictor of its own ([`super::pool`]); the
//!   conductor hears at once what came and what went.
//! * **Transfers**: a prefix that is fetched, and a request that is handed over, have their fair share of the ports of both
//!   instances at any time, and between racks of what these have; the fixed time of the cost model comes on top. A fetch begins
//!   with the decision and counts as a use at its source; the hand-over begins when the prompt is computed, or goes on beside that
//!   layer by layer: it then has the ports from the beginning of the prompt, and ends a layer's time after it or later.
//! * **Decode**: continuous batching. Requests join and leave between steps; one that does not fit in the memory waits and
//!   holds up those behind it. The first token comes out of the prefill. If the setup says so, instances turn away who
//!   comes from prefill and would make their steps longer than the SLO.
//! * **Instances that do both** compute prompts first; their batch stands still meanwhile. With chunked prefill every step has a
//!   budget of tokens, of which prompts have what the batch leaves. Pool and batch have memory of their own. A request that stays
//!   moves nothing, and one that comes brings only what is not in the pool.
//! * A request that is rejected is gone: nobody tries again. Nothing fails and nobody leaves.
//!
//! What policies are told is what a host tells them; instances report with every tick. The output of a request is unknown
//! to them before it comes, and so are sessions, tenants and models, which traces do not name. Policies that learn hear once
//! a second of virtual time what came of requests, and what they publish holds from the next decision on.
//!
//! All of it is a function of trace, setup and policies: the same again gives the same bytes. A policy that is late or
//! traps may be late elsewhere the next time. Memory grows with the requests in flight, not with the trace.

mod agenda;
mod chunks;
mod decode;
mod instance;
mod load;
mod network;
mod page;
mod policies;
mod prefill;
mod replicas;
mod report;
mod setup;
mod tally;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod week;

pub use load::LoadMap;
pub use policies::{Choice, Choices, Faults, Learned, Policies, Swap, Swapped};
pub use replicas::Replicas;
pub use report::{Curves, Names, Report, RoleLoad};
pub use setup::{DECODE, INSTANCES_MAX, PREFILL, Setup, SetupError, TRANSFER};
pub use tally::{Latency, Parts, Seconds, Spread, Tally};

use self::agenda::{Agenda, Event};
use self::decode::{Arrival, Decode, Done};
use self::instance::{Instance, Job};
use self::network::Network;
use self::prefill::{Prefill, Start};
use self::replicas::Uses;
use self::tally::Part;
use super::classes::{Classes, Recent};
use super::pool::{self, Touch};
use super::trace::Request;
use crate::conductor::{self, Conductor, Placed, Stage};
use crate::config::{self, Span};
use crate::fleet::Ask;
use crate::policy::{BalancerWorker, PolicyHost};
use hashbrown::HashMap;
use std::sync::Arc;
use twox_hash::XxHash3_64;

/// Blocks whose last request is remembered, to tell the turn of a conversation.
const RECENT_BLOCKS: usize = 1 << 20;
/// Requests in flight; more are rejected.
const REQUESTS_MAX: u32 = 1 << 17;
/// As often as a host lets learners hear of outcomes.
const LEARN_EVERY_US: u64 = 1_000_000;

/// Why a cluster is not simulated (any further).
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Setup(#[from] SetupError),
    #[error(transparent)]
    Policy(#[from] crate::policy::Error),
    #[error(transparent)]
    Pool(#[from] pool::Error),
    #[error("the conductor refused what the simulated cluster told it: {0}")]
    Conductor(#[from] conductor::Error),
}

/// What was decided of one request; instances by their place in [`Cluster::names`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decided {
    Placed { prefill: u32, decode: u32, fetched_blocks: u32 },
    Rejected { reason: u32 },
}

/// A request that has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ended {
    /// Its place in the trace, from 0.
    pub request: u64,
    /// `None` means that it was rejected.
    pub ttft_us: Option<u64>,
}

/// See the module documentation.
pub struct Cluster<'e> {
    setup: Setup,
    conductor: Conductor,
    host: Arc<PolicyHost>,
    balancer: BalancerWorker,
    instances: Vec<Instance<'e>>,
    by_name: HashMap<String, usize>,
    network: Network,
    agenda: Agenda,
    now_us: u64,
    jobs: HashMap<u64, Job>,
    classes: Classes<Recent>,
    chain: Vec<u64>,
    first_us: Option<u64>,
    tally: Tally,
    uses: Uses,
    load: LoadMap,
    swaps: Vec<Swap>,
    swapped: Vec<Swapped>,
    ended: Vec<Ended>,
    /// A buffer that is used again.
    finished: Vec<Done>,
    evictor: String,
}

impl<'e> Cluster<'e> {
    /// A cluster at rest, with empty pools.
    ///
    /// # Errors
    /// The setup cannot be simulated, or an evictor fails to open.
    pub fn new(setup: &Setup, policies: &'e mut Policies) -> Result<Self, Error> {
        setup.check()?;
        let config = conductor_config(setup);
        let evictor = policies.name(crate::policy::SlotKind::Evictor);
        let Policies { host, evictors, .. } = policies;
        let conductor = Conductor::new(&config, host, 0);
        let (mut instances, mut evictors) = (Vec::new(), evictors.iter_mut());
        for (name, role, rack) in setup.instances() {
            let epoch = conductor.register(&name, setup.registration(role, rack), 0)?;
            let prefill = match role.prefill.then(|| evictors.next()).flatten() {
                Some(evictor) => Some(Prefill::new(setup, evictor.as_mut(), role.decode)?),
                None => None,
            };
            let decode = role.decode.then(|| Decode::new(setup.decode_cost, setup.decode_blocks));
            instances.push(Instance::new(name, epoch, prefill, decode));
        }
        let instances_count = instances.len();
        let racks = setup.instances().map(|(.., rack)| rack).collect();
        let mut agenda = Agenda::default();
        agenda.plan(0, Event::Tick);
        agenda.plan(0, Event::Learn);
        Ok(Self {
            setup: setup.clone(),
            balancer: host.balancer_worker(),
            host: Arc::clone(host),
            by_name: instances.iter().enumerate().map(|(at, i)| (i.name.clone(), at)).collect(),
            conductor,
            instances,
            network: Network::new(racks, setup.oversubscription),
            agenda,
            now_us: 0,
            jobs: HashMap::new(),
            load: LoadMap::new(instances_count, setup.tick_ms * 1_000),
            swaps: Vec::new(),
            swapped: Vec::new(),
            classes: Classes::new(Recent::new(RECENT_BLOCKS)).of_blocks(setup.block_size_tokens),
            chain: Vec::new(),
            first_us: None,
            tally: Tally::default(),
            uses: Uses::default(),
            ended: Vec::new(),
            finished: Vec::new(),
            evictor,
        })
    }

    /// Has another policy take over at its time; after what else happens then, if that is now.
    pub fn plan_swap(&mut self, swap: Swap) {
        self.agenda.plan(swap.at_us.max(self.now_us), Event::Swap { number: self.swaps.len() });
        self.swaps.push(swap);
    }

    /// Lets time pass until the request arrives, and has it decided. Requests come in the order of their times.
    ///
    /// # Errors
    /// [`Error::Conductor`]: a defect.
    pub fn offer(&mut self, request: &Request) -> Result<Decided, Error> {
        let first_us = *self.first_us.get_or_insert(request.time_us);
        let since_us = request.time_us.saturating_sub(first_us) as f64;
        self.run_until((since_us / self.setup.speed) as u64)?;
        let number = self.tally.offered;
        self.tally.offered += 1;
        chain_into(request, &mut self.chain);
        let class = self.classes.assign(request, &self.chain);
        let ask = Ask {
            prompt_tokens: request.input_tokens,
            class: class.into(),
            seed: XxHash3_64::oneshot_with_seed(self.setup.seed, &number.to_le_bytes()),
            ttft_slo_ms: self.setup.ttft_slo_ms,
            tbt_slo_ms: self.setup.tbt_slo_ms,
            ..Ask::default()
        };
        let decided = match self.conductor.schedule(&ask, &self.chain, false, self.now_ms()) {
            Ok(scheduled) => match scheduled.result {
                Ok(placed) => self.begin(number, scheduled.request_id, request, class, &placed)?,
                Err(rejected) => Decided::Rejected { reason: rejected.reason },
            },
            Err(conductor::Error::Fleet(crate::fleet::Error::TooManyRequests { .. })) => {
                Decided::Rejected { reason: 0 }
            }
            Err(error) => return Err(error.into()),
        };
        if matches!(decided, Decided::Rejected { .. }) {
            self.tally.rejected += 1;
            self.ended.push(Ended { request: number, ttft_us: None });
        }
        self.tally.check(self.jobs.len());
        Ok(decided)
    }

    /// Lets time pass until every request has ended.
    ///
    /// # Errors
    /// As [`Self::offer`].
    pub fn finish(&mut self) -> Result<(), Error> {
        while !self.jobs.is_empty() {
            let (at_us, event) = self.agenda.next(u64::MAX).expect("a tick is always planned");
            self.happen(at_us, event)?;
        }
        self.tally.check(0);
        self.note_load();
        assert_eq!(
            self.conductor.counts().in_flight,
            0,
            "the conductor has nothing in flight that has ended"
        );
        Ok(())
    }

    /// The requests that ended since the last call.
    pub fn take_ended(&mut self) -> std::vec::Drain<'_, Ended> {
        self.ended.drain(..)
    }

    /// Names of the instances.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.instances.iter().map(|instance| instance.name.as_str())
    }

    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Virtual time since the first request, µs.
    pub fn now_us(&self) -> u64 {
        self.now_us
    }

    /// How long its instances were at work so far, in total, seconds.
    pub fn busy_s(&self) -> f64 {
        self.instances.iter().map(|instance| instance.busy_ms()).sum::<f64>() / 1e3
    }

    /// Name of each instance, and the part of the time so far that it was at work, per cent.
    pub fn load(&self) -> Vec<(String, f64)> {
        let total_ms = (self.now_us as f64 / 1e3).max(1.0);
        let percent = |ms: f64| (100.0 * ms / total_ms * 1e4).round() / 1e4;
        self.instances.iter().map(|i| (i.name.clone(), percent(i.busy_ms()))).collect()
    }

    /// The same over time.
    pub fn load_map(&self) -> &LoadMap {
        &self.load
    }

    /// Copies of the hottest blocks, now.
    pub fn replicas(&self) -> Vec<Replicas> {
        let caches = || self.instances.iter().filter_map(|instance| instance.prefill.as_ref());
        self.uses.replicas(|block| caches().filter(|cache| cache.holds(block)).count())
    }

    /// The swaps that took place.
    pub fn swapped(&self) -> &[Swapped] {
        &self.swapped
    }

    /// What the policies did that they must not do.
    pub fn faults(&self) -> Vec<Faults> {
        let mut faults = Policies::faults(&self.host);
        let pools = self.instances.iter().filter_map(|instance| instance.prefill.as_ref());
        faults.extend(prefill::faults(&self.evictor, pools));
        faults
    }

    /// What has happened so far, arrivals of requests included: what a simulation's time goes by.
    pub fn events(&self) -> u64 {
        self.tally.offered + self.agenda.happened()
    }

    /// How much its policies that learn were told.
    pub fn learned(&self) -> Vec<Learned> {
        Policies::learned(&self.host)
    }

    fn now_ms(&self) -> u64 {
        self.now_us / 1_000
    }

    fn run_until(&mut self, until_us: u64) -> Result<(), Error> {
        while let Some((at_us, event)) = self.agenda.next(until_us) {
            self.happen(at_us, event)?;
        }
        self.now_us = self.now_us.max(until_us);
        Ok(())
    }

    fn happen(&mut self, at_us: u64, event: Event) -> Result<(), Error> {
        debug_assert!(at_us >= self.now_us, "time does not go back");
        self.now_us = at_us;
        match event {
            Event::Arrived { plan } if self.network.holds(plan) => {
                let fixed_us = to_us(self.setup.transfer.fixed_ms.into());
                for then in self.network.arrived(self.now_us as f64 / 1e3) {
                    self.agenda.plan(self.now_us + fixed_us, then);
                }
                self.plan_arrival();
                Ok(())
            }
            Event::Arrived { .. } => Ok(()),
            Event::Fetched { request } => self.fetched(request),
            Event::Prefilled { instance } => self.prefilled(instance),
            Event::HandedOver { request } => self.handed_over(request),
            Event::StepEnds { instance, plan } if self.instances[instance].plan == plan => {
                self.turn(instance)
            }
            Event::StepEnds { .. } => Ok(()),
            Event::Tick => self.tick(),
            Event::Learn => {
                self.host.learn(self.now_ms());
                self.agenda.plan(self.now_us + LEARN_EVERY_US, Event::Learn);
                Ok(())
            }
            Event::Swap { number } => {
                self.swapped.push(self.swaps[number].take_place(&self.host, self.now_us)?);
                Ok(())
            }
        }
    }

    /// A request that was placed: fetches what it was told to, and queues.
    fn begin(
        &mut self,
        number: u64,
        booked: u64,
        request: &Request,
        class: u16,
        placed: &Placed,
    ) -> Result<Decided, Error> {
        let (prefill, decode) = (self.by_name[&placed.prefill], self.by_name[&placed.decode]);
        let touch = Touch { class, time_ms: self.now_ms() };
        let own_blocks = placed.prefix_blocks as usize;
        let fetched_blocks = match &placed.transfer {
            Some((source, blocks)) => {
                self.fetch(number, prefill, source, own_blocks, *blocks as usize, touch)
            }
            None => 0,
        };
        let job = Job {
            booked,
            arrived_us: self.now_us,
            chain: self.chain.clone(),
            touch,
            prompt_tokens: request.input_tokens.into(),
            output_tokens: request.output_tokens.into(),
            prefill,
            decode,
            own_blocks,
            fetched_blocks,
            first_token_us: None,
            handed_over_blocks: 0,
            sent: false,
            part_us: self.now_us,
            parts: Parts::default(),
        };
        self.jobs.insert(number, job);
        let instance = &mut self.instances[prefill];
        let queue =
            instance.prefill.as_mut().expect("the conductor places prompts where they can be computed");
        queue.arrive(number, fetched_blocks > 0);
        self.turn(prefill)?;
        let fetched_blocks = fetched_blocks as u32;
        Ok(Decided::Placed { prefill: prefill as u32, decode: decode as u32, fetched_blocks })
    }

    /// Starts to fetch; as many blocks as the source really has.
    fn fetch(
        &mut self,
        number: u64,
        to: usize,
        source: &str,
        own: usize,
        blocks: usize,
        touch: Touch,
    ) -> usize {
        let from = self.by_name[source];
        let source = self.instances[from].prefill.as_mut();
        let there = source.map_or(0, |source| source.lend(&self.chain, own + blocks, touch));
        let blocks = there.saturating_sub(own);
        if blocks > 0 {
            self.send((from, to), blocks, Event::Fetched { request: number });
        }
        blocks
    }

    /// Sends blocks from one instance to another.
    fn send(&mut self, way: (usize, usize), blocks: usize, then: Event) {
        if self.network.leaves_rack(way.0, way.1) {
            self.tally.blocks_between_racks += blocks as u64;
        }
        let alone_ms = self.setup.alone_ms(blocks as u32);
        self.network.begin(self.now_us as f64 / 1e3, way, alone_ms, then);
        self.plan_arrival();
    }

    fn plan_arrival(&mut self) {
        if let Some((next_ms, plan)) = self.network.foresee() {
            self.agenda.plan(to_us(next_ms).max(self.now_us), Event::Arrived { plan });
        }
    }

    fn fetched(&mut self, number: u64) -> Result<(), Error> {
        let &Job { booked, prefill: at, .. } = &self.jobs[&number];
        self.part_ends(number, Part::Fetch);
        self.conductor.complete(booked, Stage::Transfer, self.now_ms())?;
        if let Some(prefill) = &mut self.instances[at].prefill {
            prefill.fetched(number);
        }
        self.turn(at)
    }

    /// What one instance does next: called whenever that may have changed.
    fn turn(&mut self, at: usize) -> Result<(), Error> {
        let now_ms = self.now_us as f64 / 1e3;
        let mut finished = std::mem::take(&mut self.finished);
        let instance = &mut self.instances[at];
        instance.plan += 1;
        if let Some(decode) = &mut instance.decode {
            decode.advance(now_ms, &mut finished);
        }
        let between = instance.decode.as_ref().is_none_or(|decode| decode.is_between_steps(now_ms));
        if between {
            self.compute(at)?;
        }
        let instance = &mut self.instances[at];
        let prompt_waits = !between && instance.ready().is_some();
        if let Some(next_ms) = instance.decode.as_ref().and_then(|decode| decode.next_ms(prompt_waits)) {
            let event = Event::StepEnds { instance: at, plan: instance.plan };
            self.agenda.plan(to_us(next_ms).max(self.now_us + 1), event);
        }
        for done in finished.drain(..) {
            self.finish_job(done)?;
        }
        self.finished = finished;
        Ok(())
    }

    /// Between steps: goes on with prompts, and begins those that are ready.
    fn compute(&mut self, at: usize) -> Result<(), Error> {
        for _ in 0..self.instances[at].end_chunks() {
            self.computed(at)?;
        }
        self.instances[at].admit();
        while let Some(number) = self.instances[at].ready() {
            self.begin_prompt(at, number);
        }
        self.instances[at].begin_chunks();
        Ok(())
    }

    /// Begins to compute a prompt that is ready.
    fn begin_prompt(&mut self, at: usize, number: u64) {
        let now_ms = self.now_us as f64 / 1e3;
        let instance = &mut self.instances[at];
        let Some(prefill) = &mut instance.prefill else { return };
        let job = &self.jobs[&number];
        let Start { found_blocks, fetched_blocks, ms } =
            prefill.start(&job.chain, job.own_blocks, job.fetched_blocks, job.prompt_tokens, now_ms);
        if let Some(ms) = ms {
            self.agenda.plan(self.now_us + to_us(ms), Event::Prefilled { instance: at });
            if let Some(decode) = &mut instance.decode {
                decode.set_halted(true, now_ms);
            }
        }
        let overlaps = self.setup.layer_wise && job.decode != at && job.output_tokens > 1;
        self.uses.add(&job.chain);
        self.tally.found(self.now_us, found_blocks as u64, fetched_blocks as u64, job.chain.len() as u64);
        self.part_ends(number, Part::Queue);
        if overlaps {
            self.hand_over(number);
        }
    }

    fn part_ends(&mut self, number: u64, part: Part) {
        let job = self.jobs.get_mut(&number).expect("a request on its way is in flight");
        job.parts.add(part, self.now_us - job.part_us);
        job.part_us = self.now_us;
    }

    /// A prompt is computed that was computed in one go.
    fn prefilled(&mut self, at: usize) -> Result<(), Error> {
        if let Some(decode) = &mut self.instances[at].decode {
            decode.set_halted(false, self.now_us as f64 / 1e3);
        }
        self.computed(at)?;
        self.turn(at)
    }

    /// The first token of the prompt at the head of the queue is there, and its blocks are resident.
    fn computed(&mut self, at: usize) -> Result<(), Error> {
        let now_ms = self.now_ms();
        let instance = &mut self.instances[at];
        let prefill = instance.prefill.as_mut().expect("what computed a prompt does prefill");
        let number = prefill.end();
        let job = self.jobs.get_mut(&number).expect("a request in a queue is in flight");
        let touch = Touch { time_ms: now_ms, ..job.touch };
        let (evicted, resident) = prefill.keep(&job.chain, touch);
        if !evicted.is_empty() {
            instance.sequence += 1;
            self.conductor.removed(&instance.name, instance.epoch, instance.sequence, None, &evicted)?;
        }
        instance.sequence += 1;
        self.conductor.stored(
            &instance.name,
            instance.epoch,
            instance.sequence,
            None,
            None,
            &job.chain[..resident],
        )?;
        self.conductor.complete(job.booked, Stage::Prefill { took_ms: None }, now_ms)?;
        let (decode, last) = (job.decode, job.output_tokens <= 1);
        if !last && self.is_turned_away(number) {
            return self.turn_away(number);
        }
        self.first_token(number);
        if last {
            return self.finish_job(Done { request: number, untold: 0 });
        }
        if decode == at {
            self.join(number);
        } else if !self.setup.layer_wise {
            self.hand_over(number);
        } else if self.jobs[&number].sent {
            self.agenda.plan(self.now_us, Event::HandedOver { request: number });
        }
        Ok(())
    }

    fn first_token(&mut self, number: u64) {
        let job = self.jobs.get_mut(&number).expect("a request that was computed is in flight");
        job.first_token_us = Some(self.now_us);
        self.tally.ttft.add(self.now_us - job.arrived_us);
        self.part_ends(number, Part::Prefill);
    }

    /// Whether the steps where it would be decoded would be too long with it.
    fn is_turned_away(&self, number: u64) -> bool {
        let job = &self.jobs[&number];
        let decode = self.instances[job.decode].decode.as_ref().filter(|_| self.setup.check_at_decode);
        decode.is_some_and(|decode| {
            decode.step_with_ms(job.prompt_tokens + 1) > f64::from(self.setup.tbt_slo_ms)
        })
    }

    /// Its prompt was computed for nothing.
    fn turn_away(&mut self, number: u64) -> Result<(), Error> {
        let job = self.jobs.remove(&number).expect("a request that was computed is in flight");
        self.conductor.complete(job.booked, Stage::Finished, self.now_ms())?;
        self.tally.rejected += 1;
        self.tally.turned_away += 1;
        self.ended.push(Ended { request: number, ttft_us: None });
        self.tally.check(self.jobs.len());
        Ok(())
    }

    fn hand_over(&mut self, number: u64) {
        let job = self.jobs.get_mut(&number).expect("a request that is handed over is in flight");
        let instance = &self.instances[job.decode];
        let there = instance.prefill.as_ref().map_or(0, |prefill| prefill.prefix(&job.chain));
        let (way, blocks) = ((job.prefill, job.decode), job.chain.len() - there);
        job.handed_over_blocks = blocks as u32;
        let then = Event::HandedOver { request: number };
        if blocks == 0 {
            self.agenda.plan(self.now_us, then);
            return;
        }
        self.tally.blocks_handed_over += blocks as u64;
        self.send(way, blocks, then);
    }

    fn handed_over(&mut self, number: u64) -> Result<(), Error> {
        let Some(job) = self.jobs.get_mut(&number) else { return Ok(()) }; // turned away meanwhile
        job.sent = true;
        let Some(computed_us) = job.first_token_us else { return Ok(()) };
        let last_layer_ms = match self.setup.layer_wise {
            true => self.setup.alone_ms(job.handed_over_blocks) / f64::from(self.setup.layers),
            false => 0.0,
        };
        let earliest_us = computed_us + to_us(last_layer_ms);
        if self.now_us < earliest_us {
            self.agenda.plan(earliest_us, Event::HandedOver { request: number });
            return Ok(());
        }
        let at = job.decode;
        self.part_ends(number, Part::HandOver);
        self.join(number);
        self.turn(at)
    }

    /// The request's blocks are where it is decoded.
    fn join(&mut self, number: u64) {
        let job = &self.jobs[&number];
        let (tokens, context_tokens) = (job.output_tokens - 1, job.prompt_tokens + 1);
        let blocks = (context_tokens + tokens).div_ceil(self.setup.block_size_tokens.into()) as u32;
        let decode = self.instances[job.decode].decode.as_mut();
        let decode = decode.expect("the conductor places requests where they can be decoded");
        decode.arrive(Arrival { request: number, tokens, context_tokens, blocks });
    }

    /// The last token is there.
    fn finish_job(&mut self, Done { request: number, untold }: Done) -> Result<(), Error> {
        self.part_ends(number, Part::Decode);
        let job = self.jobs.remove(&number).expect("a request ends once");
        let now_ms = self.now_ms();
        if untold > 0 {
            self.conductor.complete(job.booked, Stage::Progress(untold as u32), now_ms)?;
        }
        self.conductor.complete(job.booked, Stage::Finished, now_ms)?;
        let first_token_us = job.first_token_us.expect("what is decoded was computed");
        let ttft_us = first_token_us - job.arrived_us;
        let tbt_us = match job.output_tokens {
            0 | 1 => None,
            tokens => Some((self.now_us - first_token_us) / (tokens - 1)),
        };
        self.tally.parts.add_all(&job.parts);
        if let Some(tbt_us) = tbt_us {
            self.tally.tbt.add(tbt_us);
        }
        let within = |us: u64, slo_ms: f32| us as f64 <= f64::from(slo_ms) * 1e3;
        let in_time = within(ttft_us, self.setup.ttft_slo_ms)
            && tbt_us.is_none_or(|tbt_us| within(tbt_us, self.setup.tbt_slo_ms));
        self.tally.within_slo += u64::from(in_time);
        self.tally.finished += 1;
        self.ended.push(Ended { request: number, ttft_us: Some(ttft_us) });
        self.tally.check(self.jobs.len());
        Ok(())
    }

    /// Instances report, and the balancer is asked.
    fn tick(&mut self) -> Result<(), Error> {
        let now_ms = self.now_ms();
        for at in 0..self.instances.len() {
            self.report(at, now_ms)?;
        }
        self.note_load();
        let snapshot = self.conductor.tick(now_ms);
        let thresholds = self.balancer.tick(&snapshot);
        self.host.set_thresholds(thresholds);
        self.agenda.plan(self.now_us + self.setup.tick_ms * 1_000, Event::Tick);
        Ok(())
    }

    fn note_load(&mut self) {
        let now_ms = self.now_us as f64 / 1e3;
        self.load.add(self.now_us, self.instances.iter().map(|instance| instance.busy_until_ms(now_ms)));
    }

    fn report(&mut self, at: usize, now_ms: u64) -> Result<(), Error> {
        let mut finished = std::mem::take(&mut self.finished);
        let instance = &mut self.instances[at];
        let (mut free_blocks, mut waiting, mut told) = (u32::MAX, 0, Vec::new());
        if let Some(prefill) = &instance.prefill {
            waiting += prefill.waiting() as u32;
        }
        if let Some(decode) = &mut instance.decode {
            decode.advance(self.now_us as f64 / 1e3, &mut finished);
            decode.tell(|number, tokens| told.push((number, tokens)));
            free_blocks = decode.free_blocks();
            waiting += decode.waiting() as u32;
        }
        let report = conductor::Report { free_blocks, waiting: Some(waiting), ..Default::default() };
        self.conductor.report(&instance.name, instance.epoch, &report, now_ms)?;
        for (number, tokens) in told {
            let booked = self.jobs[&number].booked;
            self.conductor.complete(booked, Stage::Progress(tokens as u32), now_ms)?;
        }
        let anybody = !finished.is_empty();
        for done in finished.drain(..) {
            self.finish_job(done)?;
        }
        self.finished = finished;
        if anybody { self.turn(at) } else { Ok(()) }
    }
}

/// The settings of a host, except for what goes by the clock.
fn conductor_config(setup: &Setup) -> config::Conductor {
    config::Conductor {
        block_size_tokens: setup.block_size_tokens,
        requests_max: REQUESTS_MAX,
        // No instance is silent, and no request is given up, however long it waits.
        request_ttl: Span::secs(1 << 40),
        instance_ttl: Span::secs(1 << 40),
        balance_every: Span(std::time::Duration::from_millis(setup.tick_ms)),
        workers: 1,
        links: setup.links(),
        ..config::Conductor::default()
    }
}

/// The blocks of a prompt, each by the hash of everything up to it. 0 means "no parent" to the conductor.
fn chain_into(request: &Request, chain: &mut Vec<u64>) {
    chain.clear();
    let mut parent = request.tenant.into();
    for id in &request.blocks {
        parent = XxHash3_64::oneshot_with_seed(parent, &id.to_le_bytes()).max(1);
        chain.push(parent);
    }
}

/// The first microsecond at which `ms` milliseconds have passed.
fn to_us(ms: f64) -> u64 {
    (ms * 1e3).ceil() as u64
}
