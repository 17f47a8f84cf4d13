//! `kvasir node`: this host and the others it knows.

use super::HostFlags;
use clap::{Args, Subcommand};
use comfy_table::Table;
use kvasir_proto as proto;
use serde_json::{Value, json};

/// Hosts of the cluster.
#[derive(Args, Debug)]
pub(super) struct NodeArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    List(ListArgs),
}

/// List the host and its peers, as it sees them.
#[derive(Args, Debug)]
struct ListArgs {
    #[command(flatten)]
    host: HostFlags,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl NodeArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::List(args) => args.run(),
        }
    }
}

impl ListArgs {
    fn run(self) -> anyhow::Result<()> {
        let found = self.host.control(async |mut control| {
            Ok(control.node.peers(proto::PeersRequest {}).await?.into_inner())
        })?;
        let all: Vec<proto::Peer> = found.own.into_iter().chain(found.peers).collect();
        if self.json {
            let rows: Vec<Value> = all.iter().map(json).collect();
            println!("{}", json!({ "nodes": rows }));
        } else {
            println!("{}", table(&all));
        }
        Ok(())
    }
}

pub(super) fn json(peer: &proto::Peer) -> Value {
    let matrix: Value = serde_json::from_str(&peer.matrix).unwrap_or(Value::Null);
    json!({
        "name": peer.name, "address": peer.address, "rack": peer.rack, "state": peer.state, "reason": peer.reason,
        "free_bytes": peer.free_bytes, "pool_bytes": peer.pool_bytes, "load": peer.load,
        "last_seen_ms": peer.last_seen_ms, "queued_copies": peer.queued, "copied_blocks": peer.copied,
        "read_blocks": peer.read, "failed_calls": peer.failed, "lost": peer.lost, "topology": matrix,
        "rails": peer.rails.iter().map(rail_json).collect::<Vec<_>>(),
    })
}

fn rail_json(rail: &proto::Rail) -> Value {
    json!({
        "transport": rail.transport, "state": rail.state, "local_nic": rail.local_nic, "remote_nic": rail.remote_nic,
        "address": rail.address, "bytes": rail.bytes, "failures": rail.failures,
    })
}

/// `tcp mlx5_0>mlx5_0 in use, 123 B`; a line for each.
fn rails(peer: &proto::Peer) -> String {
    let name = |nic: &str| if nic.is_empty() { "?" } else { nic }.to_owned();
    let line = |rail: &proto::Rail| {
        let nics = match (rail.local_nic.as_str(), rail.remote_nic.as_str()) {
            ("", "") => String::new(),
            (local, remote) => format!(" {}>{}", name(local), name(remote)),
        };
        format!("{}{nics} {}, {} B", rail.transport, rail.state, rail.bytes)
    };
    peer.rails.iter().map(line).collect::<Vec<_>>().join("\n")
}

pub(super) fn table(peers: &[proto::Peer]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header([
        "name",
        "address",
        "rack",
        "state",
        "free B",
        "pool B",
        "last seen",
        "rails",
        "reason",
    ]);
    for peer in peers {
        let seen = match (peer.state.as_str(), peer.last_seen_ms) {
            ("self", _) => "-".to_owned(),
            (_, Some(ms)) => format!("{ms} ms ago"),
            (_, None) => "never".to_owned(),
        };
        let (free, pool) = (peer.free_bytes.to_string(), peer.pool_bytes.to_string());
        table.add_row([
            &peer.name,
            &peer.address,
            &peer.rack,
            &peer.state,
            &free,
            &pool,
            &seen,
            &rails(peer),
            &peer.reason,
        ]);
    }
    table
}
