//! What is true of the cluster, behind the lock of [`super::Conductor`]; no policy is called in here.

mod question;

use super::blocks::{Blocks, Found};
use super::load::{Window, cluster_load, snapshot};
use super::memos::Memos;
use super::names::Names;
use super::serves::{Catalogue, Serves};
use super::{
    Counts, Error, Holder, Instance, NAME_MAX, Placed, Registration, Rejected, Report, Scores, Slots, Stage,
    outcomes,
};
use crate::config;
use crate::fleet::{self, Admission, Ask, DOMAINS_MAX, Fleet, LinkSpec, Outcome, Site};
use crate::policy::Outcomes;
use crate::prefix_index::Limits;
use kvasir_policy::admitter::Load;
use kvasir_policy::balancer::Snapshot;
use kvasir_policy::learning::{self, End};
use kvasir_policy::scheduler::{Decision, Placement, Question};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// An instance that is silent for this many times `conductor.instance_ttl` is forgotten.
const FORGET_AFTER: u32 = 30;
/// Machines come and go under new names; those beyond this are unknown to policies.
const HOSTS_MAX: usize = 1 << 16;

pub(super) struct State {
    config: config::Conductor,
    pub(super) fleet: Fleet,
    pub(super) blocks: Arc<Blocks>,
    instances: HashMap<String, Instance>,
    prefill_names: Vec<Option<String>>,
    decode_names: Vec<Option<String>>,
    hosts: Names,
    domains: Names,
    pub(super) catalogue: Catalogue,
    /// By tenant and session: two tenants do not share one.
    sessions: Memos<(u32, u64)>,
    tenants: Memos<u32>,
    epochs: u64,
    requests: u64,
    counts: Counts,
    /// What happened since the last tick, for the balancer.
    window: Window,
    /// The load as of the last tick, for the admitters.
    pub(super) load: Load,
    /// For policies that learn.
    pub(super) outcomes: Outcomes,
    /// Run of the host, as policies are told it.
    run: u32,
}

impl State {
    pub(super) fn new(config: &config::Conductor, outcomes: Outcomes, run: u32, now_ms: u64) -> Self {
        let limits = fleet::Limits {
            instances: config.instances_max.min(u32::from(u16::MAX) - 1) as u16,
            requests: config.requests_max as usize,
        };
        let entries = config.index_entries_max as usize;
        let mut domains = Names::new(DOMAINS_MAX);
        let links: Vec<LinkSpec> =
            config.links.iter().filter_map(|link| numbered(link, &mut domains)).collect();
        let fleet = Fleet::new(limits, config.block_size_tokens, now_ms);
        let quotas = config.tenants.iter().map(|quota| (quota.tenant, quota.tokens_max));
        let mut fleet = fleet.with_links(&links).with_quotas(quotas).in_run(run);
        fleet.set_domains(domains.len() as u32 + 1);
        Self {
            fleet,
            blocks: Arc::new(Blocks::new(Limits { entries, covers: entries })),
            config: config.clone(),
            instances: HashMap::new(),
            prefill_names: Vec::new(),
            decode_names: Vec::new(),
            hosts: Names::new(HOSTS_MAX),
            domains,
            catalogue: Catalogue::new(),
            sessions: Memos::new(config.sessions_max as usize),
            tenants: Memos::new(config.sessions_max as usize),
            epochs: 0,
            requests: 0,
            counts: Counts::default(),
            window: Window::default(),
            load: Load::default(),
            outcomes,
            run,
        }
    }

    pub(super) fn register(&mut self, name: &str, given: Registration, now_ms: u64) -> Result<u64, Error> {
        if !(1..=NAME_MAX).contains(&name.len()) {
            return Err(Error::Name { len: name.len() });
        }
        if given.prefill.is_none() && given.decode.is_none() {
            return Err(Error::NoRole { name: name.to_owned() });
        }
        // All refusals come before the known instance of that name goes.
        let replaced = self.instances.get(name);
        if let Some(spec) = &given.prefill {
            self.fleet.check_prefill(spec, replaced.is_some_and(|old| old.prefill.is_some()))?;
        }
        if let Some(spec) = &given.decode {
            self.fleet.check_decode(spec, replaced.is_some_and(|old| old.decode.is_some()))?;
        }
        let site = self.site(&given)?;
        let serves = Arc::new(self.catalogue.serves(&given)?);
        self.forget(name);
        let (prefill, decode) = self.fleet.register(given.prefill, given.decode, site, now_ms)?;
        set_name(&mut self.prefill_names, prefill, Some(name));
        set_name(&mut self.decode_names, decode, Some(name));
        self.set_serves(prefill, decode, Some(&serves));
        self.epochs += 1;
        let epoch = self.epochs;
        let instance = Instance {
            prefill,
            decode,
            epoch,
            sequence: 0,
            desynced: false,
            reported_ms: now_ms,
            draining: false,
            serves,
        };
        self.instances.insert(name.to_owned(), instance);
        Ok(epoch)
    }

