//! The scheduler slot: `scheduling` in `wit/policy-0.1/scheduler.wit`.

use crate::columns::argmin;
pub use crate::question::{Candidates, Column, HEAD_WORDS, Question, eligibility};
pub use crate::request::{REQUEST_WORDS, Request};
use crate::{Description, Settings};

/// The longest that a rejected request is told to wait, a day. More is a mistake of unit, and no valid answer.
pub const RETRY_MAX_MS: u32 = 24 * 3600 * 1000;
/// Values in one row of `update-prefill`.
pub const PREFILL_ROW: usize = 20;
/// Values in one row of `update-decode`.
pub const DECODE_ROW: usize = 21;
/// Values in one row of `update-links`.
pub const LINK_ROW: usize = 5;

/// Chooses the instances that serve a request.
pub trait Scheduler: Send {
    fn describe(&self) -> Description;

    /// Takes the operator's settings, before the first decision.
    ///
    /// # Errors
    /// A value that cannot be used; the text goes to the operator.
    fn configure(&mut self, _settings: &Settings) -> Result<(), String> {
        Ok(())
    }

    /// Decides one request against what the host has pushed.
    fn schedule(&mut self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Decision;

    /// One score per prefill slot, or one per prefill slot and then one per decode slot; smaller is better. Must not
    /// change state.
    fn explain(&self, _cluster: &Cluster, _request: &Request, _candidates: Candidates<'_>) -> Vec<f32> {
        Vec::new()
    }

    fn export_state(&self) -> Vec<u8> {
        Vec::new()
    }

    /// # Errors
    /// The state cannot be used; the policy starts cold.
    fn import_state(&mut self, _state: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

/// Why a request was rejected; the numbers are the contract's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    Ttft = 1,
    Tbt = 2,
    NoInstance = 3,
    NoMemory = 4,
    Policy = 5,
}

/// The reasons that a host takes; a rejection for another one is an invalid answer.
pub const REASONS: std::ops::RangeInclusive<u32> = Reason::Ttft as u32..=Reason::Policy as u32;

/// Where a request runs, or why it does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    Run(Placement),
    Reject {
        /// A number of [`Reason`].
        reason: u32,
        retry_after_ms: u32,
    },
}

/// The instances that serve a request, and what is kept of the decision once it is booked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    pub prefill: u32,
    /// The peer of `prefill`: the request stays there.
    pub decode: u32,
    /// Fetch these blocks from another prefill instance first.
    pub transfer: Option<Transfer>,
    /// The memo of the session from now on; 0 = none.
    pub session_memo: u64,
    /// Added to the memo of the tenant, wrapping.
    pub tenant_charge: u64,
}

/// Blocks to fetch from another prefill instance, counted from the chosen one's own prefix on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    pub source: u32,
    pub blocks: u32,
}

impl Decision {
    /// Runs without a transfer, and leaves no memo.
    pub fn run(prefill: u32, decode: u32) -> Self {
        Self::Run(Placement { prefill, decode, ..Placement::default() })
    }

    /// A longer wait than [`RETRY_MAX_MS`] becomes that.
    pub fn reject(reason: Reason, retry_after_ms: u32) -> Self {
        Self::Reject { reason: reason as u32, retry_after_ms: retry_after_ms.min(RETRY_MAX_MS) }
    }

    /// The same, fetching blocks first; a rejection stays one.
    #[must_use]
    pub fn fetching(mut self, source: u32, blocks: u32) -> Self {
        if let Self::Run(placement) = &mut self {
            placement.transfer = (blocks > 0).then_some(Transfer { source, blocks });
        }
        self
    }
}

/// The record that `schedule` answers with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub prefill: u32,
    pub decode: u32,
    pub transfer_blocks: u32,
    pub source: u32,
    pub reason: u32,
    pub retry_after: u32,
    pub session_memo: u64,
    pub tenant_charge: u64,
}

/// `prefill` of a rejection.
const REJECT: u32 = u32::MAX;

impl From<Decision> for Answer {
    #[inline]
    fn from(decision: Decision) -> Self {
        match decision {
            Decision::Run(Placement { prefill, decode, transfer, session_memo, tenant_charge }) => {
                let Transfer { source, blocks } = transfer.unwrap_or(Transfer { source: 0, blocks: 0 });
                let transfer_blocks = blocks;
                Self {
                    prefill,
                    decode,
                    transfer_blocks,
                    source,
                    session_memo,
                    tenant_charge,
                    ..Self::default()
                }
            }
            Decision::Reject { reason, retry_after_ms } => {
                Self { prefill: REJECT, reason, retry_after: retry_after_ms, ..Self::default() }
            }
        }
    }
}

