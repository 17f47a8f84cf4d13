use super::validate;
use crate::access::door::About;
use crate::host::Host;
use kvasir_dataplane::cluster::{Cluster, PeerView, RailView};
use kvasir_proto::{self as proto, node_server::Node, ready_response::Component};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tonic::{Request, Response, Status};

pub(super) struct Service(pub(super) Arc<Host>);

#[tonic::async_trait]
impl Node for Service {
    async fn info(
        &self,
        _request: Request<proto::InfoRequest>,
    ) -> Result<Response<proto::InfoResponse>, Status> {
        let host = &self.0;
        Ok(Response::new(proto::InfoResponse {
            node: host.config.node.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: host.clock.now_ms(),
            grpc: host.addrs.grpc.map_or(String::new(), |addr| addr.to_string()),
            http: host.addrs.http.to_string(),
            data: host.addrs.data.map_or(String::new(), |addr| addr.to_string()),
            socket: host.config.node.socket.display().to_string(),
            draining: host.draining.load(Relaxed),
        }))
    }

    async fn drain(
        &self,
        request: Request<proto::DrainRequest>,
    ) -> Result<Response<proto::DrainResponse>, Status> {
        let about = About::of(&request);
        let draining = !request.into_inner().resume;
        about.set(if draining { "drain" } else { "resume" }.to_owned());
        self.0.draining.store(draining, Relaxed);
        tracing::info!(draining, "draining changed");
        Ok(Response::new(proto::DrainResponse { draining }))
    }

    async fn move_clock(
        &self,
        request: Request<proto::MoveClockRequest>,
    ) -> Result<Response<proto::MoveClockResponse>, Status> {
        let to_ms = request.get_ref().to_ms;
        validate::move_clock(request.get_ref())?;
        About::of(&request).set(format!("to {to_ms} ms"));
        let clock = self.0.clock;
        clock.move_to(to_ms).map_err(|fixed| {
            Status::failed_precondition(format!(
                "{fixed}; `kvasir serve --movable-clock`, for measuring alone, starts a host whose clock can"
            ))
        })?;
        Ok(Response::new(proto::MoveClockResponse { now_ms: clock.now_ms() }))
    }

    async fn ready(
        &self,
        _request: Request<proto::ReadyRequest>,
    ) -> Result<Response<proto::ReadyResponse>, Status> {
        let components = components(&self.0);
        let ready = components.iter().all(|c| c.ready);
        Ok(Response::new(proto::ReadyResponse { ready, components }))
    }

    async fn peers(
        &self,
        _request: Request<proto::PeersRequest>,
    ) -> Result<Response<proto::PeersResponse>, Status> {
        let Some(cluster) = self.0.node.cluster() else {
            return Ok(Response::new(proto::PeersResponse::default()));
        };
        let peers = cluster.peers().into_iter().map(peer).collect();
        Ok(Response::new(proto::PeersResponse { own: Some(own(&self.0, cluster)), peers }))
    }
}

fn own(host: &Host, cluster: &Cluster) -> proto::Peer {
    let pressure = host.node.store().pressure();
    proto::Peer {
        name: cluster.config().name.clone(),
        address: cluster.addr().to_string(),
        rack: cluster.config().rack.clone(),
        state: "self".to_owned(),
        free_bytes: pressure.free_bytes,
        pool_bytes: pressure.pool_bytes,
        matrix: cluster.matrix(),
        ..proto::Peer::default()
    }
}

fn peer(view: PeerView) -> proto::Peer {
    proto::Peer {
        name: view.name,
        address: view.address,
        rack: view.rack,
        state: view.state.name().to_owned(),
        reason: view.reason.unwrap_or_default(),
        free_bytes: view.status.free_bytes,
        pool_bytes: view.status.pool_bytes,
        load: view.status.load,
        last_seen_ms: view.last_seen.map(|ago| ago.as_millis() as u64),
        queued: view.queued as u64,
        copied: view.copied,
        read: view.read,
        failed: view.failed,
        lost: view.lost,
        matrix: view.matrix,
        rails: view.rails.into_iter().map(rail).collect(),
    }
}

fn rail(view: RailView) -> proto::Rail {
    proto::Rail {
        transport: view.kind.name().to_owned(),
        state: view.state.name().to_owned(),
        local_nic: view.local_nic,
        remote_nic: view.remote_nic,
        address: view.address,
        bytes: view.bytes,
        failures: view.failures,
    }
}

/// Whether each part of the host can serve, and in what shape it is.
pub(super) fn components(host: &Host) -> Vec<Component> {
    let component = |name: &str, ready, detail| Component { name: name.to_owned(), ready, detail };
    let pressure = host.node.store().pressure();
    let evicting = host.eviction.is_running();
    let placed = host.node.store().pool().placed();
    let free = format!("{} of {} B free, {placed}", pressure.free_bytes, pressure.pool_bytes);
    let store = if evicting { free } else { format!("the eviction thread has ended; {free}") };
    let policies = host.policies.list();
    let serving: Vec<_> = policies.iter().map(|p| format!("{} {} ({})", p.slot, p.name, p.engine)).collect();
    let draining = host.draining.load(Relaxed);
    let instances = host.conductor.counts();
    let rpc = match draining {
        true => "draining".to_owned(),
        false => format!("{} prefill and {} decode instances", instances.prefill, instances.decode),
    };
    vec![
        component("store", evicting, store),
        component("policies", true, serving.join(", ")),
        component("rpc", !draining, rpc),
    ]
}
