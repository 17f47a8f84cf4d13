//! The work that instances have been given: forecast, booked, settled.

use super::answer::{self, Slots};
use super::links::{Path, Toll};
use super::table::Table;
use super::{
    Admission, Ask, Decode, Ended, Error, Fetch, Fleet, InFlight, Invalid, Outcome, Phase, Prefill, identity,
};
use kvasir_policy::scheduler::{Candidates, Decision, Placement};

/// A hand-over that takes longer than this, a day, is a mistake of unit.
const HANDOVER_MAX_MS: f64 = 86_400_000.0;

impl Fleet {
    /// Whether a policy's answer can be acted on now. `candidates` are those that were given to the policy.
    ///
    /// # Errors
    /// The reason, for the count of invalid answers and the log.
    pub fn check(&self, decision: &Decision, candidates: Candidates<'_>) -> Result<(), Invalid> {
        let prefill = Slots {
            len: self.prefill.len() as u32,
            available: &|slot| self.prefill.get(slot).is_some_and(|p| p.available),
        };
        let decode = Slots {
            len: self.decode.len() as u32,
            available: &|slot| self.decode.get(slot).is_some_and(|d| d.available),
        };
        answer::check(decision, candidates, &prefill, &decode)
    }

    /// What [`Self::admit`] would answer now; nothing is booked.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::TooManyRequests`].
    pub fn forecast(
        &self,
        ask: &Ask,
        decision: &Decision,
        candidates: Candidates<'_>,
        now_ms: u64,
    ) -> Result<Outcome, Error> {
        self.check(decision, candidates)?;
        let placement = match *decision {
            Decision::Run(placement) => placement,
            Decision::Reject { reason, retry_after_ms } => {
                return Ok(Outcome::Rejected { reason, retry_after_ms });
            }
        };
        if self.requests.len() >= self.limits.requests {
            return Err(Error::TooManyRequests { limit: self.limits.requests });
        }
        let Placement { prefill, decode, transfer, .. } = placement;
        // Slots that passed the check are in the tables, whose numbers have 16 bits.
        let (prefill, decode) = (prefill as u16, decode as u16);
        let p = self.prefill.get(prefill).ok_or(absent("prefill", prefill))?;
        let d = self.decode.get(decode).ok_or(absent("decode", decode))?;
        let fetched_blocks = transfer.map_or(0, |t| t.blocks);
        let own = candidates.prefix_of(usize::from(prefill));
        let prompt_tokens = u64::from(ask.prompt_tokens);
        let cached = u64::from(own + fetched_blocks) * u64::from(self.block_size_tokens);
        let cached = cached.min(prompt_tokens);
        let fetch = self.fetch(&placement);
        let toll = fetch.map_or(Toll::FREE, |fetch| self.links.toll(fetch.path));
        let source = fetch.and_then(|fetch| self.prefill.get(fetch.source));
        let sent = source.map_or(0.0, Prefill::send_ms_per_block);
        let transfer_ms = toll.transfer_ms(&p.spec.transfer, fetched_blocks, p.transfers, sent);
        let handover_ms = handover_path(p, d, decode).map_or(0.0, |path| {
            let blocks = ask.prompt_tokens.div_ceil(self.block_size_tokens);
            let blocks = blocks.saturating_sub(candidates.prefix_of_decode(decode.into()));
            self.links.toll(path).transfer_ms(&d.spec.handover, blocks, d.handovers, p.send_ms_per_block())
        });
        let queue_ms = (p.busy_until_ms - now_ms as f64).max(0.0);
        let prefill_ms = p.spec.cost.prefill_ms(cached, prompt_tokens - cached);
        let sequences = d.sequences + d.arriving_sequences + 1;
        let context_tokens = d.context_tokens + d.arriving_tokens + prompt_tokens;
        Ok(Outcome::Admitted(Admission {
            prefill,
            decode,
            cached_tokens: cached as u32,
            fetched_blocks,
            transfer_ms,
            handover_ms,
            queue_ms,
            prefill_ms,
            // The first token comes out of the prefill: what moves after it delays the second.
            ttft_ms: queue_ms.max(transfer_ms) + prefill_ms,
            tbt_ms: d.spec.cost.step_ms(sequences, context_tokens),
        }))
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
        candidates: Candidates<'_>,
        now_ms: u64,
    ) -> Result<Outcome, Error> {
        if self.requests.contains_key(&id) {
            return Err(Error::RequestExists { id });
        }
        let outcome = self.forecast(ask, decision, candidates, now_ms)?;
        if let (Outcome::Admitted(admission), Decision::Run(placement)) = (outcome, decision) {
            self.book(id, ask, placement, admission, now_ms)?;
        }
        Ok(outcome)
    }

    /// The prefix that is fetched.
    fn fetch(&self, placement: &Placement) -> Option<Fetch> {
        let source = placement.transfer?.source as u16;
        let (from, to) = (self.prefill.get(source)?, self.prefill.get(placement.prefill as u16)?);
        Some(Fetch { path: (from.site.domain, to.site.domain), source, source_epoch: from.epoch })
    }

