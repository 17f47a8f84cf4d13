pub(super) mod convert;

use super::load::{self, slot_kind};
use super::{ENVELOPE_BYTES, validate};
use crate::access::door::About;
use crate::host::Host;
use crate::policy::history::{ENTRIES_MAX, acting_for};
use crate::policy::{Error, LogLine, LogPage, PolicyHost, Serving, SlotKind, SlotStatus, Source, Stage};
use crate::text::printable;
use convert::{guards, history_entry, policy, stage};
use kvasir_dataplane::server::access::Identity;
use kvasir_proto::{self as proto, policy_admin_server::PolicyAdmin};
use prost::Message;
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

    /// Changes a slot for the caller, whom the history names.
    async fn change<R: Send + 'static>(
        &self,
        caller: Caller,
        change: impl FnOnce(&PolicyHost) -> Result<R, Error> + Send + 'static,
    ) -> Result<R, Status> {
        self.blocking(move |host| acting_for(&caller.who, || change(&host.policies))).await
    }
}

/// As the audit log names the caller.
pub(super) fn who<T>(request: &Request<T>) -> String {
    request.extensions().get::<Identity>().map_or("unknown", |identity| &identity.name).to_owned()
}

/// The caller that asks for a change, and where the audit log hears of it.
#[derive(Clone)]
struct Caller {
    about: About,
    who: String,
}

impl Caller {
    fn of<T>(request: &Request<T>, slot: &str) -> Self {
        let about = About::of(request);
        about.set(printable(slot, NAME_BYTES));
        Self { about, who: who(request) }
    }

    /// Writes what was done to both logs.
    fn did(&self, what: String) {
        tracing::info!(who = self.who, "policies: {what}");
        self.about.set(what);
    }
}

#[tonic::async_trait]
impl PolicyAdmin for Service {
    async fn load(
        &self,
        request: Request<proto::LoadRequest>,
    ) -> Result<Response<proto::LoadResponse>, Status> {
        let caller = Caller::of(&request, &request.get_ref().slot);
        let request = request.into_inner();
        let wanted = load::wanted(request)?;
        let (slot, stage) = (wanted.slot, wanted.stage);
        let loaded = self.change(caller.clone(), |policies| wanted.load(policies)).await?;
        caller.did(format!("{slot}: {}, {stage}", newcomer(&loaded, stage)));
        Ok(Response::new(proto::LoadResponse { policy: Some(policy(loaded)) }))
    }

    async fn configure(
        &self,
        request: Request<proto::ConfigureRequest>,
    ) -> Result<Response<proto::ConfigureResponse>, Status> {
        let caller = Caller::of(&request, &request.get_ref().slot);
        let request = request.into_inner();
        validate::configure(&request)?;
        let proto::ConfigureRequest { slot, set, unset, stage: wanted } = request;
        let (slot, stage) = (slot_kind(&slot)?, stage(wanted)?);
        let set = set.into_iter().map(|s| (s.name, s.value)).collect();
        let configure = move |policies: &PolicyHost| policies.change_settings(slot, set, &unset, stage);
        let configured = self.change(caller.clone(), configure).await?;
        caller.did(format!("{slot}: settings of {}, {stage}", newcomer(&configured, stage)));
        Ok(Response::new(proto::ConfigureResponse { policy: Some(policy(configured)) }))
    }

    async fn promote(
        &self,
        request: Request<proto::PromoteRequest>,
    ) -> Result<Response<proto::PromoteResponse>, Status> {
        let caller = Caller::of(&request, &request.get_ref().slot);
        let slot = slot_kind(&request.get_ref().slot)?;
        let promoted = self.change(caller.clone(), move |policies| policies.promote(slot)).await?;
        caller.did(format!("{slot}: {} promoted", newcomer(&promoted, Stage::Active)));
        Ok(Response::new(proto::PromoteResponse { policy: Some(policy(promoted)) }))
    }

    async fn rollback(
        &self,
        request: Request<proto::RollbackRequest>,
    ) -> Result<Response<proto::RollbackResponse>, Status> {
        let caller = Caller::of(&request, &request.get_ref().slot);
        let slot = slot_kind(&request.get_ref().slot)?;
        let back = move |policies: &PolicyHost| {
            let before = policies.status(slot).generation;
            policies.rollback(slot).map(|back| (back.generation == before, back))
        };
        let (trial_ended, back) = self.change(caller.clone(), back).await?;
        let did = if trial_ended { "trial ended, still" } else { "back to" };
        caller.did(format!("{slot}: {did} {} {}", back.name, back.version));
        Ok(Response::new(proto::RollbackResponse { policy: Some(policy(back)), trial_ended }))
    }

