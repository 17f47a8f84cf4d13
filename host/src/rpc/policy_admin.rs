use super::validate;
use crate::access::door::About;
use crate::host::Host;
use crate::policy::history::{ENTRIES_MAX, Entry, Named};
use crate::policy::{CounterValues, Error, LogLine, LogPage, SlotKind, SlotStatus, Source, UnknownSlot};
use crate::text::printable;
use kvasir_dataplane::server::access::Identity;
use kvasir_proto::{self as proto, load_request, policy_admin_server::PolicyAdmin};
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// Longest text of a status.
const STATUS_BYTES: usize = 2 << 10;
/// Longest name that a caller gave, in the audit log.
const NAME_BYTES: usize = 64;

pub(super) struct Service(pub(super) Arc<Host>);

impl Service {
    /// Compiling takes up to seconds, the disk may be slow, and neither may hold up other calls.
    async fn blocking<R: Send + 'static>(
        &self,
        work: impl FnOnce(&Host) -> Result<R, Error> + Send + 'static,
    ) -> Result<R, Status> {
        let host = Arc::clone(&self.0);
        let done = tokio::task::spawn_blocking(move || work(&host)).await;
        done.map_err(|e| Status::internal(format!("the policy host failed: {e}")))?.map_err(|e| status(&e))
    }
}

#[tonic::async_trait]
impl PolicyAdmin for Service {
    async fn load(
        &self,
        request: Request<proto::LoadRequest>,
    ) -> Result<Response<proto::LoadResponse>, Status> {
        let (about, who) = (About::of(&request), who(&request));
        let request = request.into_inner();
        about.set(printable(&request.slot, NAME_BYTES));
        validate::load(&request)?;
        let proto::LoadRequest { slot, name, source, settings } = request;
        let slot = slot_kind(&slot)?;
        let source = match source {
            Some(load_request::Source::Builtin(name)) => Source::Builtin(name),
            Some(load_request::Source::Component(bytes)) => {
                let name = if name.is_empty() { slot.to_string() } else { name };
                Source::Bytes { name, bytes: bytes.into() }
            }
            None => {
                return Err(validate::refuse("source", "neither a built-in name nor a component was given"));
            }
        };
        let settings = settings.into_iter().map(|s| (s.name, s.value)).collect();
        let load = move |host: &Host| {
            let before = host.policies.status(slot);
            let loaded = host.policies.load(slot, source, settings)?;
            host.history.note(slot, Entry::now(&who, "loaded", &loaded).in_place_of(&before));
            Ok(loaded)
        };
        let loaded = self.blocking(load).await?;
        tracing::info!(%slot, name = loaded.name, version = loaded.version, "policy loaded");
        let digest = loaded.digest.as_deref().unwrap_or(loaded.engine);
        about.set(format!("{slot}: {} {}, {digest}", loaded.name, loaded.version));
        Ok(Response::new(proto::LoadResponse { policy: Some(policy(loaded)) }))
    }

    async fn list(
        &self,
        _request: Request<proto::ListPoliciesRequest>,
    ) -> Result<Response<proto::ListPoliciesResponse>, Status> {
        let policies = self.0.policies.list().into_iter().map(policy).collect();
        let component_bytes_max = self.0.config.policy.component_bytes_max.0;
        Ok(Response::new(proto::ListPoliciesResponse { policies, component_bytes_max }))
    }

    async fn rollback(
        &self,
        request: Request<proto::RollbackRequest>,
    ) -> Result<Response<proto::RollbackResponse>, Status> {
        let (about, who) = (About::of(&request), who(&request));
        about.set(printable(&request.get_ref().slot, NAME_BYTES));
        let slot = slot_kind(&request.into_inner().slot)?;
        let back = move |host: &Host| {
            let before = host.policies.status(slot);
            let back = host.policies.rollback(slot)?;
            host.history.note(slot, Entry::now(&who, "rolled-back", &back).in_place_of(&before));
            Ok(back)
        };
        let back = self.blocking(back).await?;
        tracing::info!(%slot, name = back.name, version = back.version, "policy rolled back");
        about.set(format!("{slot}: back to {} {}", back.name, back.version));
        Ok(Response::new(proto::RollbackResponse { policy: Some(policy(back)) }))
    }

