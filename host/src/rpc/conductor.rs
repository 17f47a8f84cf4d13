use super::exchange::{self, Exchange};
use super::store::identity;
use super::turns::{PLACES_MAX, Turns};
use super::validate;
use crate::conductor::{Error, Registration, Rejected, Report, Scheduled, Scores, Stage};
use crate::fleet::{self, Ask, DecodeCost, DecodeSpec, Needs, PrefillCost, PrefillSpec, TransferCost};
use crate::host::Host;
use crate::prefix_index::Tier;
use crate::traffic::Prompt;
use kvasir_proto::{self as proto, conductor_server::Conductor, rejection::Reason, schedule_response};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tokio::sync::watch;
use tonic::{Request, Response, Status, Streaming};

/// Converts, calls the [`Conductor`](crate::conductor::Conductor), converts back.
#[derive(Clone)]
pub(super) struct ConductorService {
    host: Arc<Host>,
    turns: Arc<Turns>,
    /// Streams end when the host does.
    stopping: watch::Receiver<bool>,
}

impl ConductorService {
    pub(super) fn new(host: Arc<Host>, stopping: watch::Receiver<bool>) -> Self {
        let turns = Arc::new(Turns::new(host.config.conductor.workers as usize, PLACES_MAX));
        Self { host, turns, stopping }
    }

    /// Decides about a request of a caller that may be for one tenant alone.
    pub(super) async fn decide(
        &self,
        only_tenant: Option<u16>,
        mut request: proto::ScheduleRequest,
    ) -> Result<proto::ScheduleResponse, Status> {
        if self.host.draining.load(Relaxed) {
            return Err(Status::unavailable("this host is draining; ask another"));
        }
        request.tenant = tenant(only_tenant, request.tenant)?;
        validate::schedule(&request, self.host.config.conductor.block_size_tokens)?;
        let needs = self.host.conductor.needs(&request.model, &request.adapter);
        let ask = ask(&request, needs);
        let Some(_turn) = self.turns.take().await else {
            self.host.conductor.turn_away();
            return Err(Status::resource_exhausted(format!(
                "{PLACES_MAX} requests wait for a decision here already; ask another host, or raise conductor.workers"
            )));
        };
        let now_ms = self.host.clock.now_ms();
        let decide = || self.host.conductor.schedule(&ask, &request.blocks, request.explain, now_ms);
        // Explaining is not for the request path and may take as long as a cold call.
        let scheduled = if request.explain { tokio::task::block_in_place(decide) } else { decide() };
        let scheduled = scheduled.map_err(status)?;
        if let Some(traffic) = &self.host.traffic {
            traffic.asked(&prompt(scheduled.request_id, &request), now_ms);
        }
        Ok(response(scheduled))
    }

    /// Notes the stage that a request reached.
    pub(super) fn reached(
        &self,
        request: &proto::CompleteRequest,
    ) -> Result<proto::CompleteResponse, Status> {
        use proto::complete_request::Stage as Wire;
        validate::complete(request)?;
        let stage = match request.stage() {
            Wire::Transfer => Stage::Transfer,
            Wire::Prefill => Stage::Prefill { took_ms: request.prefill_ms },
            Wire::Progress => Stage::Progress(request.tokens),
            Wire::Finished => Stage::Finished,
            Wire::Unspecified => return Err(Status::invalid_argument("no known stage was given")),
        };
        let now_ms = self.host.clock.now_ms();
        self.host.conductor.complete(request.request_id, stage, now_ms).map_err(status)?;
        match (&self.host.traffic, stage) {
            (Some(traffic), Stage::Progress(tokens)) => traffic.decoded(request.request_id, tokens),
            (Some(traffic), Stage::Finished) => traffic.ended(request.request_id),
            _ => {}
        }
        Ok(proto::CompleteResponse {})
    }
}

#[tonic::async_trait]
impl Conductor for ConductorService {
    async fn register(
        &self,
        request: Request<proto::RegisterRequest>,
    ) -> Result<Response<proto::RegisterResponse>, Status> {
        let request = request.into_inner();
        validate::register(&request)?;
        let given = registration(&request);
        let epoch =
            self.host.conductor.register(&request.name, given, self.host.clock.now_ms()).map_err(status)?;
        tracing::info!(instance = request.name, epoch, "instance registered");
        Ok(Response::new(proto::RegisterResponse { epoch }))
    }

    async fn unregister(
        &self,
        request: Request<proto::UnregisterRequest>,
    ) -> Result<Response<proto::UnregisterResponse>, Status> {
        let proto::UnregisterRequest { name, epoch } = request.into_inner();
        validate::instance_name(&name)?;
        self.host.conductor.unregister(&name, epoch).map_err(status)?;
        Ok(Response::new(proto::UnregisterResponse {}))
    }

    async fn report_load(
        &self,
        request: Request<proto::ReportLoadRequest>,
    ) -> Result<Response<proto::ReportLoadResponse>, Status> {
        let request = request.into_inner();
        validate::report(&request)?;
        let proto::ReportLoadRequest { name, epoch, free_blocks, draining, waiting, adapters } = request;
        let now_ms = self.host.clock.now_ms();
        let adapters = adapters.map(|loaded| loaded.names);
        let report = Report { free_blocks, draining, waiting, adapters };
        self.host.conductor.report(&name, epoch, &report, now_ms).map_err(status)?;
        Ok(Response::new(proto::ReportLoadResponse {}))
    }

