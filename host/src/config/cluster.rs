//! Settings of a host that belongs to a cluster.

use super::{Error, Size, Span, TieringConfig, invalid, positive, valid_name};
use kvasir_dataplane::DramConfig;
use kvasir_dataplane::cluster::Kind;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;

/// Other hosts, which keep copies for this one and from which it reads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cluster {
    /// Hosts of a cluster with another name are refused.
    pub name: String,
    /// Failure domain of this host, such as its rack; copies go to different domains first. Empty counts as a domain,
    /// too.
    pub rack: String,
    /// File with the secret that all hosts of the cluster share: 16 bytes or more, readable by this user alone. If
    /// empty, this host knows no others.
    pub secret_file: PathBuf,
    /// Certificates: with them, everything between hosts is encrypted, and addresses beyond loopback are allowed.
    pub tls: ClusterTls,
    /// Address at which the other hosts reach this one.
    pub listen: SocketAddr,
    /// Addresses at which they read its pool over TCP: one, or a list with one for each NIC, which makes as many rails.
    /// Port 0 takes any free port; the other hosts are told which.
    pub transfer: Addresses,
    /// How they read it, most preferred first: `rdma`, `shm` (hosts on one machine, where it goes before all others),
    /// `tcp`. Empty means what this machine has, but `rdma` only without TLS, because it is not encrypted.
    pub transports: Vec<Kind>,
    /// How often the machine's NICs are checked again.
    pub topology_every: Span,
    /// The most replicated blocks known, of all hosts together. About 80 B each.
    pub blocks_max: u32,
    /// How long a read may spend on one holder after another. Less than `tiering.load_timeout`.
    pub read_timeout: Span,
    /// How often all copies are checked: missing, gone or too many.
    pub audit_every: Span,
    /// How long the copies of a host that was lost count before they are made again elsewhere. A restart or a blip then
    /// costs no copies. 0 means at once.
    pub repair_after: Span,
    /// The other hosts, one `[[cluster.peers]]` each.
    pub peers: Vec<Peer>,
}

/// Addresses, written as a list, or as text if there is only one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "OneOrMore", into = "OneOrMore")]
pub struct Addresses(pub Vec<SocketAddr>);

#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "an address such as \"127.0.0.1:0\", or a list of some")]
enum OneOrMore {
    One(SocketAddr),
    More(Vec<SocketAddr>),
}

impl From<OneOrMore> for Addresses {
    fn from(read: OneOrMore) -> Self {
        match read {
            OneOrMore::One(addr) => Self(vec![addr]),
            OneOrMore::More(list) => Self(list),
        }
    }
}

impl From<Addresses> for OneOrMore {
    fn from(Addresses(list): Addresses) -> Self {
        if let [addr] = list[..] { Self::One(addr) } else { Self::More(list) }
    }
}

/// Files in PEM: all three, or none. Either all hosts of a cluster have them, or none has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClusterTls {
    /// This host's certificate, for use by clients and servers, and the chain that links it to the authority. It has
    /// `node.name` as a DNS name (subject alternative name).
    pub cert: PathBuf,
    /// The key of that certificate, readable by this user alone.
    pub key: PathBuf,
    /// Certificates of the authorities whose hosts are accepted.
    pub ca: PathBuf,
    /// Whether the kernel encrypts what TCP carries of blocks, where it can (the module `tls`). Hosts need not agree.
    pub kernel: bool,
}

impl Default for ClusterTls {
    fn default() -> Self {
        let none = PathBuf::new;
        Self { cert: none(), key: none(), ca: none(), kernel: true }
    }
}

impl ClusterTls {
    /// Whether any of it is set.
    pub fn is_on(&self) -> bool {
        [&self.cert, &self.key, &self.ca].iter().any(|path| !path.as_os_str().is_empty())
    }

    fn validate(&self) -> Result<(), Error> {
        let Self { cert, key, ca, .. } = self;
        let all = [("cluster.tls.cert", cert), ("cluster.tls.key", key), ("cluster.tls.ca", ca)];
        let missing = all.iter().find(|(_, path)| path.as_os_str().is_empty());
        match missing.filter(|_| self.is_on()) {
            Some((name, _)) => Err(invalid(name, "\"\"", "is needed: cert, key and ca go together")),
            None => Ok(()),
        }
    }
}

/// Another host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    /// Its `node.name`.
    pub name: String,
    /// Its `cluster.listen`, as `host:port`.
    pub address: String,
    /// Its `cluster.rack`.
    #[serde(default)]
    pub rack: String,
}

impl Default for Cluster {
    fn default() -> Self {
        let loopback = |port| SocketAddr::from(([127, 0, 0, 1], port));
        Self {
            name: "kvasir".to_owned(),
            rack: String::new(),
            secret_file: PathBuf::new(),
            tls: ClusterTls::default(),
            listen: loopback(7423),
            transfer: Addresses(vec![loopback(0)]),
            transports: Vec::new(),
            topology_every: Span::secs(5),
            blocks_max: 1 << 20,
            read_timeout: Span::ms(1500),
            audit_every: Span::secs(5),
            repair_after: Span::secs(30),
            peers: Vec::new(),
        }
    }
}

