//! Puts a host together, and takes it apart again.
//!
//! Starting goes from what fails most often to what leaves traces: addresses, memory, data folder,
//! policies, threads. A host that does not start has bound nothing, and written at most its folder.

use crate::access::Keeper;
use crate::access::door::Door;
use crate::calendar::unix_ms;
use crate::conductor::Conductor;
use crate::config::{self, Config, parts};
use crate::data_dir::{self, DataDir};
use crate::explain::Explain;
use crate::explain::blocks::Evicted;
use crate::host::{Addrs, Host};
use crate::lifecycle::chooser::PolicyChooser;
use crate::lifecycle::cluster;
use crate::lifecycle::tiers::{self, PolicyAdmit};
use crate::policy::history::History;
use crate::policy::rollout::keeper::Keeper as Rollouts;
use crate::policy::{self, PolicyHost};
use crate::rpc::{self, following::Following};
use crate::traffic::{Recorder, Recording};
use kvasir_dataplane::server::node::Node;
use kvasir_dataplane::server::{Listen, ServeError, Server, bind_unix};
use kvasir_dataplane::tier::dram::OpenError;
use kvasir_dataplane::tier::scrub::Scrubber;
use kvasir_dataplane::tier::tiering::{Saved, Tiering};
use kvasir_dataplane::{Clock, DramConfig, DramStore};
use kvasir_eviction::Eviction;
use kvasir_tls::HostTls;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How long open control calls may take to end.
const SHUTDOWN: Duration = Duration::from_secs(3);

