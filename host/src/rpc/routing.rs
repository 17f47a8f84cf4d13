//! The conductor by names: instances as the outside knows them, the prefix index over their blocks,
//! and the policies that decide. Behind one lock; a decision takes microseconds.

use crate::config;
use crate::policy::{AdmitterWorker, PolicyHost, SchedulerWorker};
use crate::prefix_index::{self, PrefixIndex};
use crate::scheduler::{self, Admission, Ask, Conductor, DecodeSpec, PrefillSpec};
use kvasir_policy::admitter::{self, Load, Verdict};
use kvasir_policy::balancer::Snapshot;
use kvasir_policy::scheduler::{Decision, DecodeRow, PrefillRow};
use std::collections::HashMap;

/// Longest name of an instance.
const NAME_MAX: usize = 128;

/// Why a message of an instance or router was refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("instance `{name}` is not registered here; register it")]
    UnknownInstance { name: String },
    #[error("instance name of {len} bytes; it must have 1 to {NAME_MAX}")]
    Name { len: usize },
    #[error("instance `{name}` would do neither prefill nor decode; set at least one")]
    NoRole { name: String },
    #[error("instance `{name}` has no prefill role, so it holds no prefixes here")]
    NoPrefill { name: String },
    #[error("epoch {given} of instance `{name}` is not the current {current}; register it again")]
    Epoch { name: String, given: u64, current: u64 },
    #[error(
        "message {given} of instance `{name}` where {expected} is next; its blocks are forgotten, register it again and tell all of them"
    )]
    Gap { name: String, given: u64, expected: u64 },
    #[error(transparent)]
    Conductor(#[from] scheduler::Error),
}

/// What an instance says of itself.
pub struct Registration {
    pub prefill: Option<PrefillSpec>,
    pub decode: Option<DecodeSpec>,
}

struct Instance {
    prefill: Option<u16>,
    decode: Option<u16>,
    epoch: u64,
    /// Messages of stored or removed blocks so far.
    sequence: u64,
    reported_ms: u64,
    draining: bool,
}

/// A decision with its reasons.
pub struct Scheduled {
    pub request_id: u64,
    pub result: Result<Placed, Rejected>,
    pub policy: String,
    pub generation: u64,
    pub fallback: Option<String>,
    pub scores: Vec<(String, f32)>,
}

pub struct Placed {
    pub prefill: String,
    pub decode: String,
    pub prefix_blocks: u32,
    pub transfer: Option<(String, u32)>,
    pub admission: Admission,
}

pub struct Rejected {
    /// Turned away by the admitter, which sees the times of the placement that the scheduler chose.
    pub by_admitter: bool,
    pub reason: u32,
    pub retry_after_ms: u32,
}

/// Sums for metrics.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub placed: u64,
    pub rejected: u64,
    pub in_flight: usize,
    pub prefill: usize,
    pub decode: usize,
}

/// A step in the life of a scheduled request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Transfer,
    Prefill,
    Progress(u32),
    Finished,
}

/// See the module documentation.
pub struct Routing {
    config: config::Conductor,
    conductor: Conductor,
    index: PrefixIndex,
    scheduler: SchedulerWorker,
    admitter: AdmitterWorker,
    instances: HashMap<String, Instance>,
    prefill_names: Vec<Option<String>>,
    decode_names: Vec<Option<String>>,
    epochs: u64,
    requests: u64,
    counts: Counts,
    /// Since the last tick, for the balancer.
    window: Window,
    prefix: Vec<u32>,
}

#[derive(Default)]
struct Window {
    placed: u32,
    rejected: u32,
    hit_blocks: u64,
    blocks: u64,
}

impl Routing {
    pub fn new(config: &config::Conductor, policies: &PolicyHost, now_ms: u64) -> Self {
        let limits = scheduler::Limits {
            instances: config.instances_max.min(u32::from(u16::MAX) - 1) as u16,
            requests: config.requests_max as usize,
        };
        let entries = config.index_entries_max as usize;
        Self {
            conductor: Conductor::new(limits, config.block_size_tokens, now_ms),
            index: PrefixIndex::new(prefix_index::Limits { entries, covers: entries }),
            scheduler: policies.scheduler_worker(),
            admitter: policies.admitter_worker(),
            config: config.clone(),
            instances: HashMap::new(),
            prefill_names: Vec::new(),
            decode_names: Vec::new(),
            epochs: 0,
            requests: 0,
            counts: Counts::default(),
            window: Window::default(),
            prefix: Vec::new(),
        }
    }

