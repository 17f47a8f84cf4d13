//! gRPC services and HTTP pages: convert, call, convert back. KV bytes never pass here.

mod conductor;
mod http;
mod node;
mod policy_admin;
mod store;
mod validate;

use crate::host::Host;
use crate::metrics::Metrics;
use kvasir_dataplane::{BATCH_MAX, BlockKey};
use kvasir_proto as proto;
use proto::conductor_server::ConductorServer;
use proto::node_server::NodeServer;
use proto::policy_admin_server::PolicyAdminServer;
use proto::store_server::StoreServer;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::Status;

/// Largest request, but for components. 4,096 keys are 72 KiB, a chain of 2^16 blocks 512 KiB.
const REQUEST_BYTES_MAX: usize = 4 << 20;
/// Room for the rest of a message that carries a component.
const ENVELOPE_BYTES: usize = 1 << 20;
/// Concurrent calls of one connection.
const STREAMS_MAX: u32 = 256;
const KEEPALIVE: Duration = Duration::from_secs(30);

/// Starts the control services of a host on listeners that are bound already; they end when
/// `stopping` turns true.
///
/// # Errors
/// A listener cannot be handed to the runtime.
pub fn spawn(
    runtime: &tokio::runtime::Runtime,
    host: &Arc<Host>,
    grpc: TcpListener,
    http: TcpListener,
    stopping: &watch::Receiver<bool>,
) -> std::io::Result<()> {
    let _context = runtime.enter();
    let grpc = TcpListenerStream::new(tokio::net::TcpListener::from_std(grpc)?);
    let http = tokio::net::TcpListener::from_std(http)?;
    let component = host.config.policy.component_bytes_max.0 as usize + ENVELOPE_BYTES;
    let server = tonic::transport::Server::builder()
        .max_concurrent_streams(STREAMS_MAX)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .tcp_nodelay(true)
        .add_service(
            StoreServer::new(store::Service(Arc::clone(host))).max_decoding_message_size(REQUEST_BYTES_MAX),
        )
        .add_service(
            ConductorServer::new(conductor::ConductorService::new(Arc::clone(host)))
                .max_decoding_message_size(REQUEST_BYTES_MAX),
        )
        .add_service(
            PolicyAdminServer::new(policy_admin::Service(Arc::clone(host)))
                .max_decoding_message_size(component),
        )
        .add_service(
            NodeServer::new(node::Service(Arc::clone(host))).max_decoding_message_size(REQUEST_BYTES_MAX),
        );
    let stopped = stop_signal(stopping);
    runtime.spawn(async move {
        if let Err(error) = server.serve_with_incoming_shutdown(grpc, stopped).await {
            tracing::error!(%error, "the gRPC server ended");
        }
    });
    let pages = axum::serve(http, http::pages(Arc::clone(host), Metrics::new(&host.config.node.name)))
        .with_graceful_shutdown(stop_signal(stopping));
    runtime.spawn(async move {
        if let Err(error) = pages.await {
            tracing::error!(%error, "the HTTP server ended");
        }
    });
    runtime.spawn(crate::conductor::run(
        Arc::clone(&host.conductor),
        Arc::clone(&host.policies),
        host.clock,
        host.config.conductor.balance_every.0,
        stop_signal(stopping),
    ));
    Ok(())
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
