//! The fleet: the instances, the work they have been given, and what the scheduler policies see
//! of it. A state machine: (state, event, now) to state; no clock, no I/O, no lock.
//!
//! One request passes through it so: [`Fleet::request`] turns it into the words of a question
//! (its columns come from [`crate::prefix_index`]), [`Told::check`] holds the policy's answer
//! against what it was told, [`Fleet::forecast`] predicts its times, [`Fleet::admit`] checks it
//! against the present and books the work, and `transfer_done`, `prefill_done`, `progress` and `finished`
//! settle it. Workers keep their copy of the tables and their policy instance current with
//! [`Told::catch_up`].
#![deny(clippy::disallowed_methods)]

mod answer;
mod booking;
mod changes;
mod clock;
mod cost;
mod error;
mod links;
mod load;
mod recent;
mod table;
#[cfg(test)]
mod tests;
mod told;

pub use self::answer::check_scores;
pub use self::clock::TableClock;
pub use self::cost::{DecodeCost, PrefillCost, TransferCost};
pub use self::error::{Error, Invalid};
pub use self::links::{LINKS_MAX, LinkSpec};
pub use self::recent::Recent;
pub use self::told::{Changes, Outlook, Told};
pub use kvasir_policy::scheduler::RETRY_MAX_MS;

use self::cost::usable;
use self::links::{Links, Path};
use self::load::{Outputs, Tenants};
use self::table::Table;
use hashbrown::HashMap;
use kvasir_policy::scheduler::{DecodeRow, Layout, PrefillRow, Request};
use std::collections::BTreeSet;

/// The most domains of the network that have a name: a policy may keep a table of all pairs.
pub const DOMAINS_MAX: usize = 255;

/// Hard caps of one fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Instances in each table; at most 65,535, the last number means rejection.
    pub instances: u16,
    pub requests: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { instances: 4_096, requests: 1 << 20 }
    }
}

/// A prefill instance as it registers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillSpec {
    pub cost: PrefillCost,
    pub transfer: TransferCost,
    pub capacity_blocks: u32,
}

/// A decode instance as it registers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeSpec {
    pub cost: DecodeCost,
    /// Cost of taking a request over from the prefill instance, if that is another.
    pub handover: TransferCost,
    pub capacity_blocks: u32,
}

/// Where an instance stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Site {
    /// Number of its machine, if it is known.
    pub host: Option<u32>,
    /// Number of its domain of the network; 0 = it named none.
    pub domain: u32,
}

/// Adapters (LoRA) of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Adapters {
    pub loaded: u32,
    /// As many as it can hold at once. `None` means that it does not say.
    pub most: Option<u32>,
}

/// What an instance says of itself now and then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub free_blocks: u32,
    /// Queued requests as the engine counts them. `None` means that it does not say.
    pub waiting: Option<u32>,
}

/// What a request needs, by numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// `None` means that it names no model; 0 means one that is not known here.
    pub model: Option<u32>,
    /// 0 means none, or one that is not known here.
    pub adapter: u32,
}

/// A request that wants to be scheduled; SLOs in ms, +infinity = none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ask {
    pub prompt_tokens: u32,
    /// Expected; 0 = unknown.
    pub output_tokens: u32,
    pub class: u32,
    pub tenant: u32,
    pub priority: u32,
    pub session: u64,
    pub seed: u64,
    pub ttft_slo_ms: f32,
    pub tbt_slo_ms: f32,
    /// It waited in a queue already: the policy is asked not to reject it.
    pub must_run: bool,
    /// The model and the adapter that it needs.
    pub needs: Needs,
}

/// A request of which nothing is known, without SLOs.
impl Default for Ask {
    fn default() -> Self {
        Self {
            prompt_tokens: 0,
            output_tokens: 0,
            class: 0,
            tenant: 0,
            priority: 0,
            session: 0,
            seed: 0,
            ttft_slo_ms: f32::INFINITY,
            tbt_slo_ms: f32::INFINITY,
            must_run: false,
            needs: Needs::default(),
        }
    }
}

/// What the fleet makes of a decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    Admitted(Admission),
    Rejected { reason: u32, retry_after_ms: u32 },
}