    fn book(
        &mut self,
        id: u64,
        ask: &Ask,
        placement: &Placement,
        admission: Admission,
        now_ms: u64,
    ) -> Result<(), Error> {
        let Admission { prefill, decode, .. } = admission;
        let fetch = self.fetch(placement);
        let tokens = u64::from(ask.prompt_tokens) + u64::from(ask.output_tokens);
        let decode_blocks = tokens.div_ceil(u64::from(self.block_size_tokens)) as u32;
        let p = self.prefill.change(prefill).ok_or(absent("prefill", prefill))?;
        let d = self.decode.change(decode).ok_or(absent("decode", decode))?;
        p.busy_until_ms = now_ms as f64 + admission.ttft_ms;
        p.queued += 1;
        p.transfers += u32::from(fetch.is_some());
        d.arriving_sequences += 1;
        d.arriving_tokens += u64::from(ask.prompt_tokens);
        d.arriving_blocks += decode_blocks;
        d.free_blocks = d.free_blocks.saturating_sub(decode_blocks);
        let booked = InFlight {
            admission,
            prefill_epoch: p.epoch,
            decode_epoch: d.epoch,
            phase: Phase::Prefill,
            fetch,
            handover: handover_path(p, d, decode),
            handed_over_ms: None,
            prefill_end_ms: p.busy_until_ms - p.shifted_ms,
            context_tokens: u64::from(ask.prompt_tokens),
            output_tokens: ask.output_tokens,
            decoded_tokens: 0,
            decode_blocks,
            tenant: ask.tenant,
            tokens,
            heard_ms: now_ms,
            ask: *ask,
            booked_ms: now_ms,
            first_token_ms: None,
            prefill_ms: None,
        };
        if let Some(Fetch { path, source, source_epoch }) = fetch {
            self.links.begin(path);
            if let Some(source) = same_prefill(&mut self.prefill, source, source_epoch) {
                source.sending += 1;
            }
        }
        self.tenants.add(ask.tenant, tokens);
        self.requests.insert(id, booked);
        Ok(())
    }

    /// The prefix has arrived: the link is free for others.
    ///
    /// # Errors
    /// [`Error::NoRequest`].
    pub fn transfer_done(&mut self, id: u64, now_ms: u64) -> Result<(), Error> {
        let request = self.requests.get_mut(&id).ok_or(Error::NoRequest { id })?;
        request.heard_ms = now_ms;
        if let Some(Fetch { path, source, source_epoch }) = request.fetch.take() {
            let (slot, epoch) = (request.admission.prefill, request.prefill_epoch);
            self.links.end(path);
            if let Some(p) = same_prefill(&mut self.prefill, slot, epoch) {
                p.transfers -= 1;
            }
            if let Some(source) = same_prefill(&mut self.prefill, source, source_epoch) {
                source.sending -= 1;
            }
        }
        Ok(())
    }

    /// The first token is there: the sequence joins the decode batch, and the queue behind it moves by
    /// as much as the estimate was off. `took_ms`: how long the prefill itself took, if its instance measured it.
    ///
    /// # Errors
    /// [`Error::NoRequest`].
    pub fn prefill_done(&mut self, id: u64, took_ms: Option<f64>, now_ms: u64) -> Result<(), Error> {
        self.transfer_done(id, now_ms)?;
        let request = self.requests.get_mut(&id).ok_or(Error::NoRequest { id })?;
        if std::mem::replace(&mut request.phase, Phase::Decode) == Phase::Decode {
            return Ok(());
        }
        request.first_token_ms = Some(now_ms);
        request.prefill_ms = took_ms;
        let request = *request;
        self.settle_prefill(&request, true, now_ms);
        if let Some(d) = same_decode(&mut self.decode, request.admission.decode, request.decode_epoch) {
            d.arriving_sequences -= 1;
            d.arriving_tokens -= request.context_tokens;
            d.arriving_blocks -= request.decode_blocks;
            d.sequences += 1;
            d.context_tokens += request.context_tokens;
        }
        self.begin_handover(id, now_ms);
        Ok(())
    }

