//! gRPC services and HTTP pages: convert, call, convert back. KV bytes never pass here.

mod conductor;
mod exchange;
mod explain;
pub(crate) mod following;
mod health;
mod http;
pub(crate) mod load;
mod node;
mod policy_admin;
mod policy_rollouts;
pub(crate) mod ports;
mod store;
mod turns;
mod uploads;
pub mod validate;

use crate::host::Host;
use axum::Router;
use kvasir_dataplane::{BATCH_MAX, BlockKey};
use kvasir_proto as proto;
use kvasir_tls::HostTls;
use ports::Port;
use proto::conductor_server::ConductorServer;
use proto::explain_server::ExplainServer;
use proto::node_server::NodeServer;
use proto::policy_admin_server::PolicyAdminServer;
use proto::policy_rollouts_server::PolicyRolloutsServer;
use proto::store_server::StoreServer;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tonic::Status;
use tonic::service::Routes;

/// Largest request, except those with components. 4,096 keys are 72 KiB, a chain of 2^16 blocks 512 KiB.
const REQUEST_BYTES_MAX: usize = 4 << 20;
/// Room for the rest of a message that carries a component.
const ENVELOPE_BYTES: usize = 1 << 20;
/// Concurrent calls of one connection.
const STREAMS_MAX: u32 = 256;
const KEEPALIVE: Duration = Duration::from_secs(30);

/// The sockets of the control services, which are bound already.
pub struct Listeners {
    pub unix: UnixListener,
    pub grpc: Option<TcpListener>,
    pub http: TcpListener,
    /// For `grpc` and `http`. `None` means that they are not encrypted.
    pub tls: Option<Arc<HostTls>>,
}

/// Starts the control services of a host; they end when `stopping` turns true.
///
/// # Errors
/// A listener cannot be handed to the runtime.
pub fn spawn(
    runtime: &tokio::runtime::Runtime,
    host: &Arc<Host>,
    listeners: Listeners,
    stopping: &watch::Receiver<bool>,
) -> std::io::Result<()> {
    let _context = runtime.enter();
    let uploads = uploads::Uploads::default();
    let guarded = |router: Router| {
        router
            .layer(axum::middleware::from_fn_with_state(uploads.clone(), uploads::few))
            .layer(axum::middleware::from_fn_with_state(host.door.clone(), crate::access::door::guard))
    };
    let pages = http::pages(Arc::clone(host));
    // The pages are on the Unix socket too, for callers that the kernel knows and that have no token.
    let unix = guarded(services(host, stopping).into_axum_router().merge(pages.clone()));
    listeners.unix.set_nonblocking(true)?;
    let socket = Port::Unix(tokio::net::UnixListener::from_std(listeners.unix)?);
    let both = server().accept_http1(true).add_routes(Routes::from(unix));
    serve_port("the control socket", socket, both, stopping);
    let port = |listener: TcpListener| {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        Ok::<_, std::io::Error>(match &listeners.tls {
            None => Port::Tcp(listener),
            Some(tls) => Port::Tls(listener, Arc::clone(tls)),
        })
    };
    if let Some(grpc) = listeners.grpc {
        let calls = guarded(services(host, stopping).into_axum_router());
        serve_port("the gRPC port", port(grpc)?, server().add_routes(Routes::from(calls)), stopping);
    }
    let pages = server().accept_http1(true).add_routes(Routes::from(guarded(pages)));
    serve_port("the HTTP port", port(listeners.http)?, pages, stopping);
    runtime.spawn(crate::conductor::run(
        Arc::clone(&host.conductor),
        Arc::clone(&host.policies),
        host.clock,
        host.config.conductor.balance_every.0,
        stop_signal(stopping),
    ));
    Ok(())
}

/// Serves a port until the host stops.
fn serve_port(
    what: &'static str,
    port: Port,
    served: tonic::transport::server::Router,
    stopping: &watch::Receiver<bool>,
) {
    let served = served.serve_with_incoming_shutdown(ports::incoming(port, stopping), stop_signal(stopping));
    tokio::spawn(async move {
        if let Err(error) = served.await {
            tracing::error!(%error, "{what} ended");
        }
    });
}

fn server() -> tonic::transport::Server {
    tonic::transport::Server::builder()
        .max_concurrent_streams(STREAMS_MAX)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .tcp_nodelay(true)
}

fn services(host: &Arc<Host>, stopping: &watch::Receiver<bool>) -> Routes {
    let component = host.config.policy.component_bytes_max.0 as usize + ENVELOPE_BYTES;
    let store = StoreServer::new(store::Service(Arc::clone(host)));
    let conductor =
        ConductorServer::new(conductor::ConductorService::new(Arc::clone(host), stopping.clone()));
    let policies = PolicyAdminServer::new(policy_admin::Service(Arc::clone(host)));
    let explain = ExplainServer::new(explain::Service::new(Arc::clone(host)));
    let rollouts = PolicyRolloutsServer::new(policy_rollouts::Service(Arc::clone(host)));
    let node = NodeServer::new(node::Service(Arc::clone(host)));
    Routes::new(store.max_decoding_message_size(REQUEST_BYTES_MAX))
        .add_service(conductor.max_decoding_message_size(REQUEST_BYTES_MAX))
        .add_service(policies.max_decoding_message_size(component).max_encoding_message_size(component))
        .add_service(explain.max_decoding_message_size(REQUEST_BYTES_MAX))
        .add_service(rollouts.max_decoding_message_size(component).max_encoding_message_size(component))
        .add_service(node.max_decoding_message_size(REQUEST_BYTES_MAX))
        .add_service(health::Service { host: Arc::clone(host), stopping: stopping.clone() }.server())
        .add_service(described().build_v1().expect(DESCRIBED))
        .add_service(described().build_v1alpha().expect(DESCRIBED))
}

const DESCRIBED: &str = "the descriptors were compiled with this binary";

/// Reflection, for tools that do not know the contract. Most of them still ask by the older of the two names.
fn described() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}

fn stop_signal(stopping: &watch::Receiver<bool>) -> impl Future<Output = ()> + Send + use<> {
    let mut stopping = stopping.clone();
    async move {
        // An error means that the sender is gone, and with it the host.
        let _ = stopping.wait_for(|stop| *stop).await;
    }
}

fn keys_in(keys: &[impl AsRef<[u8]>]) -> Result<Vec<BlockKey>, Status> {
    if keys.len() > BATCH_MAX {
        let text = format!("keys: {} keys; the most in one call is {BATCH_MAX}, send several", keys.len());
        return Err(Status::invalid_argument(text));
    }
    let key = |(i, bytes): (usize, &[u8])| {
        let bytes = <[u8; 16]>::try_from(bytes);
        let wrong = |_| Status::invalid_argument(format!("keys[{i}]: key {i} is not 16 bytes long"));
        bytes.map(|bytes| BlockKey(u128::from_be_bytes(bytes))).map_err(wrong)
    };
    keys.iter().map(AsRef::as_ref).enumerate().map(key).collect()
}

fn key_out(key: BlockKey) -> Vec<u8> {
    key.0.to_be_bytes().into()
}
