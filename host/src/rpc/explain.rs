use super::store::{block, own_keys};
use super::validate;
use crate::explain::{Admitted, Decided, Found, blocks, unix_ms_of, words};
use crate::host::Host;
use crate::policy::Again;
use crate::policy::record::PolicyOf;
use kvasir_policy::admitter::Verdict;
use kvasir_policy::scheduler::{Decision, Placement, Request as Asked};
use kvasir_proto::{self as proto, explain_server::Explain};
use std::sync::Arc;
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};

/// The longest record that goes into an answer, which may have 8 MiB.
const RECORD_BYTES_MAX: usize = 4 << 20;

/// Converts, asks what is kept, converts back.
pub(super) struct Service {
    host: Arc<Host>,
    /// A caller that asks a policy again takes an instance of it, so one at a time.
    asking: Semaphore,
}

impl Service {
    pub(super) fn new(host: Arc<Host>) -> Self {
        Self { host, asking: Semaphore::new(1) }
    }
}

#[tonic::async_trait]
impl Explain for Service {
    async fn decision(
        &self,
        request: Request<proto::ExplainDecisionRequest>,
    ) -> Result<Response<proto::ExplainDecisionResponse>, Status> {
        let proto::ExplainDecisionRequest { id, record } = request.into_inner();
        let newest = || self.host.conductor.explain().range().map_or(0, |(_, newest)| newest);
        let id = if id == 0 { newest() } else { id };
        let host = Arc::clone(&self.host);
        let _one = self.asking.acquire().await.expect("never closed");
        let explain = move || {
            let found = host.conductor.explain().find(id).ok_or_else(|| not_kept(&host, id))?;
            Ok::<_, Status>(explained(&host, &found, record))
        };
        // Asking a policy again takes as long as a cold call.
        let explained = tokio::task::spawn_blocking(explain).await;
        explained.map_err(|error| Status::internal(error.to_string()))?.map(Response::new)
    }

    async fn block(
        &self,
        request: Request<proto::ExplainBlockRequest>,
    ) -> Result<Response<proto::ExplainBlockResponse>, Status> {
        let keys = own_keys(&request, &[&request.get_ref().key])?;
        let [key] = keys[..] else { return Err(validate::refuse("key", "one block was to be named")) };
        let node = &self.host.node;
        let stat = node.stat(&[key]).map_err(super::store::status)?;
        let (stat, at) = stat.into_iter().next().ok_or_else(|| Status::internal("no answer of the store"))?;
        let now_ms = self.host.clock.now_ms();
        let past = self.host.evicted.of(key);
        let cause = node.store().cause(key);
        let peers = node.holders(key);
        let summary = blocks::summary(&at, &peers, stat.as_ref(), &past, cause, now_ms);
        let evictions = past.choices.iter().map(|choice| eviction(choice, now_ms)).collect();
        Ok(Response::new(proto::ExplainBlockResponse {
            summary,
            block: block(key, stat.as_ref(), at),
            evictions,
            cause: if stat.is_some() { String::new() } else { cause.name().to_owned() },
            remembered_since_ms: past.since_ms.map_or(0, |since| unix_ms_of(since, now_ms)),
            peers,
        }))
    }
}

fn eviction(choice: &blocks::Choice, now_ms: u64) -> proto::Eviction {
    proto::Eviction {
        at_ms: unix_ms_of(choice.at_ms, now_ms),
        policy: choice.policy.to_string(),
        generation: choice.generation,
        fallback: choice.fallback,
        rank: choice.rank.into(),
        of: choice.of.into(),
        resident_ms: choice.at_ms.saturating_sub(choice.inserted_ms),
        idle_ms: choice.at_ms.saturating_sub(choice.used_ms),
        uses: choice.uses,
        to: blocks::destination(choice.to).to_owned(),
    }
}

fn not_kept(host: &Host, id: u64) -> Status {
    Status::not_found(match host.conductor.explain().range() {
        None if host.config.explain.decisions == 0 => {
            "decisions are not kept; set explain.decisions".to_owned()
        }
        None => "no decision was made since this host started".to_owned(),
        Some((first, last)) => format!(
            "decision {id} is not kept: those kept are between {first} and {last} (explain.decisions, explain.memory_bytes)"
        ),
    })
}

/// The names of instances that are still in the same slots.
struct Names {
    slots: crate::conductor::Slots,
    prefill: words::Table,
    decode: words::Table,
}

impl Names {
    fn instance(&self, prefill: bool, slot: u32) -> Option<String> {
        let (table, known) = match prefill {
            true => (&self.prefill, &self.slots.prefill),
            false => (&self.decode, &self.slots.decode),
        };
        let row = table.rows.iter().find(|row| row.slot == slot)?;
        let (name, identity) = known.get(slot as usize)?.as_ref()?;
        (*identity == row.identity).then(|| name.clone())
    }

    fn spoken(&self, prefill: bool, slot: u32) -> String {
        let gone = || format!("slot {slot} (whose instance has left or registered again since)");
        self.instance(prefill, slot).unwrap_or_else(gone)
    }
}