    /// # Errors
    /// [`Error::TooManyNames`] of domains. A machine for which there is no room is unknown: policies lose a hint, and
    /// nothing goes wrong.
    fn site(&mut self, given: &Registration) -> Result<Site, Error> {
        let host = if given.host.is_empty() { None } else { self.hosts.number(&given.host) };
        if given.domain.is_empty() {
            return Ok(Site { host, domain: 0 });
        }
        let full = || Error::TooManyNames { what: "domain", name: given.domain.clone(), limit: DOMAINS_MAX };
        let domain = self.domains.number(&given.domain).ok_or_else(full)?;
        self.fleet.set_domains(self.domains.len() as u32 + 1);
        Ok(Site { host, domain })
    }

    pub(super) fn unregister(&mut self, name: &str, epoch: u64) -> Result<(), Error> {
        known(&mut self.instances, name, epoch)?;
        self.forget(name);
        Ok(())
    }

    fn forget(&mut self, name: &str) {
        let Some(gone) = self.instances.remove(name) else { return };
        // Slots of known instances are in the tables.
        self.blocks.drop_instance(gone.holder());
        if let Some(slot) = gone.prefill {
            let _ = self.fleet.unregister_prefill(slot);
        }
        if let Some(slot) = gone.decode {
            let _ = self.fleet.unregister_decode(slot);
        }
        set_name(&mut self.prefill_names, gone.prefill, None);
        set_name(&mut self.decode_names, gone.decode, None);
        self.set_serves(gone.prefill, gone.decode, None);
    }

    fn set_serves(&mut self, prefill: Option<u16>, decode: Option<u16>, serves: Option<&Arc<Serves>>) {
        self.catalogue.prefill.set(prefill, serves.cloned());
        self.catalogue.decode.set(decode, serves.cloned());
        if let Some(serves) = serves {
            self.fleet.set_adapters(prefill, decode, serves.adapters());
        }
    }

    pub(super) fn reset_blocks(&mut self, name: &str, epoch: u64) -> Result<(), Error> {
        let instance = known(&mut self.instances, name, epoch)?;
        instance.sequence = 0;
        // A gap has forgotten them already.
        if !std::mem::take(&mut instance.desynced) {
            let holder = instance.holder();
            self.blocks.drop_instance(holder);
        }
        Ok(())
    }

    pub(super) fn report(
        &mut self,
        name: &str,
        epoch: u64,
        report: &Report,
        now_ms: u64,
    ) -> Result<(), Error> {
        let Report { free_blocks, draining, waiting, adapters } = report;
        let (&free_blocks, &draining, &waiting) = (free_blocks, draining, waiting);
        let said = fleet::Report { free_blocks, waiting };
        let instance = known(&mut self.instances, name, epoch)?;
        instance.reported_ms = now_ms;
        instance.draining = draining;
        let (prefill, decode) = (instance.prefill, instance.decode);
        if let Some(adapters) = adapters {
            let serves = Arc::new(self.catalogue.with_adapters(&instance.serves, adapters));
            instance.serves = Arc::clone(&serves);
            self.set_serves(prefill, decode, Some(&serves));
        }
        if let Some(slot) = prefill {
            self.fleet.report_prefill(slot, said, now_ms)?;
            self.fleet.set_prefill_available(slot, !draining)?;
        }
        if let Some(slot) = decode {
            self.fleet.report_decode(slot, said, now_ms)?;
            self.fleet.set_decode_available(slot, !draining)?;
        }
        Ok(())
    }