    async fn logs(
        &self,
        request: Request<proto::LogsRequest>,
    ) -> Result<Response<proto::LogsResponse>, Status> {
        let proto::LogsRequest { slot, after } = request.into_inner();
        let LogPage { lines, began_ms, lost, dropped } = self.0.policies.log_page(slot_kind(&slot)?, after);
        let line =
            |l: LogLine| proto::LogLine { number: l.number, at_ms: l.at_ms, level: l.level, text: l.text };
        let lines = lines.into_iter().map(line).collect();
        Ok(Response::new(proto::LogsResponse { lines, dropped, lost, began_ms }))
    }

    async fn history(
        &self,
        request: Request<proto::HistoryRequest>,
    ) -> Result<Response<proto::HistoryResponse>, Status> {
        let proto::HistoryRequest { slot, limit } = request.into_inner();
        let slots = if slot.is_empty() { SlotKind::ALL.into() } else { vec![slot_kind(&slot)?] };
        let limit = if limit == 0 { ENTRIES_MAX } else { ENTRIES_MAX.min(limit as usize) };
        let entries = self.blocking(move |host| host.history.newest(&slots, limit)).await?;
        let entries = entries.into_iter().map(|(slot, entry)| history_entry(slot, entry)).collect();
        Ok(Response::new(proto::HistoryResponse { entries }))
    }
}

/// As the audit log names the caller.
fn who<T>(request: &Request<T>) -> String {
    request.extensions().get::<Identity>().map_or("unknown", |identity| &identity.name).to_owned()
}

fn slot_kind(name: &str) -> Result<SlotKind, Status> {
    let unknown = |error: UnknownSlot| printable(&error.to_string(), STATUS_BYTES);
    name.parse().map_err(|error| Status::invalid_argument(format!("slot: {}", unknown(error))))
}

fn history_entry(slot: SlotKind, entry: Entry) -> proto::HistoryEntry {
    proto::HistoryEntry {
        slot: slot.to_string(),
        at_ms: entry.at_ms,
        who: entry.who,
        action: entry.action,
        policy: Some(named(entry.policy)),
        settings: settings(entry.settings),
        before: entry.before.map(named),
        reason: entry.reason,
    }
}

fn named(policy: Named) -> proto::NamedPolicy {
    let digest = policy.digest.unwrap_or_default();
    proto::NamedPolicy { name: policy.name, version: policy.version, digest }
}

fn settings(settings: Vec<(String, String)>) -> Vec<proto::Setting> {
    settings.into_iter().map(|(name, value)| proto::Setting { name, value }).collect()
}

fn policy(status: SlotStatus) -> proto::Policy {
    proto::Policy {
        slot: status.slot,
        name: status.name,
        version: status.version,
        engine: status.engine.to_owned(),
        digest: status.digest.unwrap_or_default(),
        generation: status.generation,
        settings: settings(status.settings),
        previous: status.previous.unwrap_or_default(),
        memory_bytes: status.memory_bytes,
        memory_bytes_max: status.memory_bytes_max,
        last_trip: status.last_trip.unwrap_or_default(),
        counters: Some(counters(status.counters)),
        totals: Some(counters(status.totals)),
    }
}

fn counters(c: CounterValues) -> proto::PolicyCounters {
    proto::PolicyCounters {
        calls: c.calls,
        call_ns_mean: c.ns_mean,
        traps: c.traps,
        deadline_misses: c.deadline_misses,
        invalid_answers: c.invalid_answers,
        fallbacks: c.fallbacks,
    }
}

fn status(error: &Error) -> Status {
    // gRPC carries it in a header, which has no room for a megabyte.
    let text = printable(&error.to_string(), STATUS_BYTES);
    match error {
        Error::NoPrevious(_) => Status::failed_precondition(text),
        Error::Busy { .. } => Status::resource_exhausted(text),
        Error::State { .. } | Error::Engine(_) => Status::internal(text),
        Error::UnknownBuiltin { .. } => validate::refuse("builtin", text),
        Error::Settings { .. } => validate::refuse("settings", text),
        _ => validate::refuse("component", text),
    }
}
