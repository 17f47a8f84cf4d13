use super::cost::usable;
use super::table::Table;
use super::{DecodeCost, Error, Invalid, PrefillCost, TableClock, TransferCost};
use hashbrown::HashMap;
use kvasir_policy::scheduler::{Decision, DecodeRow, PrefillRow, Request};

/// Hard caps of one conductor.
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
    pub capacity_blocks: u32,
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
}

/// What the conductor made of a decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    Admitted(Admission),
    Rejected { reason: u16, retry_after_ms: u32 },
}

/// A request that was given to instances, with the times expected at admission.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Admission {
    pub prefill: u16,
    pub decode: u16,
    /// Prefix tokens that are not computed again.
    pub cached_tokens: u32,
    pub transfer_ms: f64,
    pub queue_ms: f64,
    pub prefill_ms: f64,
    /// Prefill starts when the instance is free and the prefix has arrived.
    pub ttft_ms: f64,
    /// Once the request and all others admitted there have joined the batch.
    pub tbt_ms: f64,
}

/// How far a reader has followed the tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Version {
    /// Restarts of the table clock seen; 0 = has seen nothing.
    epoch: u64,
    prefill: u64,
    decode: u64,
}

/// What a reader has to push to its policy instance; rows encoded as in the contract.
#[derive(Clone, Debug, PartialEq)]
pub enum Changes {
    Rows {
        prefill: Vec<f32>,
        decode: Vec<f32>,
    },
    /// `open` with these sizes, then all rows.
    Full {
        prefill_slots: u32,
        decode_slots: u32,
        block_size_tokens: u32,
        prefill: Vec<f32>,
        decode: Vec<f32>,
    },
}

#[derive(Debug)]
struct Prefill {
    spec: PrefillSpec,
    /// Distinguishes the instance from an earlier one in the same slot.
    epoch: u64,
    available: bool,
    busy_until_ms: f64,
    /// Sum of the errors that have moved `busy_until_ms`, so that ends booked earlier move along.
    shifted_ms: f64,
    queued: u32,
    transfers: u32,
    free_blocks: u32,
    reported_ms: u64,
}

#[derive(Debug)]
struct Decode {
    spec: DecodeSpec,
    epoch: u64,
    available: bool,
    sequences: u32,
    context_tokens: u64,
    arriving_sequences: u32,
    arriving_tokens: u64,
    free_blocks: u32,
    reported_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Prefill,
    Decode,
}

/// Booked work; given back exactly when the request leaves.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    admission: Admission,
    prefill_epoch: u64,
    decode_epoch: u64,
    phase: Phase,
    transferring: bool,
    /// When its prefill is expected to end, less the instance's `shifted_ms`.
    prefill_end_ms: f64,
    context_tokens: u64,
    decode_blocks: u32,
    admitted_ms: u64,
}

/// See the module documentation.
#[derive(Debug)]
pub struct Conductor {
    limits: Limits,
    block_size_tokens: u32,
    clock: TableClock,
    /// Counts registrations.
    epoch: u64,
    /// Counts restarts of the table clock, from 1.
    clock_epoch: u64,
    prefill: Table<Prefill>,
    decode: Table<Decode>,
    requests: HashMap<u64, InFlight>,
}

impl Conductor {
    pub fn new(limits: Limits, block_size_tokens: u32, now_ms: u64) -> Self {
        let instances = usize::from(limits.instances);
        Self {
            limits,
            block_size_tokens: block_size_tokens.max(1),
            clock: TableClock::new(now_ms),
            epoch: 1,
            clock_epoch: 1,
            prefill: Table::new(instances),
            decode: Table::new(instances),
            requests: HashMap::new(),
        }
    }

    pub fn prefill_slots(&self) -> usize {
        self.prefill.len()
    }

    pub fn decode_slots(&self) -> usize {
        self.decode.len()
    }

    pub fn in_flight(&self) -> usize {
        self.requests.len()
    }

    /// # Errors
    /// [`Error::Cost`], [`Error::TableFull`].
    pub fn register_prefill(&mut self, spec: PrefillSpec, now_ms: u64) -> Result<u16, Error> {
        let PrefillSpec { cost, transfer, capacity_blocks } = spec;
        let cost = [cost.fixed_ms, cost.ms_per_token, cost.ms_per_pair];
        if !usable(&cost) || !usable(&[transfer.fixed_ms, transfer.ms_per_block]) {
            return Err(Error::Cost { table: "prefill" });
        }
        self.epoch += 1;
        let instance = Prefill {
            spec,
            epoch: self.epoch,
            available: true,
            busy_until_ms: now_ms as f64,
            shifted_ms: 0.0,
            queued: 0,
            transfers: 0,
            free_blocks: capacity_blocks,
            reported_ms: now_ms,
        };
        let limit = usize::from(self.limits.instances);
        self.prefill.insert(instance).ok_or(Error::TableFull { table: "prefill", limit })
    }

