//! Settings of a host: a TOML file, overridden by the environment, overridden by `--set`.
//!
//! Every key has a default, so no file is needed. A value is checked in the layer it comes from, so
//! that an error names the file, the variable or the flag to change. Empty text stands for "none".

mod access;
mod cluster;
mod door;
mod explain;
mod guard;
mod layers;
pub(crate) mod parts;
mod record;
mod tiers;

pub use access::{Access, Allow, Namespace};
pub use cluster::{Addresses, Cluster, ClusterTls, Peer};
pub use door::Door;
pub use explain::Explain;
pub use guard::Guard;
pub use kvasir_dataplane::units::{Size, Span};
pub(crate) use layers::did_you_mean;
pub use layers::{Error, Layer};
pub use record::Record;
pub use tiers::{Remote, RemoteUrl, TenantKey};

use crate::text::printable;
use kvasir_client::control::ControlAddr;
use kvasir_dataplane::config::positive;
use kvasir_dataplane::tier::hbm::HbmConfig;
use kvasir_dataplane::tier::nvme::NvmeConfig;
use kvasir_dataplane::tier::tiering::TieringConfig;
use kvasir_dataplane::{DramConfig, ServerConfig};
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
    pub tiering: TieringConfig,
    pub hbm: HbmConfig,
    pub nvme: NvmeConfig,
    pub remote: Remote,
    pub cluster: Cluster,
    pub conductor: Conductor,
    pub explain: Explain,
    pub record: Record,
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
    /// Control: gRPC. Empty means nowhere. Port 0 takes any free port, as in the two below.
    pub grpc: Door,
    /// `/livez` and `/readyz`, open to everyone, and `/metrics`, which takes a token or a certificate.
    pub http: SocketAddr,
    /// Data port for clients on other machines. Empty means nowhere.
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
    /// The host's certificate, which names it as its clients do, and what links it to its authority. Empty means no TLS.
    pub cert: PathBuf,
    /// The key of that certificate, readable by this user alone.
    pub key: PathBuf,
    /// Certificates of the authorities whose clients may show a certificate instead of a token; `access.allow` says which of
    /// them come in. Empty means that clients show tokens.
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

/// The DRAM pool and the data server. Of unknown keys here only the layers tell: serde cannot where it flattens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Store {
    #[serde(flatten)]
    pub dram: DramConfig,
    #[serde(flatten)]
    pub server: ServerConfig,
    /// How fast a background thread compares resident blocks with their checksums, per second. `0B`: not at all.
    pub scrub_rate: Size,
}

/// Instances and the prefix index.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Conductor {
    /// Tokens in one block of a chain.
    pub block_size_tokens: u32,
    /// The most instances known at once.
    pub instances_max: u32,
    /// The most distinct blocks in the prefix index, and, counted apart, the most runs of blocks that instances hold. As many
    /// again for each tier that instances name, and for HBM and DRAM together.
    pub index_entries_max: u64,
    /// Requests scheduled and not yet finished; more are refused.
    pub requests_max: u32,
    /// Sessions, and tenants, of which a word is kept for the scheduler; of more, those booked longest ago are forgotten.
    pub sessions_max: u32,
    /// A request not finished within this time is forgotten.
    pub request_ttl: Span,
    /// An instance silent for this long is not chosen.
    pub instance_ttl: Span,
    /// How often the balancer policy is asked.
    pub balance_every: Span,
    /// Decisions made at once: each worker has its own instances of scheduler and admitter. Default:
    /// one per core, 8 at most.
    pub workers: u32,
    /// What lies between the domains of the network that instances name when they register. A list of tables.
    pub links: Vec<Link>,
    /// Quotas of tokens in flight, as admitters are told of them. A list of tables.
    pub tenants: Vec<TenantTokens>,
}

/// How much of the cluster one tenant is meant to use at a time. It keeps nobody out by itself: the admitter is told what part
/// of it is in use, and decides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantTokens {
    /// Number of the tenant, as requests name it.
    pub tenant: u32,
    /// Tokens in flight at once: prompts and expected outputs.
    pub tokens_max: u64,
}