/// Why a host did not start. Nothing of it is left running.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Config(#[from] config::Error),
    #[error("listen.tls: {0}")]
    Tls(#[from] kvasir_tls::TlsError),
    #[error("{key} {addr} cannot be opened: {}; stop what uses it or set another {key}", reason(.source))]
    Listen { key: &'static str, addr: SocketAddr, source: io::Error },
    #[error(transparent)]
    Pool(#[from] OpenError),
    #[error("a tier below the pool does not open: {0}")]
    Tier(#[from] tiers::OpenError),
    #[error(transparent)]
    Cluster(#[from] cluster::Error),
    #[error(transparent)]
    DataDir(#[from] data_dir::Error),
    #[error(transparent)]
    Policy(#[from] policy::Error),
    #[error(transparent)]
    Rollouts(#[from] policy::rollout::keeper::Error),
    #[error("the data server does not start: {0}")]
    Data(#[from] ServeError),
    #[error("explain.file {} cannot be written: {source}", path.display())]
    Recording { path: PathBuf, source: io::Error },
    #[error("record.file {} cannot be written: {source}", path.display())]
    Traffic { path: PathBuf, source: io::Error },
    #[error("no thread for {name}: {source}")]
    Thread { name: &'static str, source: io::Error },
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => "the port is in use".to_owned(),
        io::ErrorKind::AddrNotAvailable => "this machine does not have that address".to_owned(),
        _ => error.to_string(),
    }
}

/// As far as the system allows: the usual limit of 1,024 is less than all ports together may have open.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    // A host runs with the usual limit too.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// Starts hosts; several may run in one process.
pub struct Daemon;

impl Daemon {
    /// # Errors
    /// The first thing that is missing; see [`StartError`].
    pub fn start(config: Config) -> Result<Running, StartError> {
        Self::start_by(config, Clock::start())
    }

    /// By a clock that somebody may move.
    ///
    /// # Errors
    /// As [`Daemon::start`].
    pub fn start_by(config: Config, clock: Clock) -> Result<Running, StartError> {
        config.validate()?;
        raise_descriptor_limit();
        let grpc = config.listen.grpc.0.map(|addr| bind("listen.grpc", addr)).transpose()?;
        let http = bind("listen.http", config.listen.http)?;
        let pool = DramConfig { hash_seed: crate::seed::random(), ..config.store.dram.clone() };
        let store = Arc::new(DramStore::open(pool)?);
        let data_dir = DataDir::open(&config.node.data_dir)?;
        let tls = config.listen.tls.files().map(HostTls::open).transpose()?.map(Arc::new);
        let keeper = Keeper::new(&config.access, &data_dir.path, tls.clone())?;
        let mode = keeper.socket_mode();
        let door = Door { gate: Arc::new(keeper) };
        let policies = open_policies(&config, &data_dir, store.slots())?;
        let history = Arc::new(History::open(&data_dir.state, &data_dir.path)?);
        history.follow(&policies);
        let rollouts = Rollouts::open(&data_dir.state, unix_ms())?;
        let no_thread = |name| move |source| StartError::Thread { name, source };
        let cluster = cluster::open(&config, &store, clock)?;
        let below = tiers::open(&config, &store, cluster.as_ref().map(|cluster| cluster.tier()))?;
        let explain = open_explain(&config, clock)?;
        let admit = Box::new(PolicyAdmit::new(policies.admitter_worker(), Arc::clone(&explain)));
        let tiering = Tiering::start(Arc::clone(&store), below, admit, config.tiering.clone(), clock);
        let tiering = Arc::new(tiering.map_err(no_thread("offloading"))?);
        let listen = Listen { unix: Some(config.node.socket.clone()), tcp: config.listen.data.0, mode };
        let node = Arc::new(Node::new(tiering, cluster, clock));
        let served = config.store.server.clone();
        let server = Server::start(Arc::clone(&node), &listen, Arc::clone(&door.gate), served)?;
        let evictor = policies.evictor_worker(store.slots());
        let evicted = Arc::new(Evicted::new(config.explain.evictions as usize));
        let chooser = PolicyChooser::remembering(evictor, Arc::clone(&evicted), Arc::clone(&explain));
        let eviction = Eviction::start(Arc::clone(node.tiering()), chooser, clock);
        let eviction = eviction.map_err(no_thread("eviction"))?;
        let scrub_rate = config.store.scrub_rate.0;
        let scrubber = (scrub_rate > 0).then(|| Scrubber::start(Arc::clone(&store), clock, scrub_rate));
        let scrubber = scrubber.transpose().map_err(no_thread("scrubbing"))?;
        let control = ControlSocket::open(&config.node.control, mode)?;
        let addrs = Addrs {
            grpc: grpc.as_ref().map(|grpc| local_addr(grpc, "listen.grpc")).transpose()?,
            http: local_addr(&http, "listen.http")?,
            data: server.tcp_addr(),
            cluster: node.cluster().map(|cluster| cluster.addr()),
        };
        if let Some(cluster) = node.cluster() {
            addrs.data.into_iter().for_each(|data| cluster.set_data_port(data));
            cluster.run(node.tiering()).map_err(cluster::Error::Open)?;
        }
        let traffic = open_traffic(&config, clock)?;
        let host = Arc::new(Host {
            conductor: Arc::new(Conductor::with_explain(
                &config.conductor,
                &policies,
                explain,
                crate::seed::random() as u32 | 1,
                clock.now_ms(),
            )),
            traffic,
            draining: AtomicBool::new(false),
            config,
            clock,
            node,
            policies,
            history,
            rollouts,
            eviction,
            evicted,
            scrubber,
            server,
            addrs,
            door,
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(control_threads(&host.config))
            .thread_name("kvasir-rpc")
            .enable_all()
            .build()
            .map_err(no_thread("control calls"))?;
        let (stop, stopping) = watch::channel(false);
        let listeners = rpc::Listeners { unix: control.listener, grpc, http, tls };
        rpc::spawn(&runtime, &host, listeners, &stopping).map_err(no_thread("control calls"))?;
        let following = Following::start(&host, stopping).map_err(no_thread("rollouts"))?;
        tracing::info!(bytes = store.pool().bytes(), pages = %store.pool().placed(), "pool ready");
        tracing::info!(node = host.config.node.name, socket = %host.config.node.socket.display(), http = %addrs.http, "host started");
        Ok(Running {
            host: Some(host),
            stop,
            following,
            runtime: Some(runtime),
            _control: control.file,
            _data_dir: data_dir,
        })
    }
}

/// A host at work. Dropping it stops it.
pub struct Running {
    host: Option<Arc<Host>>,
    stop: watch::Sender<bool>,
    following: Following,
    runtime: Option<tokio::runtime::Runtime>,
    _control: SocketFile,
    _data_dir: DataDir,
}

impl Running {
    pub fn host(&self) -> &Arc<Host> {
        self.host.as_ref().expect("taken only when stopping")
    }

    /// Where gRPC listens on TCP, if it does.
    pub fn grpc_addr(&self) -> Option<SocketAddr> {
        self.host().addrs.grpc
    }

    pub fn http_addr(&self) -> SocketAddr {
        self.host().addrs.http
    }

    /// Where data listens on TCP, if it does.
    pub fn data_addr(&self) -> Option<SocketAddr> {
        self.host().addrs.data
    }

    pub fn socket_path(&self) -> &Path {
        &self.host().config.node.socket
    }

    pub fn control_path(&self) -> &Path {
        &self.host().config.node.control
    }

    /// Lets open calls end, closes every connection and removes the socket.
    pub fn shutdown(mut self) {
        self.stop_now();
    }

    fn stop_now(&mut self) {
        let _ = self.stop.send(true);
        if let Some(runtime) = self.runtime.take() {
            if tokio::runtime::Handle::try_current().is_ok() {
                runtime.shutdown_background(); // waiting is forbidden inside another runtime
            } else {
                runtime.shutdown_timeout(SHUTDOWN);
            }
        }
        self.following.wait(SHUTDOWN);
        if let Some(host) = self.host.take() {
            if let Some(cluster) = host.node.cluster() {
                cluster.stop();
            }
            host.policies.close();
            let patience = host.config.tiering.shutdown_timeout;
            let until = Instant::now() + patience;
            // The rest of the time is for making it durable.
            let saved = host.node.tiering().save(Instant::now() + patience * 3 / 4, host.clock.now_ms());
            if saved != Saved::default() {
                let Saved { blocks, bytes, left } = saved;
                tracing::info!(blocks, bytes, left, "blocks that only the pool had went to disk");
            }
            let late = host.node.tiering().close(until.saturating_duration_since(Instant::now()));
            if !late.is_empty() {
                tracing::warn!(
                    tiers = late.join(", "),
                    "stopped before all copies were durable; those are lost"
                );
            }
        } // the last owner stops the data server and the eviction thread
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop_now();
    }
}

/// The Unix socket for control.
struct ControlSocket {
    listener: UnixListener,
    file: SocketFile,
}

impl ControlSocket {
    fn open(path: &Path, mode: u32) -> Result<Self, StartError> {
        let (listener, path, inode) = bind_unix(path, mode)?;
        Ok(Self { listener, file: SocketFile { path, inode } })
    }
}

/// Removes the socket's file when the host ends, unless another host has taken the path since.
struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if std::fs::metadata(&self.path).is_ok_and(|file| file.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// One for each decision that is made at once, and one that answers all else meanwhile.
fn control_threads(config: &Config) -> usize {
    config.conductor.workers as usize + 1
}

fn bind(key: &'static str, addr: SocketAddr) -> Result<TcpListener, StartError> {
    let listen = || {
        let listener = TcpListener::bind(addr)?; // with SO_REUSEADDR: free again at once after a crash
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    listen().map_err(|source| StartError::Listen { key, addr, source })
}

fn local_addr(listener: &TcpListener, key: &'static str) -> Result<SocketAddr, StartError> {
    listener.local_addr().map_err(|source| StartError::Listen { key, addr: ([0, 0, 0, 0], 0).into(), source })
}

fn open_explain(config: &Config, clock: Clock) -> Result<Arc<Explain>, StartError> {
    let limits = config.explain.limits();
    let Some(sampling) = config.explain.sampling() else { return Ok(Explain::new(limits)) };
    let failed = |source| StartError::Recording { path: config.explain.file.clone(), source };
    Explain::sampled(limits, &sampling, clock).map_err(failed)
}

fn open_traffic(config: &Config, clock: Clock) -> Result<Option<Recorder>, StartError> {
    let config::Record { file, file_bytes } = &config.record;
    if file.as_os_str().is_empty() {
        return Ok(None);
    }
    let recording = Recording {
        file: file.clone(),
        file_bytes_max: file_bytes.0,
        block_size_tokens: config.conductor.block_size_tokens,
        waits_ms: config.conductor.request_ttl.0.as_millis() as u64,
    };
    let failed = |source| StartError::Traffic { path: file.clone(), source };
    Recorder::start(&recording, clock).map(Some).map_err(failed)
}

fn open_policies(config: &Config, data_dir: &DataDir, slots: u32) -> Result<Arc<PolicyHost>, policy::Error> {
    let limits = parts::policy_config(config, &data_dir.path, slots);
    PolicyHost::open(&limits, parts::wanted(config), Some((data_dir.state.clone(), data_dir.path.as_path())))
}