fn explained(host: &Host, found: &Found, record: bool) -> proto::ExplainDecisionResponse {
    let now_ms = host.clock.now_ms();
    let at_ms = unix_ms_of(found.decided.at_ms, now_ms);
    let again = host.policies.ask_again(&found.record(at_ms), found.decided.generation);
    let parts = again.as_ref().map_or(Vec::new(), |again| again.parts.clone());
    let (scores, scores_from) = scores(found, again);
    let prefill_slots = found.question.slots()[0];
    let names = Names {
        slots: host.conductor.slots(),
        prefill: words::prefill(found).with_parts(&parts, |slot| slot as usize),
        decode: words::decode(found).with_parts(&parts, |slot| prefill_slots + slot as usize),
    };
    let of_prefill = scores.get(..prefill_slots).unwrap_or(&[]);
    let of_decode = scores.get(prefill_slots..).unwrap_or(&[]);
    let decided = &found.decided;
    let asked = Asked::decode(found.question.words());
    let (chosen, rejected) = match decided.decision {
        Decision::Run(placement) => (Some(placement), None),
        Decision::Reject { reason, retry_after_ms } => {
            (None, Some(proto::RejectedBecause { reason, retry_after_ms }))
        }
    };
    let line = || serde_json::to_string(&found.record(at_ms)).unwrap_or_default();
    let line = if record { line() } else { String::new() };
    proto::ExplainDecisionResponse {
        id: decided.id,
        at_ms,
        scheduler: Some(scheduler(decided)),
        summary: words::summary(found, &scores, &|prefill, slot| names.spoken(prefill, slot)),
        prefill: Some(candidates(&names, true, chosen, of_prefill)),
        decode: Some(candidates(&names, false, chosen, of_decode)),
        chosen: chosen.map(|placement| proto::ChosenPlacement {
            prefill_slot: placement.prefill,
            decode_slot: placement.decode,
            transfer_blocks: placement.transfer.map_or(0, |transfer| transfer.blocks),
            source_slot: placement.transfer.map_or(0, |transfer| transfer.source),
        }),
        rejected,
        admitter: decided.admitted.as_ref().map(admitted),
        scores_from: scores_from.into(),
        prompt_tokens: asked.prompt_tokens,
        output_tokens: asked.output_tokens,
        class: asked.class,
        tenant: asked.tenant,
        session: asked.session,
        asked_again: asked.asked_again(),
        record: if line.len() <= RECORD_BYTES_MAX { line } else { String::new() },
    }
}

/// The scores asked for with the decision, or else those of another instance of the policy, if it still serves.
fn scores(found: &Found, again: Option<Again>) -> (Vec<f32>, proto::ScoresFrom) {
    use proto::ScoresFrom;
    if !found.scores.is_empty() {
        return (found.scores.clone(), ScoresFrom::Decision);
    }
    let Some(again) = again else { return (Vec::new(), ScoresFrom::Unspecified) };
    let fits = found.told().check_scores(&again.scores).is_ok();
    match (again.scores.is_empty() || !fits, again.same || found.decided.fallback.is_some()) {
        (true, _) => (Vec::new(), ScoresFrom::Unspecified),
        (false, true) => (again.scores, ScoresFrom::AskedAgain),
        (false, false) => (again.scores, ScoresFrom::AskedAgainOtherwise),
    }
}

fn candidates(names: &Names, prefill: bool, chosen: Option<Placement>, scores: &[f32]) -> proto::Candidates {
    let table = if prefill { &names.prefill } else { &names.decode };
    let is = |slot: u32| chosen.is_some_and(|c| slot == if prefill { c.prefill } else { c.decode });
    let source = |slot: u32| {
        prefill && chosen.and_then(|c| c.transfer).is_some_and(|transfer| transfer.source == slot)
    };
    let row = |row: &words::Row| proto::Candidate {
        slot: row.slot,
        instance: names.instance(prefill, row.slot).unwrap_or_default(),
        chosen: is(row.slot),
        source: source(row.slot),
        barred: row.barred.clone().unwrap_or_default(),
        score: scores.get(row.slot as usize).copied(),
        values: row.values.clone(),
    };
    proto::Candidates { columns: table.columns.clone(), rows: table.rows.iter().map(row).collect() }
}

fn scheduler(decided: &Decided) -> proto::PolicyUsed {
    let fallback = decided.fallback.clone().unwrap_or_default();
    used(&decided.policy, decided.generation, fallback, decided.ns)
}

fn used(policy: &PolicyOf, generation: u64, fallback: String, ns: u64) -> proto::PolicyUsed {
    let setting =
        |(name, value): &(String, String)| proto::Setting { name: name.clone(), value: value.clone() };
    proto::PolicyUsed {
        name: policy.name.clone(),
        version: policy.version.clone(),
        digest: policy.digest.clone().unwrap_or_default(),
        generation,
        settings: policy.settings.iter().map(setting).collect(),
        fallback,
        ns,
    }
}

fn admitted(admitted: &Admitted) -> proto::Admitted {
    let Admitted { policy, generation, forecast, verdict, fallback, ns, .. } = admitted;
    let (verdict, reason, retry_after_ms) = match *verdict {
        Verdict::Accept => ("accept", 0, 0),
        Verdict::Queue => ("queue", 0, 0),
        Verdict::Reject { reason, retry_after_ms } => ("reject", reason, retry_after_ms),
    };
    proto::Admitted {
        policy: Some(used(policy, *generation, fallback.clone().unwrap_or_default(), *ns)),
        verdict: verdict.to_owned(),
        reason,
        retry_after_ms,
        ttft_ms: forecast.ttft,
        tbt_ms: forecast.tbt,
        tenant_share: forecast.tenant_share,
        queue_ms: forecast.queue,
        prefill_ms: forecast.prefill,
        transfer_ms: forecast.transfer,
        cached_tokens: forecast.cached_tokens,
        handover_ms: forecast.handover,
    }
}