/// One direction between two domains. To move n blocks there takes `fixed_ms` + the receiver's fixed time + `factor` ×
/// the receiver's time per block × n.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// The domain that sends.
    pub from: String,
    /// The domain that receives; may be the same.
    pub to: String,
    /// Milliseconds.
    #[serde(default)]
    pub fixed_ms: f32,
    #[serde(default = "one")]
    pub factor: f32,
    /// Transfers that run beside each other at full speed; more share it evenly. 0 means any number.
    #[serde(default)]
    pub parallel: u32,
}

fn one() -> f32 {
    1.0
}

/// Policies and their limits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// Control address of the host whose rollouts this one follows (unix:PATH or HOST:PORT). Empty means its own.
    pub follow: String,
    /// File with the token to show there: of the role `policy`. Read again for every call.
    pub follow_token: PathBuf,
    /// Certificates of the authorities that vouch for it. Empty means no TLS, which is for a host on this machine, or
    /// `listen.allow_remote`.
    pub follow_ca: PathBuf,
    /// Folder watched for `scheduler.wasm`, `evictor.wasm`, `admitter.wasm`, `balancer.wasm`; a file that
    /// appears or changes is loaded. Empty if no folder is watched.
    pub dir: PathBuf,
    /// CPU time of one call on the request path.
    pub hot_deadline: Span,
    /// CPU time of one call off the request path: describe, configure, balancer ticks.
    pub cold_deadline: Span,
    /// Memory of one instance; an evictor gets 256 B per block slot in addition.
    pub memory_bytes: Size,
    /// The most core instances in one component. What is compiled from interpreted languages has about 40.
    pub core_instances_max: u32,
    /// Largest component accepted.
    pub component_bytes_max: Size,
    /// Keep compiled code in the data folder.
    pub compile_cache: bool,
    /// Faults within `breaker_window` that take a policy out of service.
    pub breaker_faults: u32,
    pub breaker_window: Span,
    pub guard: Guard,
    pub trust: Trust,
    pub scheduler: Assigned,
    pub evictor: Assigned,
    pub admitter: Assigned,
    pub balancer: Assigned,
}

/// Whose policies may serve. Built-in ones always may.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Trust {
    /// File of public keys, and for which slots they may sign (`kvasir policy trust add` writes it). Read at every load; one
    /// that cannot be read trusts nobody. Empty means that components need no signature.
    pub file: PathBuf,
}

/// What serves a slot at the first start. Later starts restore what was loaded last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Assigned {
    /// Name of a default policy, or path of a component or a chain (contains `/` or ends in `.wasm` or `.toml`). Empty:
    /// the slot's first default.
    pub source: String,
    /// Memory of one instance in this slot; 0 = `policy.memory_bytes`.
    pub memory_bytes: Size,
    /// The policy's own settings.
    pub settings: BTreeMap<String, String>,
}

impl Default for Assigned {
    fn default() -> Self {
        Self { source: String::new(), memory_bytes: Size(0), settings: BTreeMap::new() }
    }
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
        Self { dram: DramConfig::default(), server: ServerConfig::default(), scrub_rate: Size::mib(32) }
    }
}

impl Default for Conductor {
    fn default() -> Self {
        Self {
            block_size_tokens: 512,
            instances_max: 1024,
            index_entries_max: 1 << 26,
            requests_max: 1 << 20,
            sessions_max: 1 << 18,
            request_ttl: Span::secs(600),
            instance_ttl: Span::secs(10),
            balance_every: Span::secs(1),
            workers: std::thread::available_parallelism().map_or(1, |cores| cores.get().min(8) as u32),
            links: Vec::new(),
            tenants: Vec::new(),
        }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            follow: String::new(),
            follow_token: PathBuf::new(),
            follow_ca: PathBuf::new(),
            dir: PathBuf::new(),
            hot_deadline: Span::ms(5),
            cold_deadline: Span::secs(2),
            memory_bytes: Size::mib(16),
            core_instances_max: 48,
            component_bytes_max: Size::mib(32),
            compile_cache: true,
            breaker_faults: 5,
            breaker_window: Span::secs(10),
            guard: Guard::default(),
            trust: Trust::default(),
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
        Self::of(layers)
    }