    type ExchangeStream = Exchange;

    async fn schedule(
        &self,
        request: Request<proto::ScheduleRequest>,
    ) -> Result<Response<proto::ScheduleResponse>, Status> {
        let only_tenant = identity(&request)?.only_tenant();
        self.decide(only_tenant, request.into_inner()).await.map(Response::new)
    }

    async fn complete(
        &self,
        request: Request<proto::CompleteRequest>,
    ) -> Result<Response<proto::CompleteResponse>, Status> {
        self.reached(&request.into_inner()).map(Response::new)
    }

    async fn exchange(
        &self,
        request: Request<Streaming<proto::ExchangeRequest>>,
    ) -> Result<Response<Exchange>, Status> {
        let only_tenant = identity(&request)?.only_tenant();
        let calls = exchange::until_its_end(request.into_inner(), &self.stopping);
        Ok(Response::new(exchange::answers(self.clone(), only_tenant, calls)))
    }

    async fn lookup_prefix(
        &self,
        request: Request<proto::LookupPrefixRequest>,
    ) -> Result<Response<proto::LookupPrefixResponse>, Status> {
        use proto::lookup_prefix_response::Match;
        let chain = request.into_inner().blocks;
        validate::chain(&chain)?;
        let found = self.host.conductor.lookup(&chain);
        let matches = found.into_iter().map(|(name, blocks)| Match { name, blocks }).collect();
        Ok(Response::new(proto::LookupPrefixResponse { matches }))
    }

    async fn blocks_stored(
        &self,
        request: Request<proto::BlocksStoredRequest>,
    ) -> Result<Response<proto::BlocksStoredResponse>, Status> {
        let proto::BlocksStoredRequest { name, epoch, sequence, parent, blocks, tier } = request.into_inner();
        validate::blocks_message(&name, sequence, &blocks)?;
        let tier = block_tier(tier)?;
        let parent = (parent != 0).then_some(parent);
        self.host.conductor.stored(&name, epoch, sequence, tier, parent, &blocks).map_err(status)?;
        Ok(Response::new(proto::BlocksStoredResponse {}))
    }

    async fn blocks_removed(
        &self,
        request: Request<proto::BlocksRemovedRequest>,
    ) -> Result<Response<proto::BlocksRemovedResponse>, Status> {
        let proto::BlocksRemovedRequest { name, epoch, sequence, blocks, tier } = request.into_inner();
        validate::blocks_message(&name, sequence, &blocks)?;
        let tier = block_tier(tier)?;
        self.host.conductor.removed(&name, epoch, sequence, tier, &blocks).map_err(status)?;
        Ok(Response::new(proto::BlocksRemovedResponse {}))
    }

    async fn reset_blocks(
        &self,
        request: Request<proto::ResetBlocksRequest>,
    ) -> Result<Response<proto::ResetBlocksResponse>, Status> {
        let proto::ResetBlocksRequest { name, epoch } = request.into_inner();
        validate::instance_name(&name)?;
        self.host.conductor.reset_blocks(&name, epoch).map_err(status)?;
        Ok(Response::new(proto::ResetBlocksResponse {}))
    }
}

/// `None` means that the instance does not say where its blocks lie.
fn block_tier(tier: i32) -> Result<Option<Tier>, Status> {
    use proto::BlockTier as Wire;
    let known = Wire::try_from(tier)
        .map_err(|_| validate::refuse("tier", format_args!("{tier} is no tier that is known here")))?;
    Ok(match known {
        Wire::Unspecified => None,
        Wire::Hbm => Some(Tier::Hbm),
        Wire::Dram => Some(Tier::Dram),
        Wire::Nvme => Some(Tier::Nvme),
        Wire::Remote => Some(Tier::Remote),
    })
}

/// Costs of an instance that names none: the order of a 70B model on one 8-GPU node.
fn default_cost() -> proto::CostModel {
    proto::CostModel {
        prefill_fixed_ms: 5.0,
        prefill_per_token_ms: 0.1,
        prefill_per_pair_ms: 1e-6,
        transfer_fixed_ms: 1.0,
        transfer_per_block_ms: 8.0,
        step_fixed_ms: 15.0,
        step_per_sequence_ms: 0.1,
        step_per_token_ms: 1e-4,
        handover_fixed_ms: None,
        handover_per_block_ms: None,
    }
}