    pub fn register(&mut self, name: &str, given: Registration, now_ms: u64) -> Result<u64, Error> {
        if !(1..=NAME_MAX).contains(&name.len()) {
            return Err(Error::Name { len: name.len() });
        }
        if given.prefill.is_none() && given.decode.is_none() {
            return Err(Error::NoRole { name: name.to_owned() });
        }
        let _ = self.unregister(name);
        let prefill = given.prefill.map(|spec| self.conductor.register_prefill(spec, now_ms)).transpose()?;
        let decode = given.decode.map(|spec| self.conductor.register_decode(spec, now_ms)).transpose();
        let decode = decode.inspect_err(|_| {
            let _ = prefill.map(|slot| self.conductor.unregister_prefill(slot));
        })?;
        set_name(&mut self.prefill_names, prefill, Some(name));
        set_name(&mut self.decode_names, decode, Some(name));
        self.epochs += 1;
        let epoch = self.epochs;
        let instance = Instance { prefill, decode, epoch, sequence: 0, reported_ms: now_ms, draining: false };
        self.instances.insert(name.to_owned(), instance);
        Ok(epoch)
    }

    pub fn unregister(&mut self, name: &str) -> Result<(), Error> {
        let gone =
            self.instances.remove(name).ok_or_else(|| Error::UnknownInstance { name: name.to_owned() })?;
        if let Some(slot) = gone.prefill {
            self.index.drop_instance(slot);
            self.conductor.unregister_prefill(slot)?;
        }
        if let Some(slot) = gone.decode {
            self.conductor.unregister_decode(slot)?;
        }
        set_name(&mut self.prefill_names, gone.prefill, None);
        set_name(&mut self.decode_names, gone.decode, None);
        Ok(())
    }

    pub fn report(
        &mut self,
        name: &str,
        epoch: u64,
        free_blocks: u32,
        draining: bool,
        now_ms: u64,
    ) -> Result<(), Error> {
        let instance = known(&mut self.instances, name, epoch)?;
        instance.reported_ms = now_ms;
        instance.draining = draining;
        if let Some(slot) = instance.prefill {
            self.conductor.report_prefill(slot, free_blocks, now_ms)?;
            self.conductor.set_prefill_available(slot, !draining)?;
        }
        if let Some(slot) = instance.decode {
            self.conductor.report_decode(slot, free_blocks, now_ms)?;
            self.conductor.set_decode_available(slot, !draining)?;
        }
        Ok(())
    }

    /// Blocks that became resident at an instance, one chain.
    pub fn stored(
        &mut self,
        name: &str,
        epoch: u64,
        sequence: u64,
        parent: Option<u64>,
        blocks: &[u64],
    ) -> Result<(), Error> {
        let slot = self.next_message(name, epoch, sequence)?;
        self.index.store(slot, parent, blocks);
        Ok(())
    }

    pub fn removed(&mut self, name: &str, epoch: u64, sequence: u64, blocks: &[u64]) -> Result<(), Error> {
        let slot = self.next_message(name, epoch, sequence)?;
        self.index.remove(slot, blocks);
        Ok(())
    }

    /// A gap means that something unknown happened: what is known of the instance's blocks is dropped.
    fn next_message(&mut self, name: &str, epoch: u64, sequence: u64) -> Result<u16, Error> {
        let instance = known(&mut self.instances, name, epoch)?;
        let slot = instance.prefill.ok_or_else(|| Error::NoPrefill { name: name.to_owned() })?;
        let expected = instance.sequence + 1;
        if sequence != expected {
            self.index.drop_instance(slot);
            return Err(Error::Gap { name: name.to_owned(), given: sequence, expected });
        }
        instance.sequence = sequence;
        Ok(slot)
    }

    /// Leading blocks of `chain` at each instance that holds any, longest first.
    pub fn lookup(&mut self, chain: &[u64]) -> Vec<(String, u32)> {
        self.match_prefix(chain);
        let named = self.prefix.iter().zip(&self.prefill_names);
        let mut found: Vec<_> = named
            .filter_map(|(&blocks, name)| Some((name.clone()?, blocks)).filter(|_| blocks > 0))
            .collect();
        found.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        found
    }