    /// As [`Config::load`], of what the file in `path` has in it, and nothing on top.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn parse(path: &std::path::Path, text: &str) -> Result<Self, Error> {
        let mut layers = layers::Layers::default();
        layers.text(path, text)?;
        Self::of(layers)
    }

    fn of(layers: layers::Layers) -> Result<Self, Error> {
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
            // Any size may be wanted; the GPU says what it has.
            hbm: _,
            nvme,
            remote,
            cluster,
            conductor,
            explain,
            record,
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
        cluster.validate(&node.name, listen.allow_remote, &store.dram, tiering)?;
        conductor.validate()?;
        explain.validate()?;
        record.validate(&explain.file)?;
        policy.validate(listen.allow_remote)
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
        self.dram.validate()?;
        self.server.validate()?;
        if self.dram.blocks_max > EVICTOR_SLOTS_MAX {
            let why = format!(
                "is more than an evictor can keep account of: its 32-bit memory of 4 GiB is enough for {EVICTOR_SLOTS_MAX} slots; use larger blocks"
            );
            return Err(invalid("store.block_slots", self.dram.blocks_max, &why));
        }
        Ok(())
    }
}

impl Conductor {
    fn validate(&self) -> Result<(), Error> {
        let Self {
            block_size_tokens,
            instances_max,
            index_entries_max,
            requests_max,
            sessions_max,
            workers,
            ..
        } = *self;
        let ranges = [
            ("conductor.block_size_tokens", u64::from(block_size_tokens), 1 << 20),
            // 65,535 means "reject" in the policy contract.
            ("conductor.instances_max", instances_max.into(), 65_534),
            ("conductor.index_entries_max", index_entries_max, 1 << 29),
            ("conductor.requests_max", requests_max.into(), 1 << 28),
            ("conductor.sessions_max", sessions_max.into(), 1 << 28),
            // Each holds instances of two policies, and three times as many live during a swap.
            ("conductor.workers", workers.into(), 32),
        ];
        for (key, value, max) in ranges {
            if !(1..=max).contains(&value) {
                return Err(invalid(key, value, &format!("must be 1 to {max}")));
            }
        }
        validate_links(&self.links)?;
        validate_tenants(&self.tenants)?;
        Ok(positive(&[
            ("conductor.request_ttl", self.request_ttl.0),
            ("conductor.instance_ttl", self.instance_ttl.0),
            ("conductor.balance_every", self.balance_every.0),
        ])?)
    }
}

/// Larger times and factors are mistakes of unit.
const LINK_MAX: f32 = 1e6;

fn validate_links(links: &[Link]) -> Result<(), Error> {
    use crate::fleet::{DOMAINS_MAX, LINKS_MAX};
    if links.len() > LINKS_MAX {
        return Err(invalid("conductor.links", links.len(), &format!("must be at most {LINKS_MAX}")));
    }
    let mut paths = std::collections::HashSet::new();
    let mut domains = std::collections::HashSet::new();
    for Link { from, to, fixed_ms, factor, parallel: _ } in links {
        for (key, name) in [("conductor.links.from", from), ("conductor.links.to", to)] {
            if !valid_name(name) {
                return Err(invalid(key, name, "must be 1 to 64 of A-Z a-z 0-9 . _ -"));
            }
            domains.insert(name);
        }
        for (key, value) in [("conductor.links.fixed_ms", fixed_ms), ("conductor.links.factor", factor)] {
            if !(0.0..=LINK_MAX).contains(value) {
                return Err(invalid(key, value, &format!("must be 0 to {LINK_MAX}")));
            }
        }
        if !paths.insert((from, to)) {
            return Err(invalid("conductor.links", format!("{from} to {to}"), "is listed twice"));
        }
    }
    if domains.len() > DOMAINS_MAX {
        let why = format!("domains are named; at most {DOMAINS_MAX}");
        return Err(invalid("conductor.links", domains.len(), &why));
    }
    Ok(())
}

/// The most entries of the list.
const TENANTS_MAX: usize = 1_024;

fn validate_tenants(tenants: &[TenantTokens]) -> Result<(), Error> {
    const KEY: &str = "conductor.tenants";
    if tenants.len() > TENANTS_MAX {
        return Err(invalid(KEY, tenants.len(), &format!("must be at most {TENANTS_MAX}")));
    }
    let mut known = std::collections::HashSet::new();
    for TenantTokens { tenant, tokens_max } in tenants {
        if *tokens_max == 0 {
            return Err(invalid("conductor.tenants.tokens_max", tokens_max, "must be at least 1"));
        }
        if !known.insert(tenant) {
            return Err(invalid(KEY, tenant, "is listed twice; merge its entries"));
        }
    }
    Ok(())
}