impl From<Answer> for Decision {
    #[inline]
    fn from(answer: Answer) -> Self {
        if answer.prefill == REJECT {
            return Self::Reject { reason: answer.reason, retry_after_ms: answer.retry_after };
        }
        let Answer { prefill, decode, transfer_blocks, source, session_memo, tenant_charge, .. } = answer;
        let transfer = (transfer_blocks > 0).then_some(Transfer { source, blocks: transfer_blocks });
        Self::Run(Placement { prefill, decode, transfer, session_memo, tenant_charge })
    }
}

/// What `open` gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub prefill_slots: u32,
    pub decode_slots: u32,
    pub block_size_tokens: u32,
    /// Values in one row of `update-prefill`.
    pub prefill_row: u32,
    /// Values in one row of `update-decode`.
    pub decode_row: u32,
    /// Words of a request before its columns.
    pub request_words: u32,
    /// Domains of the network.
    pub domains: u32,
    /// Values in one row of `update-links`.
    pub link_row: u32,
    /// Run of the host, another number after each restart: identities and dense numbers are those of one run. 0
    /// means that it does not say.
    pub run: u32,
}

/// Empty tables in the sizes of this version of the contract.
impl Default for Layout {
    fn default() -> Self {
        Self {
            prefill_slots: 0,
            decode_slots: 0,
            block_size_tokens: 1,
            prefill_row: PREFILL_ROW as u32,
            decode_row: DECODE_ROW as u32,
            request_words: HEAD_WORDS as u32,
            domains: 1,
            link_row: LINK_ROW as u32,
            run: 0,
        }
    }
}

impl Layout {
    /// Tables of the given sizes, with rows of this version of the contract.
    pub fn of(prefill_slots: u32, decode_slots: u32, block_size_tokens: u32) -> Self {
        Self { prefill_slots, decode_slots, block_size_tokens, ..Self::default() }
    }

    pub fn encode(&self) -> [u32; 9] {
        [
            self.prefill_slots,
            self.decode_slots,
            self.block_size_tokens,
            self.prefill_row,
            self.decode_row,
            self.request_words,
            self.domains,
            self.link_row,
            self.run,
        ]
    }

    /// Absent values are as in [`Layout::default`]; additional ones are ignored.
    pub fn decode(values: &[u32]) -> Self {
        let known = Self::default();
        let value = |at: usize, absent: u32| values.get(at).copied().unwrap_or(absent);
        Self {
            prefill_slots: value(0, known.prefill_slots),
            decode_slots: value(1, known.decode_slots),
            block_size_tokens: value(2, known.block_size_tokens),
            prefill_row: value(3, known.prefill_row),
            decode_row: value(4, known.decode_row),
            request_words: value(5, known.request_words),
            domains: value(6, known.domains),
            link_row: value(7, known.link_row),
            run: value(8, known.run),
        }
    }
}

/// One row of the prefill table; fields in the order of the contract.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PrefillRow {
    pub slot: u16,
    pub available: bool,
    pub busy_until: f32,
    pub cost_fixed: f32,
    pub cost_per_token: f32,
    pub cost_per_pair: f32,
    pub transfer_fixed: f32,
    pub transfer_per_block: f32,
    pub queued: u32,
    pub free_blocks: u32,
    pub capacity_blocks: u32,
    pub reported_at: f32,
    /// Number of the registration, below 2^24.
    pub identity: u32,
    /// Decode slot of the same instance. `None` means that it does not decode.
    pub peer: Option<u16>,
    /// Number of its machine; `None` if unknown.
    pub host: Option<u32>,
    pub domain: u32,
    /// Queued requests as the engine counts them; `None` if not reported.
    pub waiting: Option<u32>,
    /// Adapters loaded; `None` if unknown.
    pub adapters: Option<u32>,
    /// Adapters it can hold at once; `None` if it is not said.
    pub adapters_max: Option<u32>,
    /// What a block takes to leave it, with what it sends now.
    pub send_per_block: f32,
}