/// A request that was given to instances, with the times expected at admission.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Admission {
    pub prefill: u16,
    pub decode: u16,
    /// Prefix tokens that are not computed again.
    pub cached_tokens: u32,
    /// Blocks of them that another instance sends.
    pub fetched_blocks: u32,
    pub transfer_ms: f64,
    /// From prefill to decode once the prefill is done; 0 within one instance.
    pub handover_ms: f64,
    pub queue_ms: f64,
    pub prefill_ms: f64,
    /// Prefill starts when the instance is free and the prefix has arrived.
    pub ttft_ms: f64,
    /// Once the request and all others admitted there have joined the batch.
    pub tbt_ms: f64,
}

/// A request that was booked and has left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ended {
    pub id: u64,
    pub ask: Ask,
    pub admission: Admission,
    /// Identities of the prefill and the decode instance, as in their rows.
    pub identities: [u32; 2],
    pub decoded_tokens: u32,
    /// As its instance measured it, without the waits before it; `None` if that was not told.
    pub prefill_ms: Option<f64>,
    /// As measured; `None` if its first token was not heard of.
    pub ttft_ms: Option<f64>,
    /// The mean of those between its tokens, as measured; `None` if less than two were heard of.
    pub tbt_ms: Option<f64>,
}

/// How far a reader has followed the tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Version {
    /// Restarts of the table clock seen; 0 = has seen nothing.
    epoch: u64,
    prefill: u64,
    decode: u64,
    links: u64,
}

#[derive(Debug)]
struct Prefill {
    spec: PrefillSpec,
    site: Site,
    /// Decode slot of the same instance.
    peer: Option<u16>,
    /// Distinguishes the instance from an earlier one in the same slot.
    epoch: u64,
    available: bool,
    busy_until_ms: f64,
    /// Sum of the errors that have moved `busy_until_ms`, so that ends booked earlier move along.
    shifted_ms: f64,
    queued: u32,
    /// Fetches on their way to it.
    transfers: u32,
    /// What is on its way from it: fetches of others, and hand-overs.
    sending: u32,
    free_blocks: u32,
    waiting: Option<u32>,
    adapters: Adapters,
    reported_ms: u64,
}

impl Prefill {
    /// What one more block takes to leave, ms: its port is shared with what leaves now.
    fn send_ms_per_block(&self) -> f32 {
        self.spec.transfer.congested_ms_per_block(self.sending)
    }
}

#[derive(Debug)]
struct Decode {
    spec: DecodeSpec,
    site: Site,
    /// Prefill slot of the same instance.
    peer: Option<u16>,
    epoch: u64,
    available: bool,
    sequences: u32,
    context_tokens: u64,
    arriving_sequences: u32,
    arriving_tokens: u64,
    /// Booked for sequences that have not arrived: the instance itself knows nothing of them.
    arriving_blocks: u32,
    /// Requests whose prefill is done and whose blocks are on their way.
    handovers: u32,
    free_blocks: u32,
    waiting: Option<u32>,
    adapters: Adapters,
    reported_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Prefill,
    Decode,
}

/// A prefix on its way from another instance.
#[derive(Clone, Copy, Debug)]
struct Fetch {
    path: Path,
    source: u16,
    source_epoch: u64,
}

/// Booked work; given back exactly when the request leaves.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    admission: Admission,
    prefill_epoch: u64,
    decode_epoch: u64,
    phase: Phase,
    /// Its prefix, until that has arrived.
    fetch: Option<Fetch>,
    /// The way of its blocks from prefill to decode, if these are two instances.
    handover: Option<Path>,
    /// When they are expected to have arrived; set while they are on their way.
    handed_over_ms: Option<u64>,
    /// When its prefill is expected to end, less the instance's `shifted_ms`.
    prefill_end_ms: f64,
    context_tokens: u64,
    /// Expected; 0 = unknown.
    output_tokens: u32,
    decoded_tokens: u32,
    decode_blocks: u32,
    tenant: u32,
    /// Prompt and expected output, as booked for the tenant.
    tokens: u64,
    /// When it was admitted, or last made progress.
    heard_ms: u64,
    ask: Ask,
    booked_ms: u64,
    first_token_ms: Option<u64>,
    /// As measured by its instance.
    prefill_ms: Option<f64>,
}

