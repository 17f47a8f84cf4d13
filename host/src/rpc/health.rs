//! The standard health service of gRPC, `grpc.health.v1`: what `/readyz` says, for clients that ask in this way.

use super::node::components;
use crate::host::Host;
use kvasir_proto as proto;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::interval;
use tokio_stream::wrappers::IntervalStream;
use tokio_stream::{Stream, StreamExt};
use tonic::server::NamedService;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

/// How often the host is looked at for a watcher.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The services whose health can be asked for. The empty name is the host; no service is ready without the others.
const SERVICES: [&str; 6] = [
    "",
    <proto::store_server::StoreServer<()> as NamedService>::NAME,
    <proto::conductor_server::ConductorServer<()> as NamedService>::NAME,
    <proto::policy_admin_server::PolicyAdminServer<()> as NamedService>::NAME,
    <proto::policy_rollouts_server::PolicyRolloutsServer<()> as NamedService>::NAME,
    <proto::node_server::NodeServer<()> as NamedService>::NAME,
];

pub(super) struct Service {
    pub(super) host: Arc<Host>,
    /// Watches end when the host does.
    pub(super) stopping: watch::Receiver<bool>,
}

impl Service {
    pub(super) fn server(self) -> HealthServer<Self> {
        HealthServer::new(self)
    }
}

#[tonic::async_trait]
impl Health for Service {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        if !SERVICES.contains(&service.as_str()) {
            let known = SERVICES[1..].join(", ");
            return Err(Status::not_found(format!("{service:?} is no service of this host; it has {known}")));
        }
        Ok(Response::new(answer(status(&self.host, &service))))
    }

    /// Tells the state now, and then each change of it.
    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let service = request.into_inner().service;
        let (host, stopping) = (Arc::clone(&self.host), self.stopping.clone());
        let mut told = None;
        let looks = IntervalStream::new(interval(LOOK_EVERY)).take_while(move |_| !*stopping.borrow());
        let news = looks.filter_map(move |_| {
            let now = status(&host, &service);
            (told.replace(now) != Some(now)).then(|| Ok(answer(now)))
        });
        Ok(Response::new(Box::pin(news)))
    }
}

fn status(host: &Host, service: &str) -> ServingStatus {
    if !SERVICES.contains(&service) {
        return ServingStatus::ServiceUnknown;
    }
    let ready = components(host).iter().all(|component| component.ready);
    if ready { ServingStatus::Serving } else { ServingStatus::NotServing }
}

fn answer(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}