    /// A gap means that something unknown happened: what is known of the instance's blocks is dropped, once,
    /// and no further message counts until [`Self::reset_blocks`].
    pub(super) fn next_message(&mut self, name: &str, epoch: u64, sequence: u64) -> Result<Holder, Error> {
        let instance = known(&mut self.instances, name, epoch)?;
        let holder = instance.holder();
        let expected = instance.sequence + 1;
        if instance.desynced || sequence != expected {
            if !std::mem::replace(&mut instance.desynced, true) {
                self.blocks.drop_instance(holder);
            }
            return Err(Error::Gap { name: name.to_owned(), given: sequence, expected });
        }
        instance.sequence = sequence;
        Ok(holder)
    }

    /// Makes sure that slots mean in what was found what they mean here.
    pub(super) fn bring_up_to_date(&self, chain: &[u64], found: &mut Found) {
        if !self.blocks.are_as_found(found) {
            self.blocks.look(chain, found);
        }
    }

    /// Leading blocks of a chain at each instance that holds any, longest first.
    pub(super) fn by_name(&self, found: &Found) -> Vec<(String, u32)> {
        let mut all = named(&found.prefill.all, &self.prefill_names);
        all.extend(named(&found.decode.all, &self.decode_names));
        all.retain(|&(_, blocks)| blocks > 0);
        all.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        all
    }

    /// The scores of a policy, by prefill slot and then perhaps by decode slot, by the names of those that are known.
    pub(super) fn scores(&self, scores: &[f32]) -> Scores {
        let (prefill, decode) = scores.split_at(scores.len().min(self.fleet.prefill_slots()));
        Scores { prefill: named(prefill, &self.prefill_names), decode: named(decode, &self.decode_names) }
    }

    /// The id of a decision that was not booked.
    pub(super) fn next_id(&mut self) -> u64 {
        self.requests += 1;
        self.requests
    }

    pub(super) fn slots(&self) -> Slots {
        let named = |names: &[Option<String>], identity: &dyn Fn(u16) -> u32| {
            let name = |(slot, name): (usize, &Option<String>)| Some((name.clone()?, identity(slot as u16)));
            names.iter().enumerate().map(name).collect()
        };
        Slots {
            prefill: named(&self.prefill_names, &|slot| self.fleet.prefill_identity(slot)),
            decode: named(&self.decode_names, &|slot| self.fleet.decode_identity(slot)),
        }
    }

    /// Books a decision. Returns its id, and what it means by names.
    ///
    /// # Errors
    /// As [`Fleet::admit`].
    pub(super) fn book(
        &mut self,
        ask: &Ask,
        decision: &Decision,
        question: &Question,
        now_ms: u64,
    ) -> Result<Result<(u64, Placed), Rejected>, fleet::Error> {
        let id = self.requests + 1;
        match self.fleet.admit(id, ask, decision, question.candidates(), now_ms)? {
            Outcome::Rejected { reason, retry_after_ms } => {
                Ok(Err(Rejected { refused: None, reason, retry_after_ms }))
            }
            Outcome::Admitted(admission) => {
                self.requests = id;
                self.remember(ask, decision);
                Ok(Ok((id, self.placed(decision, admission, question))))
            }
        }
    }

    /// What a decision that is booked leaves for later ones.
    fn remember(&mut self, ask: &Ask, decision: &Decision) {
        let &Decision::Run(Placement { session_memo, tenant_charge, .. }) = decision else { return };
        if ask.session != 0 {
            self.sessions.set((ask.tenant, ask.session), session_memo);
        }
        if tenant_charge != 0 {
            let sum = self.tenants.get(ask.tenant).wrapping_add(tenant_charge);
            self.tenants.set(ask.tenant, sum);
        }
    }

    fn placed(&self, decision: &Decision, admission: Admission, question: &Question) -> Placed {
        let name = |names: &[Option<String>], slot: u16| {
            names.get(usize::from(slot)).cloned().flatten().unwrap_or_default()
        };
        let transfer = match decision {
            Decision::Run(Placement { transfer, .. }) => *transfer,
            Decision::Reject { .. } => None,
        };
        Placed {
            prefill: name(&self.prefill_names, admission.prefill),
            decode: name(&self.decode_names, admission.decode),
            prefix_blocks: question.candidates().prefix_of(usize::from(admission.prefill)),
            transfer: transfer.map(|t| (name(&self.prefill_names, t.source as u16), t.blocks)),
            admission,
        }
    }