/// See the module documentation.
#[derive(Debug)]
pub struct Fleet {
    limits: Limits,
    block_size_tokens: u32,
    /// The run of the host. 0 means that it does not say.
    run: u32,
    clock: TableClock,
    /// Counts registrations.
    epoch: u64,
    /// Counts restarts of the table clock, beginning with 1.
    clock_epoch: u64,
    prefill: Table<Prefill>,
    decode: Table<Decode>,
    links: Links,
    domains: u32,
    /// Instances that do both.
    peers: usize,
    requests: HashMap<u64, InFlight>,
    /// Expected ends of hand-overs under way, and whose they are.
    handovers: BTreeSet<(u64, u64)>,
    tenants: Tenants,
    outputs: Outputs,
}

impl Fleet {
    pub fn new(limits: Limits, block_size_tokens: u32, now_ms: u64) -> Self {
        let instances = usize::from(limits.instances);
        Self {
            limits,
            block_size_tokens: block_size_tokens.max(1),
            run: 0,
            clock: TableClock::new(now_ms),
            epoch: 1,
            clock_epoch: 1,
            prefill: Table::new(instances),
            decode: Table::new(instances),
            links: Links::new(&[]),
            domains: 1,
            peers: 0,
            requests: HashMap::new(),
            handovers: BTreeSet::new(),
            tenants: Tenants::default(),
            outputs: Outputs::default(),
        }
    }

    pub fn block_size_tokens(&self) -> u32 {
        self.block_size_tokens
    }

    /// Sets the links between domains.
    #[must_use]
    pub fn with_links(self, links: &[LinkSpec]) -> Self {
        Self { links: Links::new(links), ..self }
    }

    /// Sets the number of this run as policies are told it; another run of the host has another.
    #[must_use]
    pub fn in_run(self, run: u32) -> Self {
        Self { run, ..self }
    }

    /// Says how many domains there are, 0 and those that have a name. Readers start over if there are more of them.
    pub fn set_domains(&mut self, domains: u32) {
        if domains > self.domains {
            self.domains = domains;
            self.prefill.invalidate();
        }
    }

    pub fn prefill_slots(&self) -> usize {
        self.prefill.len()
    }

    pub fn decode_slots(&self) -> usize {
        self.decode.len()
    }

    /// Whether any instance does both.
    pub fn has_peers(&self) -> bool {
        self.peers > 0
    }

    /// Decode and prefill slot of each instance that does both.
    pub fn peers(&self) -> impl Iterator<Item = (u16, u16)> {
        self.decode.iter().filter_map(|(decode, d)| Some((decode, d.peer?)))
    }

    pub fn in_flight(&self) -> usize {
        self.requests.len()
    }

    /// Counts the instances that ever registered: while it stands still, a slot means the same instance
    /// or none.
    pub fn registrations(&self) -> u64 {
        self.epoch
    }

    /// Whether such an instance could register now; `replaces` one that leaves the table for it.
    ///
    /// # Errors
    /// [`Error::Cost`], [`Error::TableFull`].
    pub fn check_prefill(&self, spec: &PrefillSpec, replaces: bool) -> Result<(), Error> {
        let PrefillSpec { cost, transfer, capacity_blocks: _ } = spec;
        let cost = [cost.fixed_ms, cost.ms_per_token, cost.ms_per_pair];
        if !usable(&cost) || !usable(&[transfer.fixed_ms, transfer.ms_per_block]) {
            return Err(Error::Cost { table: "prefill" });
        }
        self.check_room("prefill", replaces || self.prefill.has_room())
    }

    /// # Errors
    /// As [`Self::check_prefill`].
    pub fn check_decode(&self, spec: &DecodeSpec, replaces: bool) -> Result<(), Error> {
        let DecodeSpec { cost, handover, capacity_blocks: _ } = spec;
        let cost = [cost.fixed_ms, cost.ms_per_sequence, cost.ms_per_context_token];
        if !usable(&cost) || !usable(&[handover.fixed_ms, handover.ms_per_block]) {
            return Err(Error::Cost { table: "decode" });
        }
        self.check_room("decode", replaces || self.decode.has_room())
    }

    fn check_room(&self, table: &'static str, has_room: bool) -> Result<(), Error> {
        let limit = usize::from(self.limits.instances);
        if has_room { Ok(()) } else { Err(Error::TableFull { table, limit }) }
    }