    /// The blocks of a request go from prefill to decode, if these are two instances. Nobody says when they have
    /// arrived: they count as under way until the time expected for it has passed, or a token was decoded.
    fn begin_handover(&mut self, id: u64, now_ms: u64) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let Some(path) = request.handover else { return };
        let end_ms = now_ms + request.admission.handover_ms.min(HANDOVER_MAX_MS).ceil() as u64;
        request.handed_over_ms = Some(end_ms);
        self.handovers.insert((end_ms, id));
        self.links.begin(path);
        if let Some(d) = same_decode(&mut self.decode, request.admission.decode, request.decode_epoch) {
            d.handovers += 1;
        }
        if let Some(p) = same_prefill(&mut self.prefill, request.admission.prefill, request.prefill_epoch) {
            p.sending += 1;
        }
    }

    /// Ends the hand-over of a request, if one is under way.
    pub(super) fn end_handover(&mut self, id: u64) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let Some(end_ms) = request.handed_over_ms.take() else { return };
        self.handovers.remove(&(end_ms, id));
        if let Some(path) = request.handover {
            self.links.end(path);
        }
        if let Some(d) = same_decode(&mut self.decode, request.admission.decode, request.decode_epoch) {
            d.handovers -= 1;
        }
        if let Some(p) = same_prefill(&mut self.prefill, request.admission.prefill, request.prefill_epoch) {
            p.sending -= 1;
        }
    }

    /// `tokens` more were decoded since the last call.
    ///
    /// # Errors
    /// [`Error::NoRequest`].
    pub fn progress(&mut self, id: u64, tokens: u32, now_ms: u64) -> Result<(), Error> {
        self.end_handover(id);
        let request = self.requests.get_mut(&id).ok_or(Error::NoRequest { id })?;
        request.heard_ms = now_ms;
        if request.phase == Phase::Decode {
            request.context_tokens += u64::from(tokens);
            request.decoded_tokens = request.decoded_tokens.saturating_add(tokens);
            if let Some(d) = same_decode(&mut self.decode, request.admission.decode, request.decode_epoch) {
                d.context_tokens += u64::from(tokens);
            }
        }
        Ok(())
    }

    /// Ends a request, done or given up, in any phase. All that it had booked is given back.
    ///
    /// # Errors
    /// [`Error::NoRequest`].
    pub fn finished(&mut self, id: u64, now_ms: u64) -> Result<Ended, Error> {
        self.transfer_done(id, now_ms)?;
        self.end_handover(id);
        let request = self.requests.remove(&id).ok_or(Error::NoRequest { id })?;
        self.tenants.remove(request.tenant, request.tokens);
        if request.decoded_tokens > 0 {
            self.outputs.add(request.decoded_tokens);
        }
        if request.phase == Phase::Prefill {
            self.settle_prefill(&request, false, now_ms);
        }
        if let Some(d) = same_decode(&mut self.decode, request.admission.decode, request.decode_epoch) {
            match request.phase {
                Phase::Prefill => {
                    d.arriving_sequences -= 1;
                    d.arriving_tokens -= request.context_tokens;
                    d.arriving_blocks -= request.decode_blocks;
                }
                Phase::Decode => {
                    d.sequences -= 1;
                    d.context_tokens -= request.context_tokens;
                }
            }
            d.free_blocks = (d.free_blocks + request.decode_blocks).min(d.spec.capacity_blocks);
        }
        Ok(request.ended(id, now_ms))
    }

    /// Identities of the prefill and the decode instance of a placement; 0 for an empty slot.
    pub fn identities(&self, placed: &Admission) -> [u32; 2] {
        [self.prefill_identity(placed.prefill), self.decode_identity(placed.decode)]
    }

    /// 0 = nobody stands there.
    pub fn prefill_identity(&self, slot: u16) -> u32 {
        self.prefill.get(slot).map_or(0, |p| identity(p.epoch))
    }

    /// 0 = nobody stands there.
    pub fn decode_identity(&self, slot: u16) -> u32 {
        self.decode.get(slot).map_or(0, |d| identity(d.epoch))
    }

    /// Finishes requests of which nothing was heard since `deadline_ms`. When they ended, nobody knows.
    pub fn expire(&mut self, deadline_ms: u64, now_ms: u64) -> Vec<Ended> {
        let late = |(&id, r): (&u64, &InFlight)| (r.heard_ms < deadline_ms).then_some(id);
        let mut ids: Vec<u64> = self.requests.iter().filter_map(late).collect();
        ids.sort_unstable(); // the order of a hash map must not show in the tables
        let ended = ids.iter().filter_map(|&id| self.finished(id, now_ms).ok());
        ended.map(|ended| Ended { tbt_ms: None, ..ended }).collect()
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
}

impl InFlight {
    fn ended(&self, id: u64, now_ms: u64) -> Ended {
        let since = |start: u64, end: u64| end.saturating_sub(start) as f64;
        let decoding = self.first_token_ms.filter(|_| self.decoded_tokens > 0);
        Ended {
            id,
            ask: self.ask,
            admission: self.admission,
            identities: [identity(self.prefill_epoch), identity(self.decode_epoch)],
            decoded_tokens: self.decoded_tokens,
            prefill_ms: self.prefill_ms,
            ttft_ms: self.first_token_ms.map(|first| since(self.booked_ms, first)),
            tbt_ms: decoding.map(|first| since(first, now_ms) / f64::from(self.decoded_tokens)),
        }
    }
}

/// The way of a request's blocks from prefill to decode. `None` means that it stays on one instance.
fn handover_path(prefill: &Prefill, decode: &Decode, decode_slot: u16) -> Option<Path> {
    let stays = prefill.peer == Some(decode_slot);
    (!stays).then_some((prefill.site.domain, decode.site.domain))
}

fn absent(table: &'static str, slot: u16) -> Error {
    Error::Invalid(Invalid::Unavailable { table, slot: slot.into() })
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