    fn match_prefix(&mut self, chain: &[u64]) -> u32 {
        self.prefix.resize(self.conductor.prefill_slots(), 0);
        self.index.lookup(chain, &mut self.prefix)
    }

    pub fn schedule(
        &mut self,
        ask: &Ask,
        chain: &[u64],
        explain: bool,
        now_ms: u64,
    ) -> Result<Scheduled, Error> {
        self.conductor.tick(now_ms);
        self.match_prefix(chain);
        let request = self.conductor.request(ask, now_ms);
        let scores = if explain {
            self.scheduler.explain(&self.conductor, &request, &self.prefix)
        } else {
            Vec::new()
        };
        let scores = scores.into_iter().zip(&self.prefill_names);
        let scores = scores.filter_map(|(score, name)| Some((name.clone()?, score))).collect();
        let outcome = self.scheduler.schedule(&self.conductor, &request, &self.prefix);
        self.requests += 1;
        let id = self.requests;
        let booked = self.conductor.admit(id, ask, &outcome.decision, &self.prefix, now_ms)?;
        let result = match booked {
            scheduler::Outcome::Rejected { reason, retry_after_ms } => {
                Err(Rejected { by_admitter: false, reason: reason.into(), retry_after_ms })
            }
            scheduler::Outcome::Admitted(admission) => match self.admitted(ask, &admission) {
                None => Ok(self.placed(&outcome.decision, admission)),
                Some(rejected) => {
                    self.conductor.finished(id, now_ms)?;
                    Err(rejected)
                }
            },
        };
        self.count(&result, chain.len());
        Ok(Scheduled {
            request_id: if result.is_ok() { id } else { 0 },
            result,
            policy: self.scheduler.policy().to_owned(),
            generation: outcome.generation,
            fallback: outcome.fallback.map(|fault| fault.to_string()),
            scores,
        })
    }

    /// Asks the admitter with the times predicted for this very placement. A queue is the router's to
    /// keep, so `Queue` goes back as a rejection with a short wait.
    fn admitted(&mut self, ask: &Ask, admission: &Admission) -> Option<Rejected> {
        let verdict = self.admitter.admit_request(&admitter::Ask {
            prompt_tokens: ask.prompt_tokens,
            output_tokens: ask.output_tokens,
            class: ask.class,
            tenant: ask.tenant,
            priority: ask.priority,
            ttft: admission.ttft_ms as f32,
            tbt: admission.tbt_ms as f32,
            ttft_slo: ask.ttft_slo_ms,
            tbt_slo: ask.tbt_slo_ms,
            tenant_share: 0.0,
        });
        match verdict {
            _ if ask.must_run => None,
            Verdict::Accept => None,
            Verdict::Queue => {
                let retry_after_ms = admission.queue_ms.clamp(1.0, 60_000.0) as u32;
                Some(Rejected { by_admitter: true, reason: 0, retry_after_ms })
            }
            Verdict::Reject { reason, retry_after_ms } => {
                Some(Rejected { by_admitter: true, reason, retry_after_ms })
            }
        }
    }

    fn placed(&self, decision: &Decision, admission: Admission) -> Placed {
        let name = |names: &[Option<String>], slot: u16| {
            names.get(usize::from(slot)).cloned().flatten().unwrap_or_default()
        };
        let transfer = match decision {
            Decision::Run { transfer, .. } => *transfer,
            Decision::Reject { .. } => None,
        };
        Placed {
            prefill: name(&self.prefill_names, admission.prefill),
            decode: name(&self.decode_names, admission.decode),
            prefix_blocks: self.prefix.get(usize::from(admission.prefill)).copied().unwrap_or(0),
            transfer: transfer.map(|t| (name(&self.prefill_names, t.source), t.blocks.into())),
            admission,
        }
    }

    fn count(&mut self, result: &Result<Placed, Rejected>, blocks: usize) {
        match result {
            Ok(placed) => {
                self.counts.placed += 1;
                self.window.placed += 1;
                let fetched = placed.transfer.as_ref().map_or(0, |(_, blocks)| *blocks);
                self.window.hit_blocks += u64::from(placed.prefix_blocks + fetched);
                self.window.blocks += blocks as u64;
            }
            Err(_) => {
                self.counts.rejected += 1;
                self.window.rejected += 1;
            }
        }
    }