    /// Registers one instance in the table of each of its roles. Returns its slots there.
    ///
    /// # Errors
    /// [`Error::Cost`], [`Error::TableFull`]; then it is in neither.
    pub fn register(
        &mut self,
        prefill: Option<PrefillSpec>,
        decode: Option<DecodeSpec>,
        site: Site,
        now_ms: u64,
    ) -> Result<(Option<u16>, Option<u16>), Error> {
        prefill.as_ref().map_or(Ok(()), |spec| self.check_prefill(spec, false))?;
        decode.as_ref().map_or(Ok(()), |spec| self.check_decode(spec, false))?;
        self.epoch += 1;
        let prefill = prefill.map(|spec| self.insert_prefill(spec, site, now_ms)).transpose()?;
        let decode = decode.map(|spec| self.insert_decode(spec, site, now_ms)).transpose()?;
        if let (Some(prefill), Some(decode)) = (prefill, decode) {
            self.peers += 1;
            if let Some(p) = self.prefill.change(prefill) {
                p.peer = Some(decode);
            }
            if let Some(d) = self.decode.change(decode) {
                d.peer = Some(prefill);
            }
        }
        Ok((prefill, decode))
    }

    /// Registers an instance that does prefill only, at no known place.
    ///
    /// # Errors
    /// [`Error::Cost`], [`Error::TableFull`].
    pub fn register_prefill(&mut self, spec: PrefillSpec, now_ms: u64) -> Result<u16, Error> {
        self.check_prefill(&spec, false)?;
        self.epoch += 1;
        self.insert_prefill(spec, Site::default(), now_ms)
    }

    /// Registers an instance that decodes only, at no known place.
    ///
    /// # Errors
    /// As [`Self::register_prefill`].
    pub fn register_decode(&mut self, spec: DecodeSpec, now_ms: u64) -> Result<u16, Error> {
        self.check_decode(&spec, false)?;
        self.epoch += 1;
        self.insert_decode(spec, Site::default(), now_ms)
    }

    fn insert_prefill(&mut self, spec: PrefillSpec, site: Site, now_ms: u64) -> Result<u16, Error> {
        let capacity_blocks = spec.capacity_blocks;
        let instance = Prefill {
            spec,
            site,
            peer: None,
            epoch: self.epoch,
            available: true,
            busy_until_ms: now_ms as f64,
            shifted_ms: 0.0,
            queued: 0,
            transfers: 0,
            sending: 0,
            free_blocks: capacity_blocks,
            waiting: None,
            adapters: Adapters::default(),
            reported_ms: now_ms,
        };
        let limit = usize::from(self.limits.instances);
        self.prefill.insert(instance).ok_or(Error::TableFull { table: "prefill", limit })
    }

    fn insert_decode(&mut self, spec: DecodeSpec, site: Site, now_ms: u64) -> Result<u16, Error> {
        let capacity_blocks = spec.capacity_blocks;
        let instance = Decode {
            spec,
            site,
            peer: None,
            epoch: self.epoch,
            available: true,
            sequences: 0,
            context_tokens: 0,
            arriving_sequences: 0,
            arriving_tokens: 0,
            arriving_blocks: 0,
            handovers: 0,
            free_blocks: capacity_blocks,
            waiting: None,
            adapters: Adapters::default(),
            reported_ms: now_ms,
        };
        let limit = usize::from(self.limits.instances);
        self.decode.insert(instance).ok_or(Error::TableFull { table: "decode", limit })
    }

    /// The slot may be given to another instance; drop it from the prefix index first.
    ///
    /// # Errors
    /// [`Error::NoInstance`].
    pub fn unregister_prefill(&mut self, slot: u16) -> Result<(), Error> {
        let gone = self.prefill.remove(slot).ok_or(Error::NoInstance { table: "prefill", slot })?;
        if let Some(d) = gone.peer.and_then(|peer| self.decode.change(peer)) {
            d.peer = None;
            self.peers -= 1;
        }
        Ok(())
    }

