//! The scheduler slot: `scheduling` in `wit/policy-0.1/scheduler.wit`.

use crate::{Description, Settings};

/// Values in one row of `update-prefill` and `update-decode`.
pub const ROW: usize = 12;

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

    /// Decides one request against the tables the host has pushed.
    fn schedule(&mut self, cluster: &Cluster, request: &Request, prefix: Prefix<'_>) -> Decision;

    /// One score per prefill slot, smaller is better; must not change state.
    fn explain(&self, _cluster: &Cluster, _request: &Request, _prefix: Prefix<'_>) -> Vec<f32> {
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

/// One request, as the scheduler sees it. Times in ms on the table clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    pub now: f32,
    pub prompt_tokens: u32,
    /// Expected; 0 = unknown.
    pub output_tokens: u32,
    pub class: u32,
    pub tenant: u32,
    pub priority: u32,
    /// Equal for requests of one conversation; 0 = none.
    pub session: u64,
    pub seed: u64,
    /// +infinity = none.
    pub ttft_slo: f32,
    pub tbt_slo: f32,
    pub hints: u32,
}

impl Request {
    /// Bit 0 of `hints`: do not reject.
    pub fn must_run(&self) -> bool {
        self.hints & 1 == 1
    }
}

/// Leading blocks of the prompt stored at each prefill slot.
#[derive(Clone, Copy, Debug)]
pub struct Prefix<'a> {
    columns: &'a [u32],
    slots: usize,
}

impl<'a> Prefix<'a> {
    /// `columns` holds one value per slot and column; a ragged tail is ignored.
    pub fn new(columns: &'a [u32], slots: usize) -> Self {
        Self { columns, slots }
    }

    /// Stored at that slot in any tier. Empty if the host gave no column.
    pub fn any_tier(&self) -> &'a [u32] {
        self.column(0).unwrap_or(&[])
    }

    /// Column 1: in HBM; column 2: in HBM or DRAM. `None` if the host has one tier only.
    pub fn column(&self, k: usize) -> Option<&'a [u32]> {
        self.columns.get(k * self.slots..(k + 1) * self.slots)
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

/// Answer of `schedule`, packed into 64 bits on the boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    Run {
        prefill: u16,
        decode: u16,
        /// Fetch this many blocks from that prefill slot first.
        transfer: Option<Transfer>,
    },
    Reject {
        /// A number of [`Reason`], or the policy's own.
        reason: u16,
        retry_after_ms: u32,
    },
}

/// Blocks to fetch from another prefill instance, counted from the chosen one's own prefix on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    pub source: u16,
    pub blocks: u16,
}

const REJECT: u16 = u16::MAX;

impl Decision {
    /// Runs without a transfer.
    pub fn run(prefill: u16, decode: u16) -> Self {
        Self::Run { prefill, decode, transfer: None }
    }

    pub fn reject(reason: Reason, retry_after_ms: u32) -> Self {
        Self::Reject { reason: reason as u16, retry_after_ms }
    }

    pub fn pack(self) -> u64 {
        match self {
            Self::Run { prefill, decode, transfer } => {
                let t = transfer.unwrap_or(Transfer { source: 0, blocks: 0 });
                u64::from(prefill)
                    | u64::from(decode) << 16
                    | u64::from(t.source) << 32
                    | u64::from(t.blocks) << 48
            }
            Self::Reject { reason, retry_after_ms } => {
                u64::from(REJECT) | u64::from(reason) << 16 | u64::from(retry_after_ms) << 32
            }
        }
    }

    pub fn unpack(bits: u64) -> Self {
        let part = |i: u32| (bits >> (16 * i)) as u16;
        if part(0) == REJECT {
            return Self::Reject { reason: part(1), retry_after_ms: (bits >> 32) as u32 };
        }
        let transfer = (part(3) > 0).then(|| Transfer { source: part(2), blocks: part(3) });
        Self::Run { prefill: part(0), decode: part(1), transfer }
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
}

impl PrefillRow {
    pub fn encode(&self) -> [f32; ROW] {
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
}

impl DecodeRow {
    pub fn encode(&self) -> [f32; ROW] {
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
        ]
    }
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
                $(self.$derived.resize(slots, 0.0);)*
                (0..slots).for_each(|slot| self.derive(slot));
            }