    /// # Errors
    /// As [`Self::register_prefill`].
    pub fn register_decode(&mut self, spec: DecodeSpec, now_ms: u64) -> Result<u16, Error> {
        let DecodeSpec { cost, capacity_blocks } = spec;
        if !usable(&[cost.fixed_ms, cost.ms_per_sequence, cost.ms_per_context_token]) {
            return Err(Error::Cost { table: "decode" });
        }
        self.epoch += 1;
        let instance = Decode {
            spec,
            epoch: self.epoch,
            available: true,
            sequences: 0,
            context_tokens: 0,
            arriving_sequences: 0,
            arriving_tokens: 0,
            free_blocks: capacity_blocks,
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
        self.prefill.remove(slot).map(|_| ()).ok_or(Error::NoInstance { table: "prefill", slot })
    }

    /// # Errors
    /// [`Error::NoInstance`].
    pub fn unregister_decode(&mut self, slot: u16) -> Result<(), Error> {
        self.decode.remove(slot).map(|_| ()).ok_or(Error::NoInstance { table: "decode", slot })
    }

    /// Drained, dead and revived instances.
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

    /// Free memory as the instance itself counts it.
    ///
    /// # Errors
    /// [`Error::NoInstance`].
    pub fn report_prefill(&mut self, slot: u16, free_blocks: u32, now_ms: u64) -> Result<(), Error> {
        let instance = self.prefill.change(slot).ok_or(Error::NoInstance { table: "prefill", slot })?;
        instance.free_blocks = free_blocks.min(instance.spec.capacity_blocks);
        instance.reported_ms = now_ms;
        Ok(())
    }

    /// # Errors
    /// [`Error::NoInstance`].
    pub fn report_decode(&mut self, slot: u16, free_blocks: u32, now_ms: u64) -> Result<(), Error> {
        let instance = self.decode.change(slot).ok_or(Error::NoInstance { table: "decode", slot })?;
        instance.free_blocks = free_blocks.min(instance.spec.capacity_blocks);
        instance.reported_ms = now_ms;
        Ok(())
    }

    /// Restarts the table clock if it is due; call before [`Self::changes_since`] and [`Self::request`].
    pub fn tick(&mut self, now_ms: u64) {
        if self.clock.rebase(now_ms) {
            self.clock_epoch += 1;
            self.prefill.invalidate();
            self.decode.invalidate();
        }
    }

    /// The rows a reader lacks; moves its version to the present. `None` if it lacks nothing.
    pub fn changes_since(&self, version: &mut Version) -> Option<Changes> {
        let seen = *version;
        *version = Version {
            epoch: self.clock_epoch,
            prefill: self.prefill.version(),
            decode: self.decode.version(),
        };
        if *version == seen {
            return None;
        }
        let same_clock = seen.epoch == self.clock_epoch;
        let prefill = self.prefill.changed_since(seen.prefill).filter(|_| same_clock);
        let decode = self.decode.changed_since(seen.decode).filter(|_| same_clock);
        let (Some(prefill), Some(decode)) = (prefill, decode) else { return Some(self.full()) };
        Some(Changes::Rows {
            prefill: prefill.into_iter().flat_map(|slot| self.prefill_row(slot).encode()).collect(),
            decode: decode.into_iter().flat_map(|slot| self.decode_row(slot).encode()).collect(),
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

    /// The arguments of `schedule` but for the prefix column.
    pub fn request(&self, ask: &Ask, now_ms: u64) -> Request {
        Request {
            now: self.clock.at(now_ms as f64),
            prompt_tokens: ask.prompt_tokens,
            output_tokens: ask.output_tokens,
            class: ask.class,
            tenant: ask.tenant,
            priority: ask.priority,
            session: ask.session,
            seed: ask.seed,
            ttft_slo: ask.ttft_slo_ms,
            tbt_slo: ask.tbt_slo_ms,
            hints: u32::from(ask.must_run),
        }
    }

    /// Whether a policy's answer can be acted on. `prefix_blocks` as it was given to the policy.
    ///
    /// # Errors
    /// The reason, for the count of invalid answers and the log.
    pub fn check(&self, decision: &Decision, prefix_blocks: &[u32]) -> Result<(), Invalid> {
        let &Decision::Run { prefill, decode, transfer } = decision else { return Ok(()) };
        let available = |slot, table, slots, instance: Option<bool>| match instance {
            Some(true) => Ok(()),
            Some(false) => Err(Invalid::Unavailable { table, slot }),
            None if usize::from(slot) < slots => Err(Invalid::Unavailable { table, slot }),
            None => Err(Invalid::SlotOutside { table, slot, slots }),
        };
        let prefill_available = |slot| {
            available(slot, "prefill", self.prefill.len(), self.prefill.get(slot).map(|p| p.available))
        };
        prefill_available(prefill)?;
        available(decode, "decode", self.decode.len(), self.decode.get(decode).map(|d| d.available))?;
        let Some(transfer) = transfer else { return Ok(()) };
        if transfer.source == prefill {
            return Err(Invalid::TransferToItself { slot: prefill });
        }
        prefill_available(transfer.source)?;
        let held = |slot: u16| prefix_blocks.get(usize::from(slot)).copied().unwrap_or(0);
        let beyond = held(transfer.source).saturating_sub(held(prefill));
        if u32::from(transfer.blocks) > beyond {
            let (source_slot, blocks) = (transfer.source, transfer.blocks);
            return Err(Invalid::TransferTooLong { source_slot, blocks, beyond });
        }
        Ok(())
    }

    /// Books a decision under the caller's `id`. The answer is checked again: tables may have moved.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::RequestExists`], [`Error::TooManyRequests`].
    pub fn admit(
        &mut self,
        id: u64,
        ask: &Ask,
        decision: &Decision,
        prefix_blocks: &[u32],
        now_ms: u64,
    ) -> Result<Outcome, Error> {
        self.check(decision, prefix_blocks)?;
        let (prefill, decode, transfer) = match *decision {
            Decision::Run { prefill, decode, transfer } => (prefill, decode, transfer),
            Decision::Reject { reason, retry_after_ms } => {
                return Ok(Outcome::Rejected { reason, retry_after_ms });
            }
        };
        if self.requests.contains_key(&id) {
            return Err(Error::RequestExists { id });
        }
        if self.requests.len() >= self.limits.requests {
            return Err(Error::TooManyRequests { limit: self.limits.requests });
        }
        let fetched = transfer.map_or(0, |t| u32::from(t.blocks));
        let own = prefix_blocks.get(usize::from(prefill)).copied().unwrap_or(0);
        let cached = u64::from(own + fetched) * u64::from(self.block_size_tokens);
        let cached = cached.min(u64::from(ask.prompt_tokens));
        let tokens = u64::from(ask.prompt_tokens) + u64::from(ask.output_tokens);
        let decode_blocks = tokens.div_ceil(u64::from(self.block_size_tokens)) as u32;

        let absent = |table, slot| Error::Invalid(Invalid::Unavailable { table, slot });
        let d = self.decode.change(decode).ok_or(absent("decode", decode))?;
        let p = self.prefill.change(prefill).ok_or(absent("prefill", prefill))?;
        let now = now_ms as f64;
        let transfer_ms = p.spec.transfer.transfer_ms(fetched, p.transfers);
        let queue_ms = (p.busy_until_ms - now).max(0.0);
        let prefill_ms = p.spec.cost.prefill_ms(cached, u64::from(ask.prompt_tokens) - cached);
        p.busy_until_ms = now + queue_ms.max(transfer_ms) + prefill_ms;
        p.queued += 1;
        p.transfers += u32::from(fetched > 0);
        d.arriving_sequences += 1;
        d.arriving_tokens += u64::from(ask.prompt_tokens);
        d.free_blocks = d.free_blocks.saturating_sub(decode_blocks);
        let sequences = d.sequences + d.arriving_sequences;
        let admission = Admission {
            prefill,
            decode,
            cached_tokens: cached as u32,
            transfer_ms,
            queue_ms,
            prefill_ms,
            ttft_ms: p.busy_until_ms - now,
            tbt_ms: d.spec.cost.step_ms(sequences, d.context_tokens + d.arriving_tokens),
        };
        let booked = InFlight {
            admission,
            prefill_epoch: p.epoch,
            decode_epoch: d.epoch,
            phase: Phase::Prefill,
            transferring: fetched > 0,
            prefill_end_ms: p.busy_until_ms - p.shifted_ms,
            context_tokens: u64::from(ask.prompt_tokens),
            decode_blocks,
            admitted_ms: now_ms,
        };
        self.requests.insert(id, booked);
        Ok(Outcome::Admitted(admission))
    }

    /// The prefix has arrived: the link is free for others.
    ///
    /// # Errors
    /// [`Error::NoRequest`].
    pub fn transfer_done(&mut self, id: u64) -> Result<(), Error> {
        let request = self.requests.get_mut(&id).ok_or(Error::NoRequest { id })?;
        if std::mem::take(&mut request.transferring) {
            let (slot, epoch) = (request.admission.prefill, request.prefill_epoch);
            if let Some(p) = same_prefill(&mut self.prefill, slot, epoch) {
                p.transfers -= 1;
            }
        }
        Ok(())
    }

    /// The first token is there: the sequence joins the decode batch, and the queue behind it moves by
    /// as much as the estimate was off.
    ///
    /// # Errors
    /// [`Error::NoRequest`].
    pub fn prefill_done(&mut self, id: u64, now_ms: u64) -> Result<(), Error> {
        self.transfer_done(id)?;
        let request = self.requests.get_mut(&id).ok_or(Error::NoRequest { id })?;
        if std::mem::replace(&mut request.phase, Phase::Decode) == Phase::Decode {
            return Ok(());
        }
        let request = *request;
        self.settle_prefill(&request, true, now_ms);
        if let Some(d) = same_decode(&mut self.decode, request.admission.decode, request.decode_epoch) {
            d.arriving_sequences -= 1;
            d.arriving_tokens -= request.context_tokens;
            d.sequences += 1;
            d.context_tokens += request.context_tokens;
        }
        Ok(())
    }

    /// `tokens` more were decoded since the last call.
    ///
    /// # Errors
    /// [`Error::NoRequest`].
    pub fn progress(&mut self, id: u64, tokens: u32) -> Result<(), Error> {
        let request = self.requests.get_mut(&id).ok_or(Error::NoRequest { id })?;
        if request.phase == Phase::Decode {
            request.context_tokens += u64::from(tokens);
            if let Some(d) = same_decode(&mut self.decode, request.admission.decode, request.decode_epoch) {
                d.context_tokens += u64::from(tokens);
            }
        }
        Ok(())
    }

    /// The request is done or given up, in any phase; all it had booked is given back.
    ///
    /// # Errors
    /// [`Error::NoRequest`].
    pub fn finished(&mut self, id: u64, now_ms: u64) -> Result<(), Error> {
        self.transfer_done(id)?;
        let request = self.requests.remove(&id).ok_or(Error::NoRequest { id })?;
        if request.phase == Phase::Prefill {
            self.settle_prefill(&request, false, now_ms);
        }
        if let Some(d) = same_decode(&mut self.decode, request.admission.decode, request.decode_epoch) {
            match request.phase {
                Phase::Prefill => {
                    d.arriving_sequences -= 1;
                    d.arriving_tokens -= request.context_tokens;
                }
                Phase::Decode => {
                    d.sequences -= 1;
                    d.context_tokens -= request.context_tokens;
                }
            }
            d.free_blocks = (d.free_blocks + request.decode_blocks).min(d.spec.capacity_blocks);
        }
        Ok(())
    }

    /// Finishes requests admitted before `deadline_ms` of which nothing more was heard; returns how many.
    pub fn expire(&mut self, deadline_ms: u64, now_ms: u64) -> usize {
        let late = |(&id, r): (&u64, &InFlight)| (r.admitted_ms < deadline_ms).then_some(id);
        let mut ids: Vec<u64> = self.requests.iter().filter_map(late).collect();
        ids.sort_unstable(); // the order of a hash map must not show in the tables
        ids.iter().filter(|&&id| self.finished(id, now_ms).is_ok()).count()
    }

    /// One prefill less in the queue, and everything behind it moves: by the error of its estimated end if
    /// it ran to its end, by its length if it was given up.
    fn settle_prefill(&mut self, request: &InFlight, ran: bool, now_ms: u64) {
        let (slot, epoch) = (request.admission.prefill, request.prefill_epoch);
        let Some(p) = same_prefill(&mut self.prefill, slot, epoch) else { return };
        let now = now_ms as f64;
        let expected = request.prefill_end_ms + p.shifted_ms;
        let shift = if ran { now - expected } else { -request.admission.prefill_ms };
        p.queued -= 1;
        p.shifted_ms += shift;
        p.busy_until_ms = if p.queued == 0 { now } else { (p.busy_until_ms + shift).max(now) };
    }

    fn full(&self) -> Changes {
        let prefill = self.prefill.iter().flat_map(|(slot, _)| self.prefill_row(slot).encode());
        let decode = self.decode.iter().flat_map(|(slot, _)| self.decode_row(slot).encode());
        Changes::Full {
            prefill_slots: self.prefill.len() as u32,
            decode_slots: self.decode.len() as u32,
            block_size_tokens: self.block_size_tokens,
            prefill: prefill.collect(),
            decode: decode.collect(),
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
        }
    }
}

/// The instance that was booked, unless it left and another has its slot.
fn same_prefill(table: &mut Table<Prefill>, slot: u16, epoch: u64) -> Option<&mut Prefill> {
    table.get(slot).filter(|p| p.epoch == epoch)?;
    table.change(slot)
}

fn same_decode(table: &mut Table<Decode>, slot: u16, epoch: u64) -> Option<&mut Decode> {
    table.get(slot).filter(|d| d.epoch == epoch)?;
    table.change(slot)
}