    /// # Errors
    /// [`Error::NoInstance`].
    pub fn unregister_decode(&mut self, slot: u16) -> Result<(), Error> {
        let gone = self.decode.remove(slot).ok_or(Error::NoInstance { table: "decode", slot })?;
        if let Some(p) = gone.peer.and_then(|peer| self.prefill.change(peer)) {
            p.peer = None;
            self.peers -= 1;
        }
        Ok(())
    }

    /// Makes an instance available or not: for drained, dead and revived ones.
    ///
    /// # Errors
    /// [`Error::NoInstance`].
    pub fn set_prefill_available(&mut self, slot: u16, available: bool) -> Result<(), Error> {
        let instance = self.prefill.change(slot).ok_or(Error::NoInstance { table: "prefill", slot })?;
        instance.available = available;
        Ok(())
    }

    /// # Errors
    /// [`Error::NoInstance`].
    pub fn set_decode_available(&mut self, slot: u16, available: bool) -> Result<(), Error> {
        let instance = self.decode.change(slot).ok_or(Error::NoInstance { table: "decode", slot })?;
        instance.available = available;
        Ok(())
    }

    /// The adapters of an instance, by its slots.
    pub fn set_adapters(&mut self, prefill: Option<u16>, decode: Option<u16>, adapters: Adapters) {
        if let Some(instance) = prefill.and_then(|slot| self.prefill.change(slot)) {
            instance.adapters = adapters;
        }
        if let Some(instance) = decode.and_then(|slot| self.decode.change(slot)) {
            instance.adapters = adapters;
        }
    }

    /// What the instance itself says of its prefill half.
    ///
    /// # Errors
    /// [`Error::NoInstance`].
    pub fn report_prefill(&mut self, slot: u16, report: Report, now_ms: u64) -> Result<(), Error> {
        let instance = self.prefill.change(slot).ok_or(Error::NoInstance { table: "prefill", slot })?;
        instance.free_blocks = report.free_blocks.min(instance.spec.capacity_blocks);
        instance.waiting = report.waiting;
        instance.reported_ms = now_ms;
        Ok(())
    }

    /// # Errors
    /// [`Error::NoInstance`].
    pub fn report_decode(&mut self, slot: u16, report: Report, now_ms: u64) -> Result<(), Error> {
        let instance = self.decode.change(slot).ok_or(Error::NoInstance { table: "decode", slot })?;
        let free_blocks = report.free_blocks.min(instance.spec.capacity_blocks);
        instance.waiting = report.waiting;
        instance.free_blocks = free_blocks.saturating_sub(instance.arriving_blocks);
        instance.reported_ms = now_ms;
        Ok(())
    }

    /// Ends hand-overs that should have arrived, and restarts the table clock if it is due; call before
    /// [`Self::changes_since`] and [`Self::table_time`].
    pub fn tick(&mut self, now_ms: u64) {
        while let Some(&(end_ms, id)) = self.handovers.first()
            && end_ms <= now_ms
        {
            self.handovers.pop_first();
            self.end_handover(id);
        }
        if self.clock.rebase(now_ms) {
            self.clock_epoch += 1;
            self.prefill.invalidate();
            self.decode.invalidate();
        }
    }

    /// The rows a reader lacks; moves its version to the present. Returns `None` if it lacks nothing.
    pub fn changes_since(&self, version: &mut Version) -> Option<Changes> {
        let seen = *version;
        *version = Version {
            epoch: self.clock_epoch,
            prefill: self.prefill.version(),
            decode: self.decode.version(),
            links: self.links.version(),
        };
        if *version == seen {
            return None;
        }
        let same_clock = seen.epoch == self.clock_epoch;
        let prefill = self.prefill.changed_since(seen.prefill).filter(|_| same_clock);
        let decode = self.decode.changed_since(seen.decode).filter(|_| same_clock);
        let links = self.links.changed_since(seen.links).filter(|_| same_clock);
        let (Some(prefill), Some(decode), Some(links)) = (prefill, decode, links) else {
            return Some(self.full());
        };
        Some(Changes {
            open: None,
            prefill: prefill.into_iter().flat_map(|slot| self.prefill_row(slot).encode()).collect(),
            decode: decode.into_iter().flat_map(|slot| self.decode_row(slot).encode()).collect(),
            links,
        })
    }

