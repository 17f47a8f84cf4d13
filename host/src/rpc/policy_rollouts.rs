//! Rollouts of policies to the hosts that follow this one.

use super::load::{self, slot_kind};
use super::policy_admin::{status, who};
use super::validate;
use crate::access::door::About;
use crate::calendar::unix_ms;
use crate::host::Host;
use crate::policy::rollout::keeper::{Error, Report, Step as Change, Told};
use crate::policy::rollout::{Order, Phase, Rollout, Said, Step};
use crate::policy::{SlotKind, Stage};
use crate::text::printable;
use kvasir_proto::policy_rollouts_server::PolicyRollouts;
use kvasir_proto::{self as proto, change_rollout_request, follow_order, follow_report};
use prost::Message;
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// A week.
const PAUSE_MS_MAX: u64 = 7 * 86_400_000;
/// The most bytes of the reason why a host failed.
const REASON_BYTES: usize = 1 << 10;

pub(super) struct Service(pub(super) Arc<Host>);

impl Service {
    /// The state database may be slow, and compiling is.
    async fn blocking<R: Send + 'static>(
        &self,
        work: impl FnOnce(&Host) -> Result<R, Status> + Send + 'static,
    ) -> Result<R, Status> {
        let host = Arc::clone(&self.0);
        let done = tokio::task::spawn_blocking(move || work(&host)).await;
        done.map_err(|e| Status::internal(format!("the rollouts failed: {e}")))?
    }
}

#[tonic::async_trait]
impl PolicyRollouts for Service {
    async fn start(
        &self,
        request: Request<proto::StartRolloutRequest>,
    ) -> Result<Response<proto::StartRolloutResponse>, Status> {
        let (about, who) = (About::of(&request), who(&request));
        let proto::StartRolloutRequest { policy, pause_ms } = request.into_inner();
        let policy = policy.ok_or_else(|| validate::refuse("policy", "none was given"))?;
        if pause_ms > PAUSE_MS_MAX {
            return Err(validate::refuse(
                "pause_ms",
                format_args!("{pause_ms}; at most {PAUSE_MS_MAX}, a week"),
            ));
        }
        let encoded = policy.encode_to_vec();
        let wanted = load::wanted(policy)?;
        if wanted.stage != Stage::Active {
            return Err(validate::refuse("policy", "a rollout brings a policy into service on every host"));
        }
        let slot = wanted.slot;
        let start = move |host: &Host| {
            let leader = &host.config.policy.follow;
            if !leader.is_empty() {
                let text = format!("this host follows the rollouts of {leader}; start it there");
                return Err(Status::failed_precondition(text));
            }
            let target =
                host.policies.resolve(slot, wanted.source, wanted.settings).map_err(|e| status(&e))?;
            host.rollouts.start(slot, target, &encoded, who, pause_ms, unix_ms()).map_err(refused)
        };
        let started = self.blocking(start).await?;
        about.set(format!("{slot}: rollout {} of {}", started.id, started.target.origin.name()));
        Ok(Response::new(proto::StartRolloutResponse { rollout: Some(rollout(slot, started)) }))
    }

    async fn list(
        &self,
        _request: Request<proto::ListRolloutsRequest>,
    ) -> Result<Response<proto::ListRolloutsResponse>, Status> {
        let rollouts = self.0.rollouts.list().into_iter().map(|(slot, r)| rollout(slot, r)).collect();
        Ok(Response::new(proto::ListRolloutsResponse { rollouts }))
    }

    async fn change(
        &self,
        request: Request<proto::ChangeRolloutRequest>,
    ) -> Result<Response<proto::ChangeRolloutResponse>, Status> {
        use change_rollout_request::Step as Wanted;
        let (about, who) = (About::of(&request), who(&request));
        let request = request.into_inner();
        let slot = slot_kind(&request.slot)?;
        let change = match request.step() {
            Wanted::Pause => Change::Pause,
            Wanted::Resume => Change::Resume,
            Wanted::Stop => Change::Stop,
            Wanted::Unspecified => return Err(validate::refuse("step", "pause, resume or stop")),
        };
        about.set(format!("{slot}: {change:?}"));
        let changed =
            self.blocking(move |host| host.rollouts.change(slot, change, &who).map_err(refused)).await?;
        Ok(Response::new(proto::ChangeRolloutResponse { rollout: Some(rollout(slot, changed)) }))
    }