    pub(super) fn count(&mut self, placed: Option<&Placed>, blocks: usize) {
        self.window.count(placed, blocks);
        match placed {
            Some(_) => self.counts.placed += 1,
            None => self.counts.rejected += 1,
        }
    }

    pub(super) fn complete(&mut self, request_id: u64, stage: Stage, now_ms: u64) -> Result<(), Error> {
        match stage {
            Stage::Transfer => self.fleet.transfer_done(request_id, now_ms),
            Stage::Prefill { took_ms } => self.fleet.prefill_done(request_id, took_ms, now_ms),
            Stage::Progress(tokens) => self.fleet.progress(request_id, tokens, now_ms),
            Stage::Finished => {
                let ended = self.fleet.finished(request_id, now_ms)?;
                self.tell(&outcomes::ended(End::Finished, &ended));
                Ok(())
            }
        }?;
        Ok(())
    }

    /// Tells of a request that was not booked: that is an outcome, too.
    pub(super) fn tell_rejected(&self, ask: &Ask, rejected: &Rejected) {
        let identities = rejected.refused.map_or([0; 2], |admission| self.fleet.identities(&admission));
        self.tell(&outcomes::rejected(ask, rejected, identities));
    }

    fn tell(&self, outcome: &learning::Outcome) {
        self.outcomes.tell(&learning::Outcome { run: self.run, ..*outcome });
    }

    /// Expires requests and silent instances, takes stock of the load for the admitters, and gives the
    /// state that the balancer sees.
    pub(super) fn tick(&mut self, now_ms: u64) -> Snapshot {
        self.fleet.tick(now_ms);
        let before = |ttl: Duration| now_ms.saturating_sub(ttl.as_millis() as u64);
        for ended in self.fleet.expire(before(self.config.request_ttl.0), now_ms) {
            self.tell(&outcomes::ended(End::GivenUp, &ended));
        }
        let silent_since = before(self.config.instance_ttl.0);
        for instance in self.instances.values().filter(|i| i.reported_ms < silent_since) {
            // Slots of known instances are in the tables.
            let _ = instance.prefill.map(|slot| self.fleet.set_prefill_available(slot, false));
            let _ = instance.decode.map(|slot| self.fleet.set_decode_available(slot, false));
        }
        self.forget_dead(before(self.config.instance_ttl.0 * FORGET_AFTER));
        let window = std::mem::take(&mut self.window);
        let snapshot = snapshot(&self.fleet, &window, now_ms);
        self.load = cluster_load(&self.fleet, &snapshot, self.config.balance_every.0, now_ms);
        snapshot
    }

    /// Without this, pods that crash and come back under new names would fill the tables and the index.
    fn forget_dead(&mut self, silent_since_ms: u64) {
        let dead = self.instances.iter().filter(|(_, i)| i.reported_ms < silent_since_ms);
        let mut dead: Vec<_> = dead.map(|(name, i)| (i.reported_ms, name.clone())).collect();
        dead.sort_unstable(); // the order of a hash map must not show in the tables
        for (_, name) in dead {
            self.forget(&name);
            self.counts.forgotten += 1;
        }
    }

    pub(super) fn counts(&self) -> Counts {
        let known = |names: &[Option<String>]| names.iter().flatten().count();
        Counts {
            in_flight: self.fleet.in_flight(),
            prefill: known(&self.prefill_names),
            decode: known(&self.decode_names),
            memos_forgotten: self.sessions.forgotten() + self.tenants.forgotten(),
            names_refused: self.hosts.refused() + self.domains.refused() + self.catalogue.refused(),
            ..self.counts
        }
    }
}

/// A link by the numbers of its domains; `None` beyond the limit, which the settings are checked against.
fn numbered(link: &config::Link, domains: &mut Names) -> Option<LinkSpec> {
    let config::Link { from, to, fixed_ms, factor, parallel } = link;
    let (from, to) = (domains.number(from)?, domains.number(to)?);
    Some(LinkSpec { from, to, fixed_ms: *fixed_ms, factor: *factor, parallel: *parallel })
}

/// A column by slot, by the names of those that are known.
fn named<V: Copy>(column: &[V], names: &[Option<String>]) -> Vec<(String, V)> {
    column.iter().zip(names).filter_map(|(&value, name)| Some((name.clone()?, value))).collect()
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