    /// Both tables as policies see them, one row per slot; empty slots are unavailable.
    pub fn rows(&self) -> (Vec<PrefillRow>, Vec<DecodeRow>) {
        let prefill = (0..self.prefill.len()).map(|slot| self.prefill_row(slot as u16));
        let decode = (0..self.decode.len()).map(|slot| self.decode_row(slot as u16));
        (prefill.collect(), decode.collect())
    }

    /// `now_ms` on the clock of the rows.
    pub fn table_time(&self, now_ms: u64) -> f32 {
        self.clock.at(now_ms as f64)
    }

    /// The words of a request for the policies.
    pub fn request(&self, ask: &Ask) -> Request {
        Request {
            prompt_tokens: ask.prompt_tokens,
            output_tokens: ask.output_tokens,
            class: ask.class,
            tenant: ask.tenant,
            priority: ask.priority,
            session: ask.session,
            seed: ask.seed,
            ttft_slo: ask.ttft_slo_ms,
            tbt_slo: ask.tbt_slo_ms,
            hints: if ask.must_run { Request::MUST_RUN } else { 0 },
            model: ask.needs.model.unwrap_or(0),
            adapter: ask.needs.adapter,
            ..Request::default()
        }
    }

    fn full(&self) -> Changes {
        let prefill = self.prefill.iter().flat_map(|(slot, _)| self.prefill_row(slot).encode());
        let decode = self.decode.iter().flat_map(|(slot, _)| self.decode_row(slot).encode());
        let (prefill_slots, decode_slots) = (self.prefill.len() as u32, self.decode.len() as u32);
        Changes {
            open: Some(Layout {
                domains: self.domains,
                run: self.run,
                ..Layout::of(prefill_slots, decode_slots, self.block_size_tokens)
            }),
            prefill: prefill.collect(),
            decode: decode.collect(),
            links: self.links.rows(),
        }
    }

    /// An empty slot gives an unavailable row.
    fn prefill_row(&self, slot: u16) -> PrefillRow {
        let Some(p) = self.prefill.get(slot) else { return PrefillRow { slot, ..PrefillRow::default() } };
        PrefillRow {
            slot,
            available: p.available,
            busy_until: self.clock.at(p.busy_until_ms),
            cost_fixed: p.spec.cost.fixed_ms,
            cost_per_token: p.spec.cost.ms_per_token,
            cost_per_pair: p.spec.cost.ms_per_pair,
            transfer_fixed: p.spec.transfer.fixed_ms,
            transfer_per_block: p.spec.transfer.congested_ms_per_block(p.transfers),
            queued: p.queued,
            free_blocks: p.free_blocks,
            capacity_blocks: p.spec.capacity_blocks,
            reported_at: self.clock.at(p.reported_ms as f64),
            identity: identity(p.epoch),
            peer: p.peer,
            host: p.site.host,
            domain: p.site.domain,
            waiting: p.waiting,
            adapters: Some(p.adapters.loaded),
            adapters_max: p.adapters.most,
            send_per_block: p.send_ms_per_block(),
        }
    }

    fn decode_row(&self, slot: u16) -> DecodeRow {
        let Some(d) = self.decode.get(slot) else { return DecodeRow { slot, ..DecodeRow::default() } };
        DecodeRow {
            slot,
            available: d.available,
            sequences: d.sequences,
            context_tokens: d.context_tokens,
            free_blocks: d.free_blocks,
            capacity_blocks: d.spec.capacity_blocks,
            step_fixed: d.spec.cost.fixed_ms,
            step_per_sequence: d.spec.cost.ms_per_sequence,
            step_per_token: d.spec.cost.ms_per_context_token,
            arriving_sequences: d.arriving_sequences,
            arriving_tokens: d.arriving_tokens,
            reported_at: self.clock.at(d.reported_ms as f64),
            identity: identity(d.epoch),
            peer: d.peer,
            host: d.site.host,
            domain: d.site.domain,
            waiting: d.waiting,
            handover_fixed: d.spec.handover.fixed_ms,
            handover_per_block: d.spec.handover.congested_ms_per_block(d.handovers),
            adapters: Some(d.adapters.loaded),
            adapters_max: d.adapters.most,
        }
    }
}

/// The number of a registration as rows carry it: a float holds whole numbers up to 2^24.
fn identity(epoch: u64) -> u32 {
    (epoch & 0x00ff_ffff) as u32
}