fn registration(request: &proto::RegisterRequest) -> Registration {
    let cost = request.cost.unwrap_or_else(default_cost);
    let capacity_blocks = request.capacity_blocks;
    let prefill = PrefillSpec {
        cost: PrefillCost {
            fixed_ms: cost.prefill_fixed_ms as f32,
            ms_per_token: cost.prefill_per_token_ms as f32,
            ms_per_pair: cost.prefill_per_pair_ms as f32,
        },
        transfer: TransferCost {
            fixed_ms: cost.transfer_fixed_ms as f32,
            ms_per_block: cost.transfer_per_block_ms as f32,
        },
        capacity_blocks,
    };
    let decode = DecodeSpec {
        cost: DecodeCost {
            fixed_ms: cost.step_fixed_ms as f32,
            ms_per_sequence: cost.step_per_sequence_ms as f32,
            ms_per_context_token: cost.step_per_token_ms as f32,
        },
        handover: TransferCost {
            fixed_ms: cost.handover_fixed_ms.unwrap_or(cost.transfer_fixed_ms) as f32,
            ms_per_block: cost.handover_per_block_ms.unwrap_or(cost.transfer_per_block_ms) as f32,
        },
        capacity_blocks,
    };
    Registration {
        prefill: request.prefill.then_some(prefill),
        decode: request.decode.then_some(decode),
        host: request.host.clone(),
        domain: request.domain.clone(),
        models: request.models.clone(),
        adapters: request.adapters.clone(),
        adapters_max: (request.adapters_max > 0).then_some(request.adapters_max),
    }
}

/// Whose request it is: a caller that is for one tenant alone names no other.
fn tenant(only: Option<u16>, named: u32) -> Result<u32, Status> {
    match only.map(u32::from) {
        Some(own) if named != 0 && named != own => Err(Status::permission_denied(format!(
            "tenant: the caller is for tenant {own} alone, not for tenant {named}; leave it out, or use a token that is made \
             without --tenant"
        ))),
        own => Ok(own.unwrap_or(named)),
    }
}

fn ask(request: &proto::ScheduleRequest, needs: Needs) -> Ask {
    let slo = |ms: f64| if ms > 0.0 { ms as f32 } else { f32::INFINITY };
    Ask {
        prompt_tokens: request.prompt_tokens,
        output_tokens: request.output_tokens,
        class: request.class,
        tenant: request.tenant,
        priority: request.priority,
        session: request.session,
        seed: crate::seed::random(),
        ttft_slo_ms: slo(request.ttft_slo_ms),
        tbt_slo_ms: slo(request.tbt_slo_ms),
        must_run: request.must_run,
        needs,
    }
}

/// What is recorded of a request. Tenants of the data plane are numbers of 16 bits; larger ones count as the last.
fn prompt(id: u64, request: &proto::ScheduleRequest) -> Prompt<'_> {
    let short = |number: u32| u16::try_from(number).unwrap_or(u16::MAX);
    Prompt {
        id,
        tokens: request.prompt_tokens,
        output_tokens: request.output_tokens,
        blocks: &request.blocks,
        class: short(request.class),
        tenant: short(request.tenant),
        session: request.session,
    }
}

fn response(scheduled: Scheduled) -> proto::ScheduleResponse {
    use schedule_response::Decision;
    let decision = match scheduled.result {
        Ok(placed) => {
            let (transfer_from, transfer_blocks) = placed.transfer.unwrap_or_default();
            Decision::Placement(proto::Placement {
                prefill: placed.prefill,
                decode: placed.decode,
                prefix_blocks: placed.prefix_blocks,
                transfer_from,
                transfer_blocks,
                ttft_ms: placed.admission.ttft_ms,
                tbt_ms: placed.admission.tbt_ms,
                handover_ms: placed.admission.handover_ms,
            })
        }
        Err(rejected) => Decision::Rejection(proto::Rejection {
            reason: reason(&rejected).into(),
            retry_after_ms: rejected.retry_after_ms,
        }),
    };
    let Scores { prefill, decode } = scheduled.scores;
    let of_prefill =
        prefill.into_iter().map(|(prefill, score)| proto::Score { prefill, score, ..Default::default() });
    let of_decode =
        decode.into_iter().map(|(decode, score)| proto::Score { decode, score, ..Default::default() });
    proto::ScheduleResponse {
        request_id: scheduled.request_id,
        decision_id: scheduled.decision_id,
        decision: Some(decision),
        policy: scheduled.policy,
        generation: scheduled.generation,
        fallback: scheduled.fallback.unwrap_or_default(),
        scores: of_prefill.chain(of_decode).collect(),
    }
}

fn reason(rejected: &Rejected) -> Reason {
    if rejected.refused.is_some() {
        return Reason::Admission;
    }
    match rejected.reason {
        1 => Reason::Ttft,
        2 => Reason::Tbt,
        3 => Reason::NoInstance,
        4 => Reason::NoMemory,
        _ => Reason::Policy,
    }
}

fn status(error: Error) -> Status {
    let text = error.to_string();
    match error {
        Error::UnknownInstance { .. } | Error::Fleet(fleet::Error::NoRequest { .. }) => {
            Status::not_found(text)
        }
        Error::Epoch { .. } | Error::Gap { .. } => Status::failed_precondition(text),
        Error::TooManyNames { .. }
        | Error::Fleet(fleet::Error::TableFull { .. } | fleet::Error::TooManyRequests { .. }) => {
            Status::resource_exhausted(text)
        }
        Error::Name { .. } | Error::NoRole { .. } | Error::Fleet(_) => Status::invalid_argument(text),
    }
}