impl PrefillRow {
    pub fn encode(&self) -> [f32; PREFILL_ROW] {
        [
            f32::from(self.slot),
            f32::from(u8::from(self.available)),
            self.busy_until,
            self.cost_fixed,
            self.cost_per_token,
            self.cost_per_pair,
            self.transfer_fixed,
            self.transfer_per_block,
            self.queued as f32,
            self.free_blocks as f32,
            self.capacity_blocks as f32,
            self.reported_at,
            self.identity as f32,
            number(self.peer.map(u32::from)),
            number(self.host),
            self.domain as f32,
            number(self.waiting),
            number(self.adapters),
            number(self.adapters_max),
            self.send_per_block,
        ]
    }
}

/// One row of the decode table; fields in the order of the contract.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DecodeRow {
    pub slot: u16,
    pub available: bool,
    pub sequences: u32,
    pub context_tokens: u64,
    pub free_blocks: u32,
    pub capacity_blocks: u32,
    pub step_fixed: f32,
    pub step_per_sequence: f32,
    pub step_per_token: f32,
    pub arriving_sequences: u32,
    pub arriving_tokens: u64,
    pub reported_at: f32,
    /// Number of the registration, below 2^24.
    pub identity: u32,
    /// Prefill slot of the same instance. `None` means that it does no prefill.
    pub peer: Option<u16>,
    /// Number of its machine; `None` if unknown.
    pub host: Option<u32>,
    pub domain: u32,
    /// Queued requests as the engine counts them; `None` if not reported.
    pub waiting: Option<u32>,
    pub handover_fixed: f32,
    pub handover_per_block: f32,
    /// Adapters loaded; `None` if unknown.
    pub adapters: Option<u32>,
    /// Adapters it can hold at once; `None` if it is not said.
    pub adapters_max: Option<u32>,
}

impl DecodeRow {
    pub fn encode(&self) -> [f32; DECODE_ROW] {
        [
            f32::from(self.slot),
            f32::from(u8::from(self.available)),
            self.sequences as f32,
            self.context_tokens as f32,
            self.free_blocks as f32,
            self.capacity_blocks as f32,
            self.step_fixed,
            self.step_per_sequence,
            self.step_per_token,
            self.arriving_sequences as f32,
            self.arriving_tokens as f32,
            self.reported_at,
            self.identity as f32,
            number(self.peer.map(u32::from)),
            number(self.host),
            self.domain as f32,
            number(self.waiting),
            self.handover_fixed,
            self.handover_per_block,
            number(self.adapters),
            number(self.adapters_max),
        ]
    }
}

/// A number that may be missing; the contract writes -1 for that.
fn number(known: Option<u32>) -> f32 {
    known.map_or(-1.0, |number| number as f32)
}

/// A slot, machine or count out of a column. Returns `None` if it is missing.
fn known(column: &[f32], slot: usize) -> Option<usize> {
    column.get(slot).filter(|value| **value >= 0.0).map(|value| *value as usize)
}

