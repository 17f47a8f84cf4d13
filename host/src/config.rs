//! Settings of a host: a TOML file, overridden by the environment, overridden by `--set`.
//!
//! Every key has a default, so no file is needed. A value is checked in the layer it comes from, so
//! that an error names the file, the variable or the flag to change. Empty text stands for "none".

mod access;
mod cluster;
mod door;
mod layers;
pub(crate) mod parts;
mod tiers;

pub use access::{Access, Allow, Namespace};
pub use cluster::{Addresses, Cluster, ClusterTls, Peer};
pub use door::Door;
pub use kvasir_dataplane::units::{Size, Span};
pub use layers::{Error, Layer};
pub use tiers::{Nvme, Offload, Remote, RemoteUrl, Sync, TenantKey, Tiering};

use kvasir_tls::HostFiles;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

/// All settings. Unknown keys are errors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub node: Node,
    pub listen: Listen,
    pub access: Access,
    pub store: Store,
    pub tiering: Tiering,
    pub nvme: Nvme,
    pub remote: Remote,
    pub cluster: Cluster,
    pub conductor: Conductor,
    pub policy: Policy,
    /// Which NICs serve which memory, if an operator knows better than the probe.
    pub topology: kvasir_dataplane::topology::matrix::Overrides,
}

/// The identity of this host, and where it keeps what must survive a restart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Node {
    /// Name in the cluster and in metrics: 1 to 64 of `A-Z a-z 0-9 . _ -`. Default: the machine's name.
    pub name: String,
    /// Folder of policies and their assignments; one host at a time. Default: `$XDG_STATE_HOME/kvasir`,
    /// else `~/.local/state/kvasir`, else `$XDG_RUNTIME_DIR/kvasir`. Made for this user alone; refused if another
    /// user owns it or may write to it.
    pub data_dir: PathBuf,
    /// Unix socket for engines on this machine. Default: `kvasir.sock` in `data_dir`.
    pub socket: PathBuf,
    /// Unix socket for control: gRPC, and the pages of `listen.http`. Default: `control.sock` in `data_dir`.
    pub control: PathBuf,
}

/// Where to listen on TCP. Programs on this machine use the Unix sockets in `[node]` and need none of it. A caller over TCP
/// shows a token (`kvasir token new`) or, with `listen.tls.client_ca`, a certificate. Without `listen.tls` nothing is encrypted,
/// so only loopback is allowed unless `allow_remote` says otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Listen {
    /// Control: gRPC. Empty: nowhere. Port 0 takes any free port, as in the two below.
    pub grpc: Door,
    /// `/livez` and `/readyz`, open to everyone, and `/metrics`, which takes a token or a certificate.
    pub http: SocketAddr,
    /// Data port for clients on other machines. Empty: nowhere.
    pub data: Door,
    /// Listen on addresses other machines can reach, although tokens and blocks cross the network in the clear.
    pub allow_remote: bool,
    /// TLS on `grpc`, `http` and `data`, which may then listen on any address.
    pub tls: ListenTls,
}

/// What clients over TCP are shown, all in PEM. Read again when a file changes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ListenTls {
    /// The host's certificate, which names it as its clients do, and what links it to its authority. Empty: no TLS.
    pub cert: PathBuf,
    /// The key of that certificate, readable by this user alone.
    pub key: PathBuf,
    /// Certificates of the authorities whose clients may show a certificate instead of a token; `access.allow` says which of
    /// them come in. Empty: clients show tokens.
    pub client_ca: PathBuf,
}

impl ListenTls {
    /// Whether any of it is set.
    pub fn is_on(&self) -> bool {
        [&self.cert, &self.key, &self.client_ca].iter().any(|path| !path.as_os_str().is_empty())
    }

    /// The files, if there is TLS.
    pub fn files(&self) -> Option<HostFiles> {
        let Self { cert, key, client_ca } = self.clone();
        let client_authority = (!client_ca.as_os_str().is_empty()).then_some(client_ca);
        self.is_on().then_some(HostFiles { certificate: cert, key, client_authority })
    }
}

