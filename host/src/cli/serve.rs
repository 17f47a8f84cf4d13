//! `kvasir serve`: one host, until it is told to stop.

use super::ConfigFlags;
use crate::config::Config;
use crate::daemon::{Daemon, Running};
use anyhow::{Context, bail};
use kvasir_dataplane::Clock;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use tokio::signal::unix::{SignalKind, signal};

/// Run a host until SIGTERM or SIGINT.
#[derive(clap::Args, Debug)]
pub(super) struct ServeArgs {
    #[command(flatten)]
    flags: ConfigFlags,
    /// Record the requests that are scheduled, as a trace for `kvasir replay`: the same as --set record.file=FILE.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Let operators move the host's clock forward, as `kvasir replay --mode store --trace-time` does. For measuring alone: leases, pins,
    /// lifetimes and instances end by that clock, so that others who read meanwhile may read what is no longer theirs.
    #[arg(long)]
    movable_clock: bool,
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
        let mut config = self.flags.load()?;
        if let Some(file) = &self.record {
            config.record.file.clone_from(file);
        }
        let clock = self.clock(&config)?;
        let running = Daemon::start_by(config, clock)?;
        // A host serves on, whether anybody reads this or not.
        let _ = self.announce(&running);
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

    /// # Errors
    /// It could be moved, and other hosts rely on it.
    fn clock(&self, config: &Config) -> anyhow::Result<Clock> {
        match (self.movable_clock, config.cluster.is_on()) {
            (false, _) => Ok(Clock::start()),
            (true, false) => Ok(Clock::movable()),
            (true, true) => {
                bail!(
                    "--movable-clock is not for a host of a cluster; leave out cluster.secret_file, or the flag"
                )
            }
        }
    }

    /// # Errors
    /// Nobody reads it.
    fn announce(&self, running: &Running) -> io::Result<()> {
        let host = running.host();
        let (node, addrs) = (&host.config.node.name, &host.addrs);
        let (socket, control) = (running.socket_path().display(), running.control_path().display());
        let text = |addr: Option<SocketAddr>| addr.map(|addr| addr.to_string());
        if self.json {
            let addrs = serde_json::json!({
                "node": node, "grpc": text(addrs.grpc), "http": addrs.http.to_string(), "data": text(addrs.data),
                "socket": socket.to_string(), "control": control.to_string(), "cluster": text(addrs.cluster),
            });
            return writeln!(io::stdout(), "{addrs}");
        }
        let over_tcp =
            |addr| text(addr).map_or(String::new(), |addr| format!(", {addr} over TCP with a token"));
        let mut out = io::stdout().lock();
        writeln!(out, "kvasir {} serves as {node}", env!("CARGO_PKG_VERSION"))?;
        writeln!(out, "  data     {socket}{}", over_tcp(addrs.data))?;
        writeln!(out, "  control  {control}{}", over_tcp(addrs.grpc))?;
        if let Some(cluster) = host.addrs.cluster {
            writeln!(out, "  cluster  {cluster}, {} peers", host.config.cluster.peers.len())?;
        }
        writeln!(out, "  metrics  curl --unix-socket {control} http://kvasir/metrics")?;
        writeln!(out, "  health   http://{}/readyz?verbose", addrs.http)
    }
}