macro_rules! table {
    ($(#[$doc:meta])* $name:ident { $($column:ident),* $(,)? } $($(#[$derived_doc:meta])* $derived:ident)*) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default)]
        pub struct $name {
            $(pub $column: Vec<f32>,)*
            $($(#[$derived_doc])* pub $derived: Vec<f32>,)*
        }

        impl $name {
            fn reset(&mut self, slots: usize) {
                $(self.$column.clear(); self.$column.resize(slots, 0.0);)*
                let Self { peer, host, waiting, adapters, adapters_max, .. } = self;
                for unknown in [peer, host, waiting, adapters, adapters_max] {
                    unknown.fill(-1.0);
                }
                $(self.$derived.resize(slots, 0.0);)*
                (0..slots).for_each(|slot| self.derive(slot));
            }

            /// `stride`: values in one row; those that are not known here are skipped. Rows naming a slot outside
            /// the table are skipped, and so is a ragged tail.
            fn update(&mut self, rows: &[f32], stride: u32) {
                for row in rows.chunks_exact(stride.max(1) as usize) {
                    let slot = row[0] as usize;
                    if slot < self.available.len() {
                        let mut values = row[1..].iter();
                        $(if let Some(&value) = values.next() { self.$column[slot] = value; })*
                        self.derive(slot);
                    }
                }
            }

            /// Number of slots.
            pub fn len(&self) -> usize {
                self.available.len()
            }

            pub fn is_empty(&self) -> bool {
                self.available.is_empty()
            }

            /// Slot of the same instance in the other table. Returns `None` if it does one of the two only.
            pub fn peer_of(&self, slot: usize) -> Option<usize> {
                known(&self.peer, slot)
            }

            /// Number of the machine that the instance runs on. Returns `None` if it is not known.
            pub fn host_of(&self, slot: usize) -> Option<usize> {
                known(&self.host, slot)
            }

            /// Queued requests as the engine counts them. Returns `None` if it does not report them.
            pub fn waiting_at(&self, slot: usize) -> Option<usize> {
                known(&self.waiting, slot)
            }

            /// Whether the instance has as many adapters loaded as it can hold. Returns false if that is not known.
            pub fn holds_no_more_adapters(&self, slot: usize) -> bool {
                let (loaded, most) = (known(&self.adapters, slot), known(&self.adapters_max, slot));
                loaded.zip(most).is_some_and(|(loaded, most)| loaded >= most)
            }
        }
    };
}

table! {
    /// The prefill table by columns, one value per slot; units as in the contract. The last two are computed
    /// here when a row changes, so that a decision does not compute them again.
    PrefillTable {
        available, busy_until, cost_fixed, cost_per_token, cost_per_pair, transfer_fixed,
        transfer_per_block, queued, free_blocks, capacity_blocks, reported_at, identity, peer, host, domain, waiting,
        adapters, adapters_max, send_per_block,
    }
    /// `busy_until`, or +infinity if the slot is unavailable.
    free_at
    /// `cost_per_pair` / 2.
    half_cost_per_pair
}

impl PrefillTable {
    fn derive(&mut self, slot: usize) {
        let available = self.available[slot] == 1.0;
        self.free_at[slot] = if available { self.busy_until[slot] } else { f32::INFINITY };
        self.half_cost_per_pair[slot] = self.cost_per_pair[slot] * 0.5;
    }
}

table! {
    /// The decode table by columns, one value per slot; units as in the contract. The last two are computed here
    /// when a row changes.
    DecodeTable {
        available, sequences, context_tokens, free_blocks, capacity_blocks, step_fixed,
        step_per_sequence, step_per_token, arriving_sequences, arriving_tokens, reported_at, identity, peer, host,
        domain, waiting, handover_fixed, handover_per_block, adapters, adapters_max,
    }
    /// `free_blocks`, or -1 if the slot is unavailable.
    room
    /// Step time once the arriving sequences and one more have joined, not counting the context of that one.
    joined_step
}

impl DecodeTable {
    fn derive(&mut self, i: usize) {
        self.room[i] = if self.available[i] == 1.0 { self.free_blocks[i] } else { -1.0 };
        let sequences = self.sequences[i] + self.arriving_sequences[i] + 1.0;
        let tokens = self.context_tokens[i] + self.arriving_tokens[i];
        self.joined_step[i] =
            self.step_fixed[i] + self.step_per_sequence[i] * sequences + self.step_per_token[i] * tokens;
    }
}

/// What lies between two domains of the network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// ms for any transfer.
    pub fixed: f32,
    /// On the receiver's time per block, congestion included.
    pub factor: f32,
    /// Transfers on their way now.
    pub under_way: u32,
}

/// Between domains of which nothing was said.
impl Default for Link {
    fn default() -> Self {
        Self { fixed: 0.0, factor: 1.0, under_way: 0 }
    }
}

impl Link {
    /// The row of `update-links` for this link.
    pub fn encode(&self, from: u32, to: u32) -> [f32; LINK_ROW] {
        [from as f32, to as f32, self.fixed, self.factor, self.under_way as f32]
    }
}

/// Links by pairs of domains.
#[derive(Clone, Debug, Default)]
pub struct Links {
    domains: usize,
    /// Row by row, `from` before `to`; empty while no link was named.
    links: Vec<Link>,
}

impl Links {
    fn reset(&mut self, domains: u32) {
        *self = Self { domains: domains as usize, links: Vec::new() };
    }

    /// Rows of domains that do not exist are skipped, as for tables.
    fn update(&mut self, rows: &[f32], stride: u32) {
        for row in rows.chunks_exact(stride.max(1) as usize) {
            let Some(&[from, to, fixed, factor, under_way]) = row.first_chunk() else { return };
            let (from, to) = (from as usize, to as usize);
            if from < self.domains && to < self.domains {
                self.links.resize(self.domains * self.domains, Link::default());
                self.links[from * self.domains + to] = Link { fixed, factor, under_way: under_way as u32 };
            }
        }
    }

    /// Whether no link was named: all ways are alike.
    pub fn is_empty(&self) -> bool {
        self.links.is_empty()
    }

    /// What lies between two domains.
    pub fn between(&self, from: f32, to: f32) -> Link {
        let (from, to) = (from as usize, to as usize);
        let known = from < self.domains && to < self.domains;
        let link = if known { self.links.get(from * self.domains + to) } else { None };
        link.copied().unwrap_or_default()
    }
}

/// Thresholds steered by the balancer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Thresholds {
    /// Best prefix over own prefix beyond which a transfer is considered (Algorithm 1, line 5).
    pub kvcache_balancing: f32,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self { kvcache_balancing: 1.5 }
    }
}