/// The DRAM pool and the data server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Store {
    /// Memory that holds blocks. Must fit what the machine has free.
    pub pool_bytes: Size,
    /// The most resident blocks. Each costs about 72 B outside the pool.
    pub block_slots: u32,
    /// Touch every page at start, so that no put waits for a page fault.
    pub prefault: bool,
    /// Pages of 2 MiB for the pool. `auto`: if the system grants them. `off`: never. `require`: the host does not start
    /// without them.
    pub huge_pages: HugePages,
    /// NUMA node to take the pool from; -1: any.
    pub numa_node: i32,
    /// Lock the pool in memory, so that it is never swapped out.
    pub lock_memory: bool,
    /// How fast a background thread compares resident blocks with their checksums, per second. `0B`: not at all.
    pub scrub_rate: Size,
    /// Free share of the pool below which eviction starts.
    pub low_free: f64,
    /// Free share of the pool at which eviction stops; at least `low_free`.
    pub high_free: f64,
    /// Victims kept ready for puts that find no space.
    pub reserve_max: u32,
    /// How long a put waits for eviction before it fails.
    pub put_wait: Span,
    /// How long a reader may use a block without asking again.
    pub lease_ttl: Span,
    /// How much longer the store itself honours a lease.
    pub lease_grace: Span,
    /// The most leases held at the same time.
    pub leases_max: u32,
    /// How long a writer may take from reserve to commit.
    pub reservation_ttl: Span,
    /// How long a block may stay in the pool, used or not. `0s`: until evicted.
    pub block_ttl: Span,
    /// `trust`: take the writer's checksum, readers verify. `verify`: read every block again at commit.
    pub checksum: Checksum,
    /// Access events kept for the eviction policy; more hits than this are dropped and counted.
    pub events_max: u32,
    /// The most data connections at once over the socket, and as many over TCP.
    pub connections_max: u32,
    /// How long a data peer may stall in the middle of a frame.
    pub stall_timeout: Span,
    /// How long a data connection may be silent.
    pub idle_timeout: Span,
    /// The most payload in one put or get.
    pub payload_max: Size,
    /// Share of the pool that a tenant may pin, unless its own entry says otherwise.
    pub pin_share: f64,
    /// The longest a pin lasts.
    pub pin_max: Span,
    /// The time in which the weight of a soft pin halves.
    pub pin_half_life: Span,
    /// Quotas and floors, one `[[store.tenants]]` each. Tenants that are not listed share the entry of tenant 0.
    pub tenants: Vec<Tenant>,
}

/// What one tenant may take of the pool, and what it is promised.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tenant {
    /// The number its connections give.
    pub tenant: u16,
    /// The most bytes its blocks take; beyond that it loses blocks of its own first. If absent: the whole pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_bytes: Option<Size>,
    /// What it keeps while others use more than they are promised. If absent: nothing, or a share by `weight`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor_bytes: Option<Size>,
    /// Instead of `floor_bytes`: its share, among all weights, of what the floors in bytes leave of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// The most bytes it may have pinned. If absent: `store.pin_share` of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin_quota_bytes: Option<Size>,
}

/// Which side computes the checksum that a block carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Checksum {
    Trust,
    Verify,
}

/// Whether to ask for pages of 2 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HugePages {
    Auto,
    Off,
    Require,
}

/// Instances and the prefix index.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Conductor {
    /// Tokens in one block of a chain.
    pub block_size_tokens: u32,
    /// The most instances known at once.
    pub instances_max: u32,
    /// The most distinct blocks in the prefix index, and, counted apart, the most runs of blocks that instances hold.
    pub index_entries_max: u64,
    /// Requests scheduled and not yet finished; more are refused.
    pub requests_max: u32,
    /// A request not finished within this time is forgotten.
    pub request_ttl: Span,
    /// An instance silent for this long is not chosen.
    pub instance_ttl: Span,
    /// How often the balancer policy is asked.
    pub balance_every: Span,
    /// Decisions made at once: each worker has its own instances of scheduler and admitter. Default:
    /// one per core, 8 at most.
    pub workers: u32,
}

/// Policies and their limits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// Folder watched for `scheduler.wasm`, `evictor.wasm`, `admitter.wasm`, `balancer.wasm`; a file that
    /// appears or changes is loaded. Empty: not watched.
    pub dir: PathBuf,
    /// CPU time of one call on the request path.
    pub hot_deadline: Span,
    /// CPU time of one call off the request path: describe, configure, balancer ticks.
    pub cold_deadline: Span,
    /// Memory of one instance; an evictor gets 256 B per block slot in addition.
    pub memory_bytes: Size,
    /// Largest component accepted.
    pub component_bytes_max: Size,
    /// Keep compiled code in the data folder.
    pub compile_cache: bool,
    /// Faults within `breaker_window` that take a policy out of service.
    pub breaker_faults: u32,
    pub breaker_window: Span,
    pub scheduler: Assigned,
    pub evictor: Assigned,
    pub admitter: Assigned,
    pub balancer: Assigned,
}