impl Cluster {
    /// Whether this host knows others, or is open to them.
    pub fn is_on(&self) -> bool {
        !self.secret_file.as_os_str().is_empty()
    }

    pub(super) fn validate(
        &self,
        node: &str,
        allow_remote: bool,
        store: &DramConfig,
        tiering: &TieringConfig,
    ) -> Result<(), Error> {
        self.validate_peers(node)?;
        self.tls.validate()?;
        if !self.is_on() {
            return Ok(());
        }
        let Self {
            name,
            rack: _,
            secret_file: _,
            tls,
            listen,
            transfer,
            transports,
            topology_every,
            blocks_max,
            read_timeout,
            audit_every,
            repair_after: _,
            peers: _,
        } = self;
        if !valid_name(name) {
            return Err(invalid("cluster.name", name, "must be 1 to 64 of A-Z a-z 0-9 . _ -"));
        }
        let transfer = transfer.0.iter().map(|addr| ("cluster.transfer", addr));
        let all: Vec<_> = [("cluster.listen", listen)].into_iter().chain(transfer).collect();
        for (n, &(key, addr)) in all.iter().enumerate() {
            if !addr.ip().is_loopback() && !allow_remote && !tls.is_on() {
                let why = "is not loopback; set [cluster.tls] or, if the network is trusted, listen.allow_remote = true";
                return Err(invalid(key, addr, why));
            }
            let taken = all[..n].iter().find(|(_, other)| *other == addr && addr.port() != 0);
            if let Some((other, _)) = taken {
                return Err(invalid(key, addr, &format!("is taken by {other}; use another port")));
            }
        }
        if all.len() == 1 {
            return Err(invalid("cluster.transfer", "[]", "must be an address, or a list of some"));
        }
        if let Some(kind) = transports.iter().enumerate().find(|(n, kind)| transports[..*n].contains(kind)) {
            return Err(invalid("cluster.transports", kind.1, "is listed twice"));
        }
        if *blocks_max == 0 {
            return Err(invalid("cluster.blocks_max", 0, "must be at least 1"));
        }
        positive(&[
            ("cluster.read_timeout", read_timeout.0),
            ("cluster.audit_every", audit_every.0),
            ("cluster.topology_every", topology_every.0),
        ])?;
        if read_timeout.0 >= tiering.load_timeout {
            let why = format!("must be less than tiering.load_timeout ({})", Span(tiering.load_timeout));
            return Err(invalid("cluster.read_timeout", read_timeout, &why));
        }
        // A copy is given up after half of it, and the place must not be taken back before that.
        let reservation_ttl = Span(store.reservation_ttl);
        if reservation_ttl < Span::secs(5) {
            let why = "must be at least 5s on a host that takes copies";
            return Err(invalid("store.reservation_ttl", reservation_ttl, why));
        }
        let (pool, least) = (Size(store.pool_bytes), Size::mib(1));
        if pool < least {
            let why = format!("must be at least {least} on a host that takes copies");
            return Err(invalid("store.pool_bytes", pool, &why));
        }
        Ok(())
    }

    fn validate_peers(&self, node: &str) -> Result<(), Error> {
        if !self.peers.is_empty() && !self.is_on() {
            let why = "is needed with cluster.peers; name a file with the secret that all of them share";
            return Err(invalid("cluster.secret_file", "\"\"", why));
        }
        let most = kvasir_dataplane::cluster::table::NODES_MAX - 1;
        if self.peers.len() > most {
            let why = format!("are too many peers; the most is {most}");
            return Err(invalid("cluster.peers", self.peers.len(), &why));
        }
        for (n, peer) in self.peers.iter().enumerate() {
            if !valid_name(&peer.name) {
                let why = "must be 1 to 64 of A-Z a-z 0-9 . _ -";
                return Err(invalid("cluster.peers.name", &peer.name, why));
            }
            if peer.name == node {
                let why = "is this host itself (node.name); list the others only";
                return Err(invalid("cluster.peers.name", &peer.name, why));
            }
            if self.peers[..n].iter().any(|other| other.name == peer.name) {
                return Err(invalid("cluster.peers.name", &peer.name, "is listed twice"));
            }
            let port = peer.address.rsplit_once(':').and_then(|(host, port)| {
                port.parse::<u16>().ok().filter(|&port| port > 0 && !host.is_empty())
            });
            if port.is_none() {
                let why = format!("of peer {} is no address; write host:port", peer.name);
                return Err(invalid("cluster.peers.address", &peer.address, &why));
            }
        }
        Ok(())
    }
}