    async fn pause(
        &self,
        request: Request<proto::PauseRequest>,
    ) -> Result<Response<proto::PauseResponse>, Status> {
        let caller = Caller::of(&request, &request.get_ref().slot);
        let slot = slot_kind(&request.get_ref().slot)?;
        let paused = self.change(caller.clone(), move |policies| policies.pause(slot)).await?;
        caller.did(format!("{slot}: paused"));
        Ok(Response::new(proto::PauseResponse { policy: Some(policy(paused)) }))
    }

    async fn resume(
        &self,
        request: Request<proto::ResumeRequest>,
    ) -> Result<Response<proto::ResumeResponse>, Status> {
        let caller = Caller::of(&request, &request.get_ref().slot);
        let slot = slot_kind(&request.get_ref().slot)?;
        let resumed = self.change(caller.clone(), move |policies| policies.resume(slot)).await?;
        caller.did(format!("{slot}: resumed"));
        Ok(Response::new(proto::ResumeResponse { policy: Some(policy(resumed)) }))
    }

    async fn list(
        &self,
        _request: Request<proto::ListPoliciesRequest>,
    ) -> Result<Response<proto::ListPoliciesResponse>, Status> {
        let policies = self.0.policies.list().into_iter().map(policy).collect();
        let component_bytes_max = self.0.config.policy.component_bytes_max.0;
        let guards = Some(guards(self.0.policies.guards()));
        Ok(Response::new(proto::ListPoliciesResponse { policies, component_bytes_max, guards }))
    }

    async fn fetch(
        &self,
        request: Request<proto::FetchPolicyRequest>,
    ) -> Result<Response<proto::FetchPolicyResponse>, Status> {
        let proto::FetchPolicyRequest { slot, builtins_as_components } = request.into_inner();
        let slot = slot_kind(&slot)?;
        let fetch = move |host: &Host| host.policies.serving(slot, builtins_as_components);
        let Serving { source, settings, digest, .. } = self.blocking(fetch).await?;
        let native = matches!(source, Source::Native(_));
        let policy = load::request(slot, source, settings);
        let (bytes, most) = (policy.encoded_len() as u64, self.0.config.policy.component_bytes_max.0);
        if bytes > most + ENVELOPE_BYTES as u64 / 2 {
            let why = format!(
                "the parts of what serves {slot} have {bytes} bytes together, and one answer carries {most}; raise policy.component_bytes_max"
            );
            return Err(Status::resource_exhausted(why));
        }
        let digest = digest.map_or_else(String::new, |digest| digest.to_string());
        Ok(Response::new(proto::FetchPolicyResponse { policy: Some(policy), digest, native }))
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

/// What was loaded for that stage: `lru 0.1.0, 3f2a…`.
fn newcomer(status: &SlotStatus, stage: Stage) -> String {
    let trial = status.trial.as_ref().filter(|_| stage != Stage::Active);
    let (name, version, digest, engine) = match trial {
        Some(trial) => (&trial.name, &trial.version, &trial.digest, trial.engine),
        None => (&status.name, &status.version, &status.digest, status.engine),
    };
    format!("{name} {version}, {}", digest.as_deref().unwrap_or(engine))
}

pub(super) fn status(error: &Error) -> Status {
    // gRPC carries it in a header, which has no room for a megabyte.
    let text = printable(&error.to_string(), STATUS_BYTES);
    match error {
        Error::Untrusted { .. } => Status::permission_denied(text),
        Error::NoPrevious(_) | Error::NoTrial(_) | Error::Paused(_) | Error::NotSet { .. } => {
            Status::failed_precondition(text)
        }
        Error::Busy { .. } | Error::NoRoom { .. } => Status::resource_exhausted(text),
        Error::State { .. } | Error::Engine(_) | Error::NotKept(_) => Status::internal(text),
        Error::UnknownBuiltin { .. } => validate::refuse("builtin", text),
        Error::Settings { .. } | Error::UnknownSetting { .. } => validate::refuse("settings", text),
        Error::NoCanary { .. } | Error::Share { .. } => validate::refuse("stage", text),
        _ => validate::refuse("component", text),
    }
}
