use super::{key_out, keys_in, validate};
use crate::access::door::About;
use crate::host::Host;
use kvasir_dataplane::cluster::push::{PushError, Pushed};
use kvasir_dataplane::server::access::Identity;
use kvasir_dataplane::tier::dram::{BlockStat, Remove};
use kvasir_dataplane::tier::lifecycle::State;
use kvasir_dataplane::tier::tiering::{LevelStats, Residency};
use kvasir_dataplane::{BATCH_MAX, BlockKey, StoreError};
use kvasir_proto::{self as proto, push_response, remove_response::Outcome, store_server::Store};
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// Blocks in one page unless the caller says otherwise.
const PAGE: usize = 1024;

pub(super) struct Service(pub(super) Arc<Host>);

#[tonic::async_trait]
impl Store for Service {
    async fn exists(
        &self,
        request: Request<proto::ExistsRequest>,
    ) -> Result<Response<proto::ExistsResponse>, Status> {
        let keys = own_keys(&request, &request.get_ref().keys)?;
        let resident = self.0.node.exists(&keys).map_err(status)?;
        Ok(Response::new(proto::ExistsResponse { resident }))
    }

    async fn stat(
        &self,
        request: Request<proto::StatRequest>,
    ) -> Result<Response<proto::StatResponse>, Status> {
        let keys = own_keys(&request, &request.get_ref().keys)?;
        let stats = self.0.node.stat(&keys).map_err(status)?;
        let known = keys.iter().zip(stats);
        let results =
            known.map(|(key, (stat, at))| proto::StatResult { block: block(*key, stat.as_ref(), at) });
        let results = results.collect();
        Ok(Response::new(proto::StatResponse { results }))
    }

    async fn remove(
        &self,
        request: Request<proto::RemoveRequest>,
    ) -> Result<Response<proto::RemoveResponse>, Status> {
        let keys = own_keys(&request, &request.get_ref().keys)?;
        let first = keys.first().map(ToString::to_string).unwrap_or_default();
        About::of(&request).set(format!("{} blocks, the first {first}", keys.len()));
        let removed = self.0.node.remove(&keys).map_err(status)?;
        let outcome = |removed| match removed {
            Remove::Removed => Outcome::Removed,
            Remove::Missing => Outcome::Missing,
            Remove::InProgress | Remove::Unfinished => Outcome::InProgress,
        };
        let outcomes = removed.into_iter().map(|removed| outcome(removed).into()).collect();
        Ok(Response::new(proto::RemoveResponse { outcomes }))
    }

    async fn list(
        &self,
        request: Request<proto::ListRequest>,
    ) -> Result<Response<proto::ListResponse>, Status> {
        let identity = identity(&request)?;
        let &proto::ListRequest { from, max } = request.get_ref();
        let max = if max == 0 { PAGE } else { (max as usize).min(BATCH_MAX) };
        let (blocks, next) = self.0.node.list(from, max).map_err(status)?;
        let seen = blocks.iter().filter(|(stat, _)| identity.may_see(stat.key));
        let blocks = seen.filter_map(|(stat, at)| block(stat.key, Some(stat), *at)).collect();
        Ok(Response::new(proto::ListResponse { blocks, next }))
    }

    async fn usage(
        &self,
        _request: Request<proto::UsageRequest>,
    ) -> Result<Response<proto::UsageResponse>, Status> {
        let m = self.0.node.store().metrics();
        let resident = State::ALL.into_iter().filter(|state| state.is_resident());
        Ok(Response::new(proto::UsageResponse {
            pool_bytes: m.pool_bytes,
            free_bytes: m.free_bytes,
            blocks: resident.map(|state| m.lifecycle.in_state(state)).sum(),
            blocks_max: self.0.config.store.dram.blocks_max.into(),
            leases: m.leases,
            reservations: m.reservations,
            hits: m.hits,
            misses: m.misses,
            stored_blocks: m.lifecycle.steps[State::Storing as usize][State::Active as usize],
            evicted_blocks: m.lifecycle.in_state(State::Evicted),
            evicted_bytes: m.evicted_bytes,
            checksum_failures: m.checksum_failures,
            pool_full: m.pool_full,
            tiers: self.0.node.tiering().stats().levels.iter().map(tier).collect(),
        }))
    }