/// What serves a slot at the first start. Later starts restore what was loaded last.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Assigned {
    /// Name of a default policy, or path of a component (contains `/` or ends in `.wasm`). Empty: the
    /// slot's first default.
    pub source: String,
    /// The policy's own settings.
    pub settings: BTreeMap<String, String>,
}

impl Default for Node {
    fn default() -> Self {
        Self {
            name: String::new(),
            data_dir: PathBuf::new(),
            socket: PathBuf::new(),
            control: PathBuf::new(),
        }
    }
}

impl Default for Listen {
    fn default() -> Self {
        let http = SocketAddr::from(([127, 0, 0, 1], 7421));
        Self { grpc: Door(None), http, data: Door(None), allow_remote: false, tls: ListenTls::default() }
    }
}

impl Default for Store {
    fn default() -> Self {
        Self {
            pool_bytes: Size::mib(1024),
            block_slots: 1 << 20,
            prefault: false,
            huge_pages: HugePages::Auto,
            numa_node: -1,
            lock_memory: false,
            scrub_rate: Size::mib(32),
            low_free: 0.05,
            high_free: 0.10,
            reserve_max: 1024,
            put_wait: Span::ms(100),
            lease_ttl: Span::secs(10),
            lease_grace: Span::secs(1),
            leases_max: 1 << 20,
            reservation_ttl: Span::secs(60),
            block_ttl: Span::secs(0),
            checksum: Checksum::Trust,
            events_max: 1 << 16,
            connections_max: 256,
            stall_timeout: Span::secs(5),
            idle_timeout: Span::secs(600),
            payload_max: Size::mib(256),
            pin_share: 0.10,
            pin_max: Span::secs(3600),
            pin_half_life: Span::secs(30),
            tenants: Vec::new(),
        }
    }
}

impl Default for Conductor {
    fn default() -> Self {
        Self {
            block_size_tokens: 512,
            instances_max: 1024,
            index_entries_max: 1 << 26,
            requests_max: 1 << 20,
            request_ttl: Span::secs(600),
            instance_ttl: Span::secs(10),
            balance_every: Span::secs(1),
            workers: std::thread::available_parallelism().map_or(1, |cores| cores.get().min(8) as u32),
        }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            dir: PathBuf::new(),
            hot_deadline: Span::ms(5),
            cold_deadline: Span::secs(2),
            memory_bytes: Size::mib(16),
            component_bytes_max: Size::mib(32),
            compile_cache: true,
            breaker_faults: 5,
            breaker_window: Span::secs(10),
            scheduler: Assigned::default(),
            evictor: Assigned::default(),
            admitter: Assigned::default(),
            balancer: Assigned::default(),
        }
    }
}

impl Config {
    /// Reads the file (if one is named), then `KVASIR__SECTION__KEY` of `environment`, then the `--set`
    /// assignments; completes what depends on the machine, and validates.
    ///
    /// # Errors
    /// The first key or value that cannot be used, and where it comes from.
    pub fn load(
        file: Option<&std::path::Path>,
        environment: impl IntoIterator<Item = (String, String)>,
        set: &[String],
    ) -> Result<Self, Error> {
        let mut layers = layers::Layers::default();
        if let Some(path) = file {
            layers.file(path)?;
        }
        layers.environment(environment)?;
        layers.set(set)?;
        let mut config = layers.finish();
        config.complete();
        config.validate()?;
        Ok(config)
    }

    /// Fills in empty settings that depend on the machine.
    fn complete(&mut self) {
        let node = &mut self.node;
        if node.name.is_empty() {
            let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
            node.name = if valid_name(&machine) { machine } else { "kvasir".to_owned() };
        }
        if node.data_dir.as_os_str().is_empty() {
            node.data_dir = default_data_dir(|name| std::env::var_os(name)).unwrap_or_default();
        }
        // Relative to the folder in which the host was started: compiled policies are kept by absolute path.
        if let Ok(absolute) = std::path::absolute(&node.data_dir) {
            node.data_dir = absolute;
        }
        if node.socket.as_os_str().is_empty() {
            node.socket = node.data_dir.join("kvasir.sock");
        }
        if node.control.as_os_str().is_empty() {
            node.control = node.data_dir.join("control.sock");
        }
    }