            /// Rows naming a slot outside the table are skipped.
            fn update(&mut self, rows: &[f32]) {
                for row in rows.chunks_exact(ROW) {
                    let slot = row[0] as usize;
                    if slot < self.available.len() {
                        let mut values = row[1..].iter().copied();
                        $(self.$column[slot] = values.next().unwrap_or(0.0);)*
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
        }
    };
}

table! {
    /// The prefill table by columns, one value per slot; units as in the contract. The last two are computed
    /// here when a row changes, so that a decision does not compute them again.
    PrefillTable {
        available, busy_until, cost_fixed, cost_per_token, cost_per_pair, transfer_fixed,
        transfer_per_block, queued, free_blocks, capacity_blocks, reported_at,
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
        step_per_sequence, step_per_token, arriving_sequences, arriving_tokens, reported_at,
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

/// What the host has pushed: the two tables, the thresholds, the block size.
#[derive(Clone, Debug, Default)]
pub struct Cluster {
    pub prefill: PrefillTable,
    pub decode: DecodeTable,
    pub thresholds: Thresholds,
    pub block_size_tokens: u32,
}

/// A scheduler with the tables it decides on: the exports of `scheduling`, natively.
pub struct Kept<S: ?Sized> {
    cluster: Cluster,
    scheduler: Box<S>,
}

impl<S: Scheduler + ?Sized> Kept<S> {
    pub fn new(scheduler: Box<S>) -> Self {
        Self { cluster: Cluster::default(), scheduler }
    }

    pub fn scheduler(&mut self) -> &mut S {
        &mut self.scheduler
    }

    pub fn open(&mut self, prefill_slots: u32, decode_slots: u32, block_size_tokens: u32) {
        self.cluster.prefill.reset(prefill_slots as usize);
        self.cluster.decode.reset(decode_slots as usize);
        self.cluster.block_size_tokens = block_size_tokens;
    }

    pub fn update_prefill(&mut self, rows: &[f32]) {
        self.cluster.prefill.update(rows);
    }

    pub fn update_decode(&mut self, rows: &[f32]) {
        self.cluster.decode.update(rows);
    }

    pub fn set_thresholds(&mut self, values: &[f32]) {
        self.cluster.thresholds.set(values);
    }

    pub fn schedule(&mut self, request: &Request, prefix_blocks: &[u32]) -> u64 {
        let prefix = Prefix::new(prefix_blocks, self.cluster.prefill.len());
        self.scheduler.schedule(&self.cluster, request, prefix).pack()
    }

    pub fn explain(&self, request: &Request, prefix_blocks: &[u32]) -> Vec<f32> {
        let prefix = Prefix::new(prefix_blocks, self.cluster.prefill.len());
        self.scheduler.explain(&self.cluster, request, prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decisions_survive_packing() {
        let transfer = Some(Transfer { source: 65_534, blocks: 65_535 });
        for decision in [
            Decision::run(0, 0),
            Decision::run(65_534, 65_535),
            Decision::Run { prefill: 7, decode: 9, transfer },
            Decision::reject(Reason::Tbt, u32::MAX),
        ] {
            assert_eq!(Decision::unpack(decision.pack()), decision);
        }
    }

    #[test]
    fn rows_land_in_columns_and_bad_slots_are_skipped() {
        let mut table = PrefillTable::default();
        table.reset(2);
        let row =
            PrefillRow { slot: 1, available: true, busy_until: 5.0, reported_at: 3.0, ..Default::default() };
        let outside = PrefillRow { slot: 2, ..row };
        table.update(&[row.encode(), outside.encode()].concat());
        assert_eq!(table.available, [0.0, 1.0]);
        assert_eq!(table.busy_until, [0.0, 5.0]);
        assert_eq!(table.reported_at, [0.0, 3.0]);
        assert_eq!(table.free_at, [f32::INFINITY, 5.0]);
        table.update(&[f32::NAN; ROW]); // NaN casts to slot 0; values are the host's to check
        assert_eq!(table.available[1], 1.0);
    }
}