impl Policy {
    /// `allow_remote`: that of `listen`.
    fn validate_follow(&self, allow_remote: bool) -> Result<(), Error> {
        let unix = self.follow.starts_with("unix:");
        if !self.follow.is_empty() {
            let Ok(leader) = self.follow.parse::<ControlAddr>() else {
                return Err(invalid("policy.follow", &self.follow, "must be unix:PATH or HOST:PORT"));
            };
            let encrypted = !self.follow_ca.as_os_str().is_empty();
            if !leader.is_on_this_machine() && !encrypted && !allow_remote {
                let why = "is another machine, and token and policies would cross the network in the clear; set policy.follow_ca or, if the network is trusted, listen.allow_remote = true";
                return Err(invalid("policy.follow", &self.follow, why));
            }
        }
        // A token itself would stand in messages about the file.
        if self.follow_token.as_os_str().as_encoded_bytes().starts_with(b"kvasir_") {
            let why = "is the path of a file that holds the token, not the token";
            return Err(invalid("policy.follow_token", "kvasir_…", why));
        }
        for (key, file) in
            [("policy.follow_token", &self.follow_token), ("policy.follow_ca", &self.follow_ca)]
        {
            if !file.as_os_str().is_empty() && (self.follow.is_empty() || unix) {
                return Err(invalid(key, file.display(), "is for a host that policy.follow names over TCP"));
            }
        }
        Ok(())
    }

    fn validate(&self, allow_remote: bool) -> Result<(), Error> {
        self.validate_follow(allow_remote)?;
        positive(&[
            ("policy.hot_deadline", self.hot_deadline.0),
            ("policy.cold_deadline", self.cold_deadline.0),
            ("policy.breaker_window", self.breaker_window.0),
        ])?;
        if self.breaker_faults == 0 {
            return Err(invalid("policy.breaker_faults", 0, "must be at least 1"));
        }
        self.guard.validate()?;
        let sizes = [
            ("policy.memory_bytes", self.memory_bytes, Size(1 << 16), Size::mib(2048)),
            ("policy.component_bytes_max", self.component_bytes_max, Size(1), Size::mib(1024)),
        ];
        for (key, size, min, max) in sizes {
            if !(min..=max).contains(&size) {
                return Err(invalid(key, size, &format!("must be {min} to {max}")));
            }
        }
        if !(1..=1_000).contains(&self.core_instances_max) {
            return Err(invalid("policy.core_instances_max", self.core_instances_max, "must be 1 to 1000"));
        }
        use kvasir_default_policies::{ADMITTERS, BALANCERS, EVICTORS, SCHEDULERS};
        self.scheduler.validate("scheduler", SCHEDULERS.iter().map(|p| p.name).collect())?;
        self.evictor.validate("evictor", EVICTORS.iter().map(|p| p.name).collect())?;
        self.admitter.validate("admitter", ADMITTERS.iter().map(|p| p.name).collect())?;
        self.balancer.validate("balancer", BALANCERS.iter().map(|p| p.name).collect())
    }
}

impl Assigned {
    fn validate(&self, slot: &str, names: Vec<&'static str>) -> Result<(), Error> {
        let (min, max) = (Size(1 << 16), Size::mib(2048));
        if self.memory_bytes != Size(0) && !(min..=max).contains(&self.memory_bytes) {
            let why = format!("must be {min} to {max}, or 0 for policy.memory_bytes");
            return Err(invalid(&format!("policy.{slot}.memory_bytes"), self.memory_bytes, &why));
        }
        if self.source.is_empty()
            || crate::policy::Source::is_path(&self.source)
            || names.contains(&self.source.as_str())
        {
            return Ok(());
        }
        let hint = layers::did_you_mean(&self.source, names.iter().copied());
        let why =
            format!("is no {slot}; {hint}built in: {}; or give a path of a component", names.join(", "));
        Err(invalid(&format!("policy.{slot}.source"), &self.source, &why))
    }
}

pub(crate) fn invalid(key: &str, value: impl std::fmt::Display, why: &str) -> Error {
    let value = printable(&value.to_string(), 512);
    kvasir_dataplane::config::invalid(key, value, why).into()
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