    async fn push(
        &self,
        request: Request<proto::PushRequest>,
    ) -> Result<Response<proto::PushResponse>, Status> {
        let keys = own_keys(&request, &request.get_ref().keys)?;
        let to = request.into_inner().to;
        validate::name_in("to", &to)?;
        let alone = || Status::failed_precondition("this host knows no others; list them in cluster.peers");
        let node = Arc::clone(&self.0.node);
        // This call takes as long as the transfer.
        let pushed = tokio::task::spawn_blocking(move || node.push(&to, &keys)).await;
        let pushed = pushed.map_err(|error| Status::internal(error.to_string()))?.ok_or_else(alone)?;
        let pushed = pushed.map_err(|error| match error {
            PushError::Failed { .. } => Status::unavailable(error.to_string()),
            PushError::NoPeer { .. } | PushError::TooMany { .. } => {
                Status::invalid_argument(error.to_string())
            }
        })?;
        let outcome = |pushed| match pushed {
            Pushed::Done => push_response::Outcome::Done,
            Pushed::Had => push_response::Outcome::Had,
            Pushed::Missing => push_response::Outcome::Missing,
            Pushed::NoRoom => push_response::Outcome::NoRoom,
            Pushed::Failed => push_response::Outcome::Failed,
        };
        let outcomes = pushed.into_iter().map(|pushed| outcome(pushed).into()).collect();
        Ok(Response::new(proto::PushResponse { outcomes }))
    }

    async fn endpoints(
        &self,
        _request: Request<proto::EndpointsRequest>,
    ) -> Result<Response<proto::EndpointsResponse>, Status> {
        let node = &self.0.config.node;
        Ok(Response::new(proto::EndpointsResponse {
            node: node.name.clone(),
            data: self.0.addrs.data.map_or(String::new(), |addr| addr.to_string()),
            socket: node.socket.display().to_string(),
        }))
    }
}

/// The identity of the caller.
pub(super) fn identity<T>(request: &Request<T>) -> Result<&Identity, Status> {
    let identity = request.extensions().get::<Identity>();
    identity.ok_or_else(|| Status::permission_denied("the door let nobody in"))
}

/// The keys under which this caller's blocks are kept. A caller that acts for a tenant reaches no other tenant's by their keys.
pub(super) fn own_keys<T>(request: &Request<T>, keys: &[impl AsRef<[u8]>]) -> Result<Vec<BlockKey>, Status> {
    let keys = keys_in(keys)?;
    let identity = identity(request)?;
    Ok(keys.into_iter().map(|key| identity.key(key)).collect())
}

fn tier(level: &LevelStats) -> proto::TierUsage {
    let LevelStats { capabilities, store, offload, onboard, .. } = level;
    proto::TierUsage {
        tier: capabilities.tier.name().to_owned(),
        durable: capabilities.durable,
        capacity_bytes: capabilities.capacity_bytes,
        blocks: store.blocks,
        block_bytes: store.block_bytes,
        used_bytes: store.used_bytes,
        offloaded_blocks: offload.stored,
        offload_refused: offload.refused,
        offload_skipped: offload.skipped,
        offload_failed: offload.failed,
        onboarded_blocks: onboard.loaded,
        corrupt: store.corrupt + onboard.corrupt,
        io_errors: store.io_errors,
        evicted_blocks: store.evicted,
    }
}

/// Returns `None` if nobody holds it. Of one that is not in the pool its size and place are known.
pub(super) fn block(key: BlockKey, stat: Option<&BlockStat>, at: Residency) -> Option<proto::Block> {
    let known = proto::Block {
        key: key_out(key),
        size_bytes: at.size?,
        tiers: at.bits().into(),
        ..proto::Block::default()
    };
    let Some(stat) = stat else { return Some(known) };
    Some(proto::Block {
        checksum: stat.checksum,
        depth: stat.depth,
        class: stat.class.into(),
        uses: stat.uses,
        inserted_ms: stat.inserted_ms,
        last_used_ms: stat.used_ms,
        leases: stat.leases,
        ..known
    })
}

pub(super) fn status(error: StoreError) -> Status {
    if error.retryable() {
        Status::unavailable(error.to_string())
    } else {
        Status::invalid_argument(error.to_string())
    }
}