    async fn follow(
        &self,
        request: Request<proto::FollowRequest>,
    ) -> Result<Response<proto::FollowResponse>, Status> {
        let proto::FollowRequest { host: name, reports } = request.into_inner();
        validate::name_in("host", &name)?;
        if reports.len() > SlotKind::ALL.len() {
            return Err(validate::refuse("reports", format_args!("{}; at most one a slot", reports.len())));
        }
        let reports = reports.into_iter().map(report).collect::<Result<_, _>>()?;
        let hear = move |host: &Host| host.rollouts.hear(&name, reports, unix_ms()).map_err(refused);
        let orders = self.blocking(hear).await?.into_iter().map(order).collect();
        Ok(Response::new(proto::FollowResponse { orders }))
    }

    async fn fetch(
        &self,
        request: Request<proto::FetchRequest>,
    ) -> Result<Response<proto::FetchResponse>, Status> {
        let proto::FetchRequest { slot, id } = request.into_inner();
        let slot = slot_kind(&slot)?;
        let bytes = self.blocking(move |host| host.rollouts.request(slot, id).map_err(refused)).await?;
        let policy = proto::LoadRequest::decode(&*bytes);
        let policy =
            policy.map_err(|e| Status::internal(format!("what was stored is no LoadRequest: {e}")))?;
        Ok(Response::new(proto::FetchResponse { policy: Some(policy) }))
    }
}

fn report(report: proto::FollowReport) -> Result<Report, Status> {
    use follow_report::Said as Wire;
    let slot = slot_kind(&report.slot)?;
    let said = match report.said() {
        Wire::Other => Said::Other,
        Wire::Paused => Said::Paused,
        Wire::Watched => Said::Watched,
        Wire::Settled => Said::Settled,
        Wire::Failed => Said::Failed(printable(&report.reason, REASON_BYTES)),
        Wire::Unspecified => return Err(validate::refuse("reports.said", "says nothing")),
    };
    Ok(Report { slot, id: report.id, said })
}

fn order(told: Told) -> proto::FollowOrder {
    use follow_order::Order as Wire;
    let order = match told.order {
        Order::Keep => Wire::Keep,
        Order::Serve => Wire::Serve,
        Order::Return => Wire::Return,
    };
    proto::FollowOrder {
        slot: told.slot.to_string(),
        id: told.id,
        order: order.into(),
        target: serde_json::to_string(&told.target).expect("an assignment is names and texts"),
    }
}

fn rollout(slot: SlotKind, rollout: Rollout) -> proto::Rollout {
    let (phase, reason) = match &rollout.phase {
        Phase::Rolling if rollout.is_done() => ("done", String::new()),
        Phase::Rolling => ("rolling", String::new()),
        Phase::Paused => ("paused", String::new()),
        Phase::Stopped { reason } => ("stopped", reason.clone()),
    };
    let host = |(name, step, heard_ms): (&str, &Step, u64)| {
        let (step, reason) = match step {
            Step::Waiting => ("waiting", String::new()),
            Step::Told => ("told", String::new()),
            Step::Paused => ("paused", format!("there, until `kvasir policy resume {slot}`")),
            Step::Watched => ("watched", String::new()),
            Step::Settled => ("settled", String::new()),
            Step::Failed { reason } => ("failed", reason.clone()),
            Step::Back => ("back", String::new()),
        };
        proto::RolloutHost { name: name.into(), step: step.into(), reason, heard_ms }
    };
    proto::Rollout {
        slot: slot.to_string(),
        id: rollout.id,
        name: rollout.target.origin.name().into(),
        settings: rollout
            .target
            .settings
            .iter()
            .map(|(name, value)| proto::Setting { name: name.clone(), value: value.clone() })
            .collect(),
        by: rollout.by.clone(),
        since_ms: rollout.since_ms,
        pause_ms: rollout.pause_ms,
        phase: phase.into(),
        reason,
        hosts: rollout.hosts().map(host).collect(),
    }
}

fn refused(error: Error) -> Status {
    let text = error.to_string();
    match error {
        Error::Gone { .. } => Status::not_found(text),
        Error::None(_) | Error::Stopped { .. } | Error::OnItsWay { .. } => Status::failed_precondition(text),
        Error::TooManyHosts(_) => Status::resource_exhausted(text),
        Error::State { .. } => Status::internal(text),
    }
}