    pub fn complete(&mut self, request_id: u64, stage: Stage, now_ms: u64) -> Result<(), Error> {
        match stage {
            Stage::Transfer => self.conductor.transfer_done(request_id),
            Stage::Prefill => self.conductor.prefill_done(request_id, now_ms),
            Stage::Progress(tokens) => self.conductor.progress(request_id, tokens),
            Stage::Finished => self.conductor.finished(request_id, now_ms),
        }?;
        Ok(())
    }

    /// Expires requests and silent instances, tells the admitter the load, and gives the state that the
    /// balancer sees.
    pub fn tick(&mut self, now_ms: u64) -> Snapshot {
        self.conductor.tick(now_ms);
        let before = |ttl: config::Span| now_ms.saturating_sub(ttl.0.as_millis() as u64);
        self.conductor.expire(before(self.config.request_ttl), now_ms);
        let silent_since = before(self.config.instance_ttl);
        for instance in self.instances.values().filter(|i| i.reported_ms < silent_since) {
            // Slots of known instances are in the tables.
            let _ = instance.prefill.map(|slot| self.conductor.set_prefill_available(slot, false));
            let _ = instance.decode.map(|slot| self.conductor.set_decode_available(slot, false));
        }
        let snapshot = self.snapshot(now_ms);
        let every_s = self.config.balance_every.0.as_secs_f32();
        self.admitter.update_load(load(&snapshot, every_s));
        self.window = Window::default();
        snapshot
    }

    fn snapshot(&self, now_ms: u64) -> Snapshot {
        let Window { placed, rejected, hit_blocks, blocks } = self.window;
        let (prefill, decode) = self.conductor.rows();
        let now = self.conductor.table_time(now_ms);
        let queue = |row: &PrefillRow| if row.available { (row.busy_until - now).max(0.0) } else { -1.0 };
        let step = |row: &DecodeRow| {
            let (b, c) = (row.sequences as f32, row.context_tokens as f32);
            if row.available {
                row.step_fixed + row.step_per_sequence * b + row.step_per_token * c
            } else {
                -1.0
            }
        };
        Snapshot {
            now_ms,
            prefill_queue_ms: prefill.iter().map(queue).collect(),
            decode_step_ms: decode.iter().map(step).collect(),
            hit_rate_percent: if blocks == 0 { 0.0 } else { 100.0 * hit_blocks as f32 / blocks as f32 },
            rejected,
            accepted: placed,
            hot: Vec::new(),
        }
    }

    pub fn counts(&self) -> Counts {
        let known = |names: &[Option<String>]| names.iter().flatten().count();
        Counts {
            in_flight: self.conductor.in_flight(),
            prefill: known(&self.prefill_names),
            decode: known(&self.decode_names),
            ..self.counts
        }
    }

    pub fn index_stats(&self) -> prefix_index::Stats {
        self.index.stats()
    }
}

fn known<'a>(
    instances: &'a mut HashMap<String, Instance>,
    name: &str,
    epoch: u64,
) -> Result<&'a mut Instance, Error> {
    let Some(instance) = instances.get_mut(name) else {
        return Err(Error::UnknownInstance { name: name.to_owned() });
    };
    if instance.epoch != epoch {
        return Err(Error::Epoch { name: name.to_owned(), given: epoch, current: instance.epoch });
    }
    Ok(instance)
}

fn set_name(names: &mut Vec<Option<String>>, slot: Option<u16>, name: Option<&str>) {
    let Some(slot) = slot.map(usize::from) else { return };
    if names.len() <= slot {
        names.resize(slot + 1, None);
    }
    names[slot] = name.map(str::to_owned);
}

/// Means over the instances that take requests. There is no forecast yet: the present stands for it.
fn load(state: &Snapshot, every_s: f32) -> Load {
    let available = |column: &[f32]| column.iter().copied().filter(|v| *v >= 0.0).collect::<Vec<_>>();
    let mean = |values: &[f32]| {
        if values.is_empty() { 0.0 } else { values.iter().sum::<f32>() / values.len() as f32 }
    };
    let (queue, step) = (available(&state.prefill_queue_ms), available(&state.decode_step_ms));
    Load {
        prefill_queue_mean_ms: mean(&queue),
        prefill_queue_least_ms: queue.iter().copied().reduce(f32::min).unwrap_or(0.0),
        decode_step_ms: mean(&step),
        decode_step_forecast_ms: mean(&step),
        admitted_per_second: state.accepted as f32 / every_s,
        decode_memory_used: 0.0,
    }
}