impl Thresholds {
    fn set(&mut self, values: &[f32]) {
        if let [balancing, ..] = *values
            && balancing.is_finite()
        {
            self.kvcache_balancing = balancing;
        }
    }
}

/// What the host has pushed, as of one decision.
#[derive(Clone, Debug, Default)]
pub struct Cluster {
    /// ms on the table clock.
    pub now: f32,
    pub prefill: PrefillTable,
    pub decode: DecodeTable,
    pub links: Links,
    pub thresholds: Thresholds,
    pub block_size_tokens: u32,
    /// Run of the host ([`Layout::run`]).
    pub run: u32,
}

impl Decision {
    /// The rejection of a request that would miss one of its SLOs with these times, ms. `None` if it keeps them, or must run.
    pub fn missed_slo(request: &Request, ttft_ms: f32, tbt_ms: f32) -> Option<Self> {
        if request.must_run() {
            None
        } else if ttft_ms > request.ttft_slo {
            Some(Self::reject(Reason::Ttft, (ttft_ms - request.ttft_slo) as u32))
        } else {
            (tbt_ms > request.tbt_slo).then(|| Self::reject(Reason::Tbt, 1_000))
        }
    }
}

impl Cluster {
    /// ms to fetch `blocks` of a prefix from one prefill slot to another; slots must be in the table.
    pub fn fetch_ms(&self, source: usize, prefill: usize, blocks: u32) -> f32 {
        let p = &self.prefill;
        if source == prefill || blocks == 0 {
            return 0.0;
        }
        let link = self.links.between(p.domain[source], p.domain[prefill]);
        let per_block = (link.factor * p.transfer_per_block[prefill]).max(p.send_per_block[source]);
        link.fixed + p.transfer_fixed[prefill] + per_block * blocks as f32
    }

    /// ms until a prefill slot has computed all that it was given; the slot must be in the table.
    pub fn queue_ms(&self, prefill: usize) -> f32 {
        (self.prefill.busy_until[prefill] - self.now).max(0.0)
    }

    /// ms to compute a prompt on a prefill slot that has its first `blocks`, by the costs that the instance registered; the slot must be
    /// in the table.
    pub fn prefill_ms(&self, prefill: usize, request: &Request, blocks: u32) -> f32 {
        let (t, prompt) = (&self.prefill, request.prompt_tokens as f32);
        let cached = (blocks as f32 * self.block_size_tokens as f32).min(prompt);
        let per_token = t.cost_per_token[prefill] + t.half_cost_per_pair[prefill] * (prompt + cached);
        t.cost_fixed[prefill] + (prompt - cached) * per_token
    }

    /// ms to the first token on a prefill slot with what is stored there: queue and prefill; +infinity if it cannot be chosen. The slot
    /// must be in the table.
    pub fn ttft_ms(&self, prefill: usize, request: &Request, candidates: Candidates<'_>) -> f32 {
        if self.prefill.available[prefill] != 1.0 || !candidates.can_prefill(prefill) {
            return f32::INFINITY;
        }
        self.queue_ms(prefill) + self.prefill_ms(prefill, request, candidates.prefix_of(prefill))
    }

    /// ms between tokens on a decode slot once the request has joined; the slot must be in the table.
    pub fn tbt_ms(&self, decode: usize, request: &Request) -> f32 {
        let t = &self.decode;
        t.joined_step[decode] + t.step_per_token[decode] * request.prompt_tokens as f32
    }

    /// Whether a decode slot is available and has memory for the prompt and the answer; the slot must be in the table.
    pub fn has_room(&self, decode: usize, request: &Request) -> bool {
        self.decode.room[decode] >= self.blocks(request)
    }

    /// Of the prompt and the answer.
    fn blocks(&self, request: &Request) -> f32 {
        let tokens = request.prompt_tokens as f32 + request.output_tokens as f32;
        (tokens / (self.block_size_tokens as f32).max(1.0)).ceil()
    }