    /// # Errors
    /// The first setting that makes no sense, with its key and value.
    pub fn validate(&self) -> Result<(), Error> {
        // NIC names are checked when the machine is probed.
        let Self {
            node,
            listen,
            access,
            store,
            tiering,
            nvme,
            remote,
            cluster,
            conductor,
            policy,
            topology: _,
        } = self;
        if !valid_name(&node.name) {
            return Err(invalid("node.name", &node.name, "must be 1 to 64 of A-Z a-z 0-9 . _ -"));
        }
        if node.data_dir.as_os_str().is_empty() {
            let why = "is not set, and none of XDG_STATE_HOME, HOME and XDG_RUNTIME_DIR says where it could be; set it";
            return Err(invalid("node.data_dir", "", why));
        }
        for (key, path) in [("node.socket", &node.socket), ("node.control", &node.control)] {
            // sun_path of Linux holds 108 bytes with the closing 0.
            if path.as_os_str().len() > 107 {
                return Err(invalid(key, path.display(), "is over 107 bytes; choose a shorter path"));
            }
        }
        if node.socket == node.control {
            return Err(invalid(
                "node.control",
                node.control.display(),
                "is node.socket as well; choose another path",
            ));
        }
        access.validate()?;
        listen.validate()?;
        store.validate()?;
        tiering.validate()?;
        nvme.validate()?;
        remote.validate()?;
        cluster.validate(&node.name, listen.allow_remote, store, tiering)?;
        conductor.validate()?;
        policy.validate()?;
        Ok(parts::dram_config(self).validate()?)
    }

    /// As TOML that reads back to the same settings.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("settings are plain tables, text and numbers")
    }
}

impl Listen {
    fn validate(&self) -> Result<(), Error> {
        let Self { grpc, http, data, allow_remote, tls } = self;
        if tls.is_on() && (tls.cert.as_os_str().is_empty() || tls.key.as_os_str().is_empty()) {
            return Err(invalid("listen.tls", "", "needs both cert and key"));
        }
        let all = [("listen.grpc", grpc.0), ("listen.http", Some(*http)), ("listen.data", data.0)];
        let all: Vec<_> = all.into_iter().filter_map(|(key, addr)| Some((key, addr?))).collect();
        for (key, addr) in &all {
            if !addr.ip().is_loopback() && !allow_remote && !tls.is_on() {
                let why = "is not loopback and not encrypted; set listen.tls or, if the network is trusted, listen.allow_remote = true";
                return Err(invalid(key, addr, why));
            }
        }
        for (i, (key, addr)) in all.iter().enumerate() {
            if let Some((other, _)) = all[..i].iter().find(|(_, earlier)| earlier == addr && addr.port() != 0)
            {
                return Err(invalid(key, addr, &format!("is taken by {other}; use another port")));
            }
        }
        Ok(())
    }
}

/// The default evictors take up to 52 B a slot; beyond this their `open` traps.
const EVICTOR_SLOTS_MAX: u32 = 80_000_000;

impl Store {
    fn validate(&self) -> Result<(), Error> {
        let least =
            |key, value: u64| if value == 0 { Err(invalid(key, 0, "must be at least 1")) } else { Ok(()) };
        if self.pool_bytes.0 == 0 {
            return Err(invalid("store.pool_bytes", self.pool_bytes, "must be at least 1"));
        }
        least("store.leases_max", self.leases_max.into())?;
        least("store.events_max", self.events_max.into())?;
        least("store.connections_max", self.connections_max.into())?;
        least("store.payload_max", self.payload_max.0)?;
        let slots_max = kvasir_dataplane::config::BLOCKS_MAX;
        if !(1..=slots_max).contains(&self.block_slots) {
            return Err(invalid("store.block_slots", self.block_slots, &format!("must be 1 to {slots_max}")));
        }
        if self.block_slots > EVICTOR_SLOTS_MAX {
            let why = format!(
                "is more than an evictor can keep account of: its 32-bit memory of 4 GiB is enough for {EVICTOR_SLOTS_MAX} slots; use larger blocks"
            );
            return Err(invalid("store.block_slots", self.block_slots, &why));
        }
        let spans = [
            ("store.lease_ttl", self.lease_ttl),
            ("store.reservation_ttl", self.reservation_ttl),
            ("store.stall_timeout", self.stall_timeout),
            ("store.idle_timeout", self.idle_timeout),
        ];
        positive(&spans)?;
        if let Some(both) = self.tenants.iter().find(|t| t.floor_bytes.is_some() && t.weight.is_some()) {
            let why = "has floor_bytes and weight; give one of them";
            return Err(invalid("store.tenants.tenant", both.tenant, why));
        }
        let low = self.low_free;
        if !(0.0..1.0).contains(&low) {
            return Err(invalid("store.low_free", low, "must be at least 0 and below 1"));
        }
        if !(low..1.0).contains(&self.high_free) {
            let range = format!("must be at least store.low_free ({low}) and below 1");
            return Err(invalid("store.high_free", self.high_free, &range));
        }
        Ok(())
    }
}

