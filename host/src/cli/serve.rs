//! `kvasir serve`: one host, until it is told to stop.

use super::ConfigFlags;
use crate::daemon::{Daemon, Running};
use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

/// Run a host until SIGTERM or SIGINT.
#[derive(clap::Args, Debug)]
pub(super) struct ServeArgs {
    #[command(flatten)]
    flags: ConfigFlags,
    /// Print one JSON object with the addresses once the host is ready.
    #[arg(long)]
    json: bool,
}

impl ServeArgs {
    /// # Errors
    /// The host does not start.
    pub(super) fn run(self) -> anyhow::Result<()> {
        super::log_to_stderr();
        // Registered first, so that a signal during the start is not lost.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (mut terminate, mut interrupt) = {
            let _context = runtime.enter();
            let on = |kind| signal(kind).context("signals cannot be handled");
            (on(SignalKind::terminate())?, on(SignalKind::interrupt())?)
        };
        let running = Daemon::start(self.flags.load()?)?;
        self.announce(&running);
        runtime.block_on(async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        });
        tracing::info!("stopping");
        drop(runtime);
        running.shutdown();
        Ok(())
    }

    fn announce(&self, running: &Running) {
        let host = running.host();
        let (node, socket) = (&host.config.node.name, running.socket_path().display());
        let (grpc, http, data) = (running.grpc_addr(), running.http_addr(), running.data_addr());
        if self.json {
            let (grpc, http, data, socket) =
                (grpc.to_string(), http.to_string(), data.to_string(), socket.to_string());
            let cluster = running.host().addrs.cluster.map(|addr| addr.to_string());
            println!(
                "{}",
                serde_json::json!({
                    "node": node, "grpc": grpc, "http": http, "data": data, "socket": socket, "cluster": cluster,
                })
            );
            return;
        }
        println!("kvasir {} serves as {node}", env!("CARGO_PKG_VERSION"));
        println!("  data     {socket} on this machine, {data} over TCP");
        println!("  control  {grpc} (gRPC)");
        if let Some(cluster) = host.addrs.cluster {
            println!("  cluster  {cluster}, {} peers", host.config.cluster.peers.len());
        }
        println!("  metrics  http://{http}/metrics, health http://{http}/readyz?verbose");
    }
}
