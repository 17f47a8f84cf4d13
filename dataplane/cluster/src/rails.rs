//! The rails of this host: the transports that it has, each with its address for peers and the NIC behind it.

use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{ClusterConfig, OpenError};
use kvasir_net::endpoint_pool::{PoolConfig, Pooled};
use kvasir_net::topology::model::Machine;
use kvasir_net::transport::rdma::{self, Rdma, RdmaConfig};
use kvasir_net::transport::shm::{Shm, ShmConfig};
use kvasir_net::transport::tcp::{Tcp, TcpConfig};
use kvasir_net::transport::{Node, Transport};
use kvasir_protocol::clock::Clock;

/// A kind of transport between hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// One-sided, from NIC to NIC. Blocks are not encrypted.
    Rdma,
    /// Between hosts on one machine.
    Shm,
    Tcp,
}

impl Kind {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rdma => "rdma",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Kind {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        [Self::Rdma, Self::Shm, Self::Tcp].into_iter().find(|kind| kind.name() == name).ok_or(())
    }
}

/// Why a kind of transport cannot be used on this machine. Returns `None` if it can, as far as is known without opening it.
pub fn unavailable(kind: Kind) -> Option<String> {
    match kind {
        Kind::Rdma => rdma::device_names().err().map(|error| error.to_string()),
        Kind::Shm | Kind::Tcp => None,
    }
}

/// One rail of this host.
pub(super) struct Rail {
    pub(super) kind: Kind,
    pub(super) transport: Arc<Pooled>,
    /// Its place on this machine: an IP address, or a device.
    at: At,
    stop: Stop,
}

/// Ends the listening part of a transport, and what it has accepted.
type Stop = Box<dyn Fn() + Send + Sync>;

enum At {
    Memory,
    Device(String),
    Ip(IpAddr),
}

impl Rail {
    /// From now on, peers find it down.
    pub(super) fn stop(&self) {
        (self.stop)();
    }

    /// Where peers reach it.
    pub(super) fn address(&self) -> String {
        self.transport.address().unwrap_or_default()
    }

    /// The NIC behind it, by the name that the topology has for it; empty if that is not known.
    pub(super) fn nic(&self, machine: &Machine) -> String {
        match &self.at {
            At::Memory => String::new(),
            At::Device(name) => name.clone(),
            At::Ip(ip) => interface(*ip)
                .and_then(|interface| machine.nic(&interface))
                .map_or_else(String::new, |nic| nic.name.clone()),
        }
    }
}

/// The network interface that has this address.
fn interface(ip: IpAddr) -> Option<String> {
    let found = if_addrs::get_if_addrs().unwrap_or_default();
    found.into_iter().find(|interface| interface.ip() == ip).map(|interface| interface.name)
}

/// Opens the rails that the settings name, or all that the machine has, in the order of preference.
///
/// # Errors
/// A port is taken, or what the settings name is not there.
pub(super) fn open(config: &ClusterConfig, node: &Arc<Node>, clock: Clock) -> Result<Vec<Rail>, OpenError> {
    let kinds = config.transports.clone().unwrap_or_else(|| default_kinds(config));
    let mut rails = Vec::new();
    // What the machine lacks is an error only if the settings name it.
    let found = |kind, opened: Result<Opened, String>| match opened {
        Err(reason) if config.transports.is_some() => Err(OpenError::Unavailable { kind, reason }),
        opened => Ok(opened.unwrap_or_default()),
    };
    for kind in kinds {
        let opened = match kind {
            Kind::Tcp => open_tcp(config, node)?,
            Kind::Shm => found(kind, open_shm(config.socket.as_deref(), node))?,
            Kind::Rdma => found(kind, open_rdma(config, node))?,
        };
        rails.extend(opened.into_iter().map(|(transport, at, stop)| {
            let transport = Arc::new(Pooled::new(transport, PoolConfig::default(), clock));
            Rail { kind, transport, at, stop }
        }));
    }
    Ok(rails)
}

/// What RDMA carries is not encrypted: a host with TLS uses it only if it is named.
fn default_kinds(config: &ClusterConfig) -> Vec<Kind> {
    let rdma = config.tls.is_none().then_some(Kind::Rdma);
    rdma.into_iter().chain([Kind::Shm, Kind::Tcp]).collect()
}

type Opened = Vec<(Arc<dyn Transport>, At, Stop)>;

fn open_tcp(config: &ClusterConfig, node: &Arc<Node>) -> Result<Opened, OpenError> {
    let mut opened: Opened = Vec::new();
    for &addr in &config.transfer {
        // With one address the system may route as it likes.
        let bind = (config.transfer.len() > 1 && !addr.ip().is_unspecified()).then_some(addr.ip());
        let tls = config.tls.as_ref().map(|tls| tls.in_kernel(config.tls_in_kernel));
        let tcp = TcpConfig { listen: Some(addr), bind, tls, ..TcpConfig::default() };
        let tcp = Tcp::new(Arc::clone(node), tcp);
        let tcp = tcp.map_err(|source| OpenError::Listen { what: "transfers", addr, source })?;
        let tcp = Arc::new(tcp);
        let listening = Arc::clone(&tcp);
        opened.push((tcp, At::Ip(addr.ip()), Box::new(move || listening.shut_down())));
    }
    Ok(opened)
}

fn open_shm(socket: Option<&Path>, node: &Arc<Node>) -> Result<Opened, String> {
    let socket = socket.ok_or("it has no socket")?;
    let config = ShmConfig { listen: Some(socket.to_owned()), ..ShmConfig::default() };
    let shm = Shm::new(Arc::clone(node), config);
    let shm =
        Arc::new(shm.map_err(|error| format!("socket {} cannot be opened: {error}", socket.display()))?);
    let listening = Arc::clone(&shm);
    Ok(vec![(shm, At::Memory, Box::new(move || listening.shut_down()))])
}

/// A rail for each device that works; those whose link is down are left out.
fn open_rdma(config: &ClusterConfig, node: &Arc<Node>) -> Result<Opened, String> {
    let names = rdma::device_names().map_err(|error| error.to_string())?;
    let mut opened: Opened = Vec::new();
    let mut last = String::new();
    // The control stream goes over the first address; bytes go by the device.
    let listen = config.transfer.first().map(|addr| (addr.ip(), 0).into());
    for name in names {
        let rdma = RdmaConfig { listen, tls: config.tls.clone(), ..RdmaConfig::of_device(&name) };
        match Rdma::new(Arc::clone(node), rdma) {
            Ok(rdma) => {
                let rdma = Arc::new(rdma);
                let listening = Arc::clone(&rdma);
                opened.push((rdma, At::Device(name), Box::new(move || listening.shut_down())));
            }
            Err(error) => last = format!("device {name}: {error}"),
        }
    }
    if opened.is_empty() { Err(last) } else { Ok(opened) }
}

/// Identifies this machine until it restarts; empty if it does not say. Containers on one machine share it.
pub(super) fn machine() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}