impl Conductor {
    fn validate(&self) -> Result<(), Error> {
        let Self { block_size_tokens, instances_max, index_entries_max, requests_max, workers, .. } = *self;
        let ranges = [
            ("conductor.block_size_tokens", u64::from(block_size_tokens), 1 << 20),
            // 65,535 means "reject" in the policy contract.
            ("conductor.instances_max", instances_max.into(), 65_534),
            ("conductor.index_entries_max", index_entries_max, 1 << 32),
            ("conductor.requests_max", requests_max.into(), 1 << 28),
            // Each holds instances of two policies, and three times as many live during a swap.
            ("conductor.workers", workers.into(), 32),
        ];
        for (key, value, max) in ranges {
            if !(1..=max).contains(&value) {
                return Err(invalid(key, value, &format!("must be 1 to {max}")));
            }
        }
        positive(&[
            ("conductor.request_ttl", self.request_ttl),
            ("conductor.instance_ttl", self.instance_ttl),
            ("conductor.balance_every", self.balance_every),
        ])
    }
}

impl Policy {
    fn validate(&self) -> Result<(), Error> {
        positive(&[
            ("policy.hot_deadline", self.hot_deadline),
            ("policy.cold_deadline", self.cold_deadline),
            ("policy.breaker_window", self.breaker_window),
        ])?;
        if self.breaker_faults == 0 {
            return Err(invalid("policy.breaker_faults", 0, "must be at least 1"));
        }
        let sizes = [
            ("policy.memory_bytes", self.memory_bytes, Size(1 << 16), Size::mib(2048)),
            ("policy.component_bytes_max", self.component_bytes_max, Size(1), Size::mib(1024)),
        ];
        for (key, size, min, max) in sizes {
            if !(min..=max).contains(&size) {
                return Err(invalid(key, size, &format!("must be {min} to {max}")));
            }
        }
        use kvasir_default_policies::{ADMITTERS, BALANCERS, EVICTORS, SCHEDULERS};
        self.scheduler.validate("scheduler", SCHEDULERS.iter().map(|p| p.name).collect())?;
        self.evictor.validate("evictor", EVICTORS.iter().map(|p| p.name).collect())?;
        self.admitter.validate("admitter", ADMITTERS.iter().map(|p| p.name).collect())?;
        self.balancer.validate("balancer", BALANCERS.iter().map(|p| p.name).collect())
    }
}

impl Assigned {
    /// Whether `source` is a path and not a name.
    pub fn is_path(source: &str) -> bool {
        source.contains('/') || source.ends_with(".wasm")
    }

    fn validate(&self, slot: &str, names: Vec<&'static str>) -> Result<(), Error> {
        if self.source.is_empty() || Self::is_path(&self.source) || names.contains(&self.source.as_str()) {
            return Ok(());
        }
        let hint = layers::did_you_mean(&self.source, names.iter().copied());
        let why =
            format!("is no {slot}; {hint}built in: {}; or give a path of a component", names.join(", "));
        Err(invalid(&format!("policy.{slot}.source"), &self.source, &why))
    }
}

fn positive(spans: &[(&str, Span)]) -> Result<(), Error> {
    let zero = spans.iter().find(|(_, span)| span.0.is_zero());
    zero.map_or(Ok(()), |(key, span)| Err(invalid(key, span, "must be more than no time")))
}

pub(crate) fn invalid(key: &str, value: impl std::fmt::Display, why: &str) -> Error {
    Error::Invalid { key: key.to_owned(), value: value.to_string(), why: why.to_owned() }
}

fn valid_name(name: &str) -> bool {
    (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

/// Never a folder that users share: others could put code there before us.
fn default_data_dir(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let from = |name: &str| variable(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let state = from("XDG_STATE_HOME").or_else(|| from("HOME").map(|home| home.join(".local/state")));
    state.or_else(|| from("XDG_RUNTIME_DIR")).map(|folder| folder.join("kvasir"))
}

#[cfg(test)]
mod tests;