    /// The decode slots that can take a request.
    pub fn decodes(&self, request: &Request, candidates: Candidates<'_>) -> impl Iterator<Item = usize> {
        let blocks = self.blocks(request);
        (0..self.decode.len())
            .filter(move |&slot| self.decode.room[slot] >= blocks && candidates.can_decode(slot))
    }

    /// Takes the prefill slot with the least of `ttft_ms`, which has a time to first token for each and +infinity for who cannot be chosen,
    /// and the decode slot with the least time between tokens, unless one of the two misses the request's SLO.
    pub fn fastest(&self, request: &Request, candidates: Candidates<'_>, ttft_ms: &[f32]) -> Decision {
        let Some(prefill) = argmin(ttft_ms) else { return Decision::reject(Reason::NoInstance, 1_000) };
        let timed = self.decodes(request, candidates).map(|slot| (self.tbt_ms(slot, request), slot));
        let Some((tbt_ms, decode)) = timed.min_by(|a, b| a.0.total_cmp(&b.0)) else {
            return self.no_decode(candidates);
        };
        let rejection = Decision::missed_slo(request, ttft_ms[prefill], tbt_ms);
        rejection.unwrap_or(Decision::run(prefill as u32, decode as u32))
    }

    /// The rejection where no decode slot can take a request: for want of memory, or of an instance.
    pub fn no_decode(&self, candidates: Candidates<'_>) -> Decision {
        let any =
            (0..self.decode.len()).any(|slot| self.decode.room[slot] >= 0.0 && candidates.can_decode(slot));
        Decision::reject(if any { Reason::NoMemory } else { Reason::NoInstance }, 1_000)
    }

    /// ms to hand a prompt of `blocks` over from prefill to decode, 0 within one instance; slots must be in the
    /// tables.
    pub fn handover_ms(&self, prefill: usize, decode: usize, blocks: u32) -> f32 {
        let (p, d) = (&self.prefill, &self.decode);
        if p.peer_of(prefill) == Some(decode) {
            return 0.0;
        }
        let link = self.links.between(p.domain[prefill], d.domain[decode]);
        let per_block = (link.factor * d.handover_per_block[decode]).max(p.send_per_block[prefill]);
        link.fixed + d.handover_fixed[decode] + per_block * blocks as f32
    }
}

/// A scheduler with the tables it decides on: the exports of `scheduling`, natively.
pub struct Kept<S: ?Sized> {
    cluster: Cluster,
    layout: Layout,
    scheduler: Box<S>,
}

impl<S: Scheduler + ?Sized> Kept<S> {
    pub fn new(scheduler: Box<S>) -> Self {
        Self { cluster: Cluster::default(), layout: Layout::default(), scheduler }
    }

    pub fn scheduler(&mut self) -> &mut S {
        &mut self.scheduler
    }

    pub fn open(&mut self, layout: &[u32]) {
        let layout = Layout::decode(layout);
        self.cluster.prefill.reset(layout.prefill_slots as usize);
        self.cluster.decode.reset(layout.decode_slots as usize);
        self.cluster.links.reset(layout.domains);
        self.cluster.block_size_tokens = layout.block_size_tokens;
        self.cluster.run = layout.run;
        self.layout = layout;
    }

    pub fn update_prefill(&mut self, rows: &[f32]) {
        self.cluster.prefill.update(rows, self.layout.prefill_row);
    }

    pub fn update_decode(&mut self, rows: &[f32]) {
        self.cluster.decode.update(rows, self.layout.decode_row);
    }

    pub fn update_links(&mut self, rows: &[f32]) {
        self.cluster.links.update(rows, self.layout.link_row);
    }

    pub fn set_thresholds(&mut self, values: &[f32]) {
        self.cluster.thresholds.set(values);
    }

    pub fn schedule(&mut self, now: f32, question: &[u32]) -> Decision {
        self.cluster.now = now;
        let candidates = candidates(&self.layout, question);
        self.scheduler.schedule(&self.cluster, &Request::decode(question), candidates)
    }

    pub fn explain(&mut self, now: f32, question: &[u32]) -> Vec<f32> {
        self.cluster.now = now;
        let candidates = candidates(&self.layout, question);
        self.scheduler.explain(&self.cluster, &Request::decode(question), candidates)
    }
}

#[inline]
fn candidates<'a>(layout: &Layout, question: &'a [u32]) -> Candidates<'a> {
    let Layout { prefill_slots, decode_slots, request_words, .. } = *layout;
    Candidates::of_question(question, request_words as usize, prefill_slots as usize, decode_slots as usize)
}

#[cfg(test)]
mod tests;
