//! What is so on this machine, as far as the checks ask. Nothing here judges.

use crate::config::Config;
use kvasir_client::control::{Control, ControlAddr};
use kvasir_client::{ClientFiles, ClientTls};
use kvasir_dataplane::memory::host::HostPool;
use kvasir_dataplane::memory::placing;
use kvasir_dataplane::stream::{Stream, connect_unix};
use kvasir_dataplane::tier::nvme;
use kvasir_proto as proto;
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// How long the running host may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// See the module text. Made up by tests.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// What the daemon of these settings says, if one runs.
    pub host: Option<RunningHost>,
    /// The limits of the running host, or of this process where there is none.
    pub limits: Limits,
    pub memory: Memory,
    pub ports: Vec<Port>,
    pub data_dir: Folder,
    /// `node.socket` and `node.control`.
    pub sockets: Vec<Socket>,
    pub user: u32,
    pub clock: Clock,
    pub kernel: Kernel,
    pub rdma: Rdma,
    pub cuda: Cuda,
}

#[derive(Clone, Debug, Default)]
pub struct RunningHost {
    pub pid: Option<u32>,
    pub version: String,
    /// Parts that are not ready, with what they say.
    pub not_ready: Vec<(String, String)>,
    /// Other hosts that are not up, with the reason.
    pub peers_down: Vec<(String, String)>,
}

/// `None` means that there is no limit, or that it is not known.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    pub files: Option<u64>,
    pub locked_bytes: Option<u64>,
    pub address_bytes: Option<u64>,
}

#[derive(Clone, Debug, Default)]
pub struct Memory {
    pub total_bytes: u64,
    pub available_bytes: u64,
    /// Reserved pages of 2 MiB that nobody uses.
    pub huge_pages_free: u64,
    /// Whether the kernel makes huge pages of shared memory.
    pub are_transparent: bool,
}

/// A TCP address that the settings name.
#[derive(Clone, Debug)]
pub struct Port {
    pub key: &'static str,
    pub addr: SocketAddr,
    pub state: PortState,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortState {
    Free,
    /// The host of these settings listens there.
    Own,
    /// Another process listens there; its number and name, if this user may know.
    Taken(Option<(u32, String)>),
    /// The machine does not have that address, or it is not for this user.
    Unusable(String),
}

#[derive(Clone, Debug, Default)]
pub struct Folder {
    pub path: PathBuf,
    /// Owner and mode; `None` where the folder is not there yet.
    pub owner_mode: Option<(u32, u32)>,
    /// The nearest folder above that is there, and whether this user may write to it.
    pub parent: (PathBuf, bool),
    pub free_bytes: Option<u64>,
}

#[derive(Clone, Debug)]
pub struct Socket {
    pub key: &'static str,
    pub path: PathBuf,
    pub state: SocketState,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SocketState {
    Absent,
    /// A host answers there; the mode of the file.
    Answers(u32),
    /// A file of a host that is gone. It is replaced at the next start.
    LeftOver,
    NotASocket,
    /// This user may not connect.
    Closed(String),
}

#[derive(Clone, Debug, Default)]
pub struct Clock {
    /// Seconds since 1970.
    pub wall_s: u64,
    pub source: String,
    /// How far the wall clocks of other hosts are ahead, in seconds, or why that is not known.
    pub peers: Vec<(String, Result<i64, NoClock>)>,
}

/// Why another host's clock is not known.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NoClock {
    #[error("the name has no address: {reason}")]
    Address { reason: String },
    #[error("{reason}")]
    Tls { reason: String },
    #[error("it does not answer: {reason}")]
    Silent { reason: String },
    #[error("it tells no date")]
    Undated,
    #[error("its date {date:?} does not read")]
    Date { date: String },
}

#[derive(Clone, Debug, Default)]
pub struct Kernel {
    pub release: String,
    /// Why `io_uring` and `memfd` cannot be used, if they cannot.
    pub io_uring: Option<String>,
    pub memfd: Option<String>,
}

#[derive(Clone, Debug, Default)]
pub struct Rdma {
    pub library: Option<PathBuf>,
    pub devices: Vec<String>,
    /// Whether this user may open a device's file below `/dev/infiniband`.
    pub may_open: bool,
}

#[derive(Clone, Debug, Default)]
pub struct Cuda {
    pub library: Option<PathBuf>,
    pub device: bool,
    /// PCI functions that are GPUs of NVIDIA, with a driver or without.
    pub cards: usize,
}

impl Facts {
    /// Looks. Nothing is changed; a port is bound for a moment where no process listens on it.
    pub fn gather(config: &Config, clocks: &[String], authority: Option<&Path>) -> Self {
        let host = running(config);
        let pid = host.as_ref().and_then(|host| host.pid);
        Self {
            limits: limits(pid),
            memory: memory(),
            ports: ports(config, pid),
            data_dir: folder(&config.node.data_dir),
            sockets: vec![
                socket("node.socket", &config.node.socket),
                socket("node.control", &config.node.control),
            ],
            user: rustix::process::geteuid().as_raw(),
            clock: clock(clocks, authority),
            kernel: kernel(),
            rdma: rdma(),
            cuda: cuda(),
            host,
        }
    }
}

/// Asks the host behind the control socket.
fn running(config: &Config) -> Option<RunningHost> {
    let path = &config.node.control;
    let stream = connect_unix(path, ANSWER).ok()?;
    let pid = rustix::net::sockopt::socket_peercred(&stream).ok().map(|peer| peer.pid.as_raw_nonzero().get());
    drop(stream);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let asked = runtime.block_on(async {
        let ask = async {
            let mut control = Control::connect(&ControlAddr::Unix(path.clone()), "").await.ok()?;
            let info = control.node.info(proto::InfoRequest {}).await.ok()?.into_inner();
            let ready = control.node.ready(proto::ReadyRequest {}).await.ok()?.into_inner();
            let peers = control.node.peers(proto::PeersRequest {}).await.ok()?.into_inner();
            Some((info, ready, peers))
        };
        tokio::time::timeout(ANSWER, ask).await.ok().flatten()
    });
    let silent = vec![("control".to_owned(), format!("{} does not answer", path.display()))];
    let pid = pid.and_then(|pid| u32::try_from(pid).ok());
    let Some((info, ready, peers)) = asked else {
        return Some(RunningHost { pid, not_ready: silent, ..RunningHost::default() });
    };
    let not_ready = ready.components.into_iter().filter(|part| !part.ready);
    let down = peers.peers.into_iter().filter(|peer| peer.state != "up");
    Some(RunningHost {
        pid,
        version: info.version,
        not_ready: not_ready.map(|part| (part.name, part.detail)).collect(),
        peers_down: down.map(|peer| (peer.name, format!("{} {}", peer.state, peer.reason))).collect(),
    })
}

fn limits(pid: Option<u32>) -> Limits {
    let of = |pid: String| fs::read_to_string(format!("/proc/{pid}/limits")).ok();
    let text = pid.and_then(|pid| of(pid.to_string())).or_else(|| of("self".to_owned())).unwrap_or_default();
    let soft = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse().ok()
    };
    Limits {
        files: soft("Max open files"),
        locked_bytes: soft("Max locked memory"),
        address_bytes: soft("Max address space"),
    }
}

fn memory() -> Memory {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let number = |name: &str| -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    };
    let pages = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    Memory {
        total_bytes: number("MemTotal") << 10,
        available_bytes: number("MemAvailable") << 10,
        huge_pages_free: fs::read_to_string(pages).ok().and_then(|n| n.trim().parse().ok()).unwrap_or(0),
        are_transparent: placing::are_transparent(),
    }
}

fn ports(config: &Config, own: Option<u32>) -> Vec<Port> {
    let cluster = config.cluster.is_on().then_some(config.cluster.listen);
    let listen = &config.listen;
    let named = [
        ("listen.grpc", listen.grpc.0),
        ("listen.http", Some(listen.http)),
        ("listen.data", listen.data.0),
        ("cluster.listen", cluster),
    ];
    let named = named.into_iter().filter_map(|(key, addr)| Some((key, addr?)));
    named.map(|(key, addr)| Port { key, addr, state: port(addr, own) }).collect()
}

fn port(addr: SocketAddr, own: Option<u32>) -> PortState {
    let error = match TcpListener::bind(addr) {
        Ok(_) => return PortState::Free,
        Err(error) => error,
    };
    if error.kind() != std::io::ErrorKind::AddrInUse {
        return PortState::Unusable(error.to_string());
    }
    match holder(addr.port()) {
        Some((pid, _)) if Some(pid) == own => PortState::Own,
        holder => PortState::Taken(holder),
    }
}

/// The process that listens on a port of this machine, if this user may see its descriptors.
fn holder(port: u16) -> Option<(u32, String)> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| fs::read_to_string(path).unwrap_or_default());
    let sockets: Vec<String> =
        tables.iter().flat_map(|table| table.lines()).filter_map(listener(port)).collect();
    let processes = fs::read_dir("/proc").ok()?.flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()).find_map(|pid| {
        let files = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
        let mut links = files.filter_map(|file| fs::read_link(file.path()).ok());
        links.any(|link| sockets.iter().any(|socket| link.as_os_str() == socket.as_str())).then(|| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            (pid, name.trim().to_owned())
        })
    })
}

/// A line of the kernel's table as the name of the socket that listens on `port`.
fn listener(port: u16) -> impl Fn(&str) -> Option<String> {
    const LISTENING: &str = "0A";
    move |line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (local, state, inode) = (words.get(1)?, words.get(3)?, words.get(9)?);
        let at = u16::from_str_radix(local.rsplit(':').next()?, 16).ok()?;
        (at == port && *state == LISTENING).then(|| format!("socket:[{inode}]"))
    }
}

fn folder(path: &Path) -> Folder {
    let found = path.metadata().ok();
    let parent = path.ancestors().find(|above| above.is_dir()).unwrap_or(Path::new("/"));
    let writable = rustix::fs::access(parent, rustix::fs::Access::WRITE_OK).is_ok();
    let disk = rustix::fs::statvfs(parent).ok();
    Folder {
        path: path.into(),
        owner_mode: found.map(|folder| (folder.uid(), folder.mode() & 0o7777)),
        parent: (parent.into(), writable),
        free_bytes: disk.map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize)),
    }
}

fn socket(key: &'static str, path: &Path) -> Socket {
    let state = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => SocketState::Absent,
        Err(error) => SocketState::Closed(error.to_string()),
        Ok(file) if !file.file_type().is_socket() => SocketState::NotASocket,
        Ok(file) => match connect_unix(path, ANSWER) {
            Ok(_) => SocketState::Answers(file.mode() & 0o777),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => SocketState::LeftOver,
            Err(error) => SocketState::Closed(error.to_string()),
        },
    };
    Socket { key, path: path.into(), state }
}

fn clock(others: &[String], authority: Option<&Path>) -> Clock {
    let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let source = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    Clock {
        wall_s: now(),
        source: fs::read_to_string(source).unwrap_or_default().trim().to_owned(),
        peers: others.iter().map(|addr| (addr.clone(), clock_of(addr, authority, now))).collect(),
    }
}

/// How far the clock of the host with this HTTP address is ahead, to the second. Uses the authority of its certificate if
/// it speaks TLS.
fn clock_of(to: &str, authority: Option<&Path>, now: impl Fn() -> u64) -> Result<i64, NoClock> {
    use std::io::Read;
    let tls = |authority: &Path| {
        let name = to.rsplit_once(':').map_or(to, |(name, _)| name.trim_matches(['[', ']']));
        ClientTls::read(&ClientFiles { authority: authority.to_owned(), identity: None }, name)
    };
    let tls = authority.map(tls).transpose();
    let tls = tls.map_err(|error| NoClock::Tls { reason: error.to_string() })?;
    let unnamed = |reason: String| NoClock::Address { reason };
    let addrs = std::net::ToSocketAddrs::to_socket_addrs(to);
    let addr = addrs.map_err(|error| unnamed(error.to_string()))?.next();
    let addr = addr.ok_or_else(|| unnamed("it resolves to none".to_owned()))?;
    let asked = || {
        let stream = std::net::TcpStream::connect_timeout(&addr, ANSWER)?;
        let mut stream = tls.map_or(Ok(Stream::Tcp(stream.try_clone()?)), |tls| tls.stream(stream))?;
        stream.set_timeouts(ANSWER)?;
        stream.write_all(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.take(4096).read_to_string(&mut text)?;
        std::io::Result::Ok(text)
    };
    let answer = asked().map_err(|error| NoClock::Silent { reason: error.to_string() })?;
    let date = answer.lines().find_map(|line| line.strip_prefix("date: ")).ok_or(NoClock::Undated)?;
    let theirs = http_date(date.trim()).ok_or_else(|| NoClock::Date { date: date.to_owned() })?;
    Ok(theirs as i64 - now() as i64)
}

/// Seconds since 1970 of a date as HTTP writes it: `Sun, 22 Nov 2026 06:37:00 GMT`.
fn http_date(text: &str) -> Option<u64> {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let words: Vec<&str> = text.split_whitespace().collect();
    let [_, day, month, year, time, "GMT"] = words[..] else { return None };
    let month = 1 + MONTHS.iter().position(|name| *name == month)?;
    let date = humantime::parse_rfc3339(&format!("{year}-{month:02}-{day}T{time}Z")).ok()?;
    date.duration_since(SystemTime::UNIX_EPOCH).ok().map(|since| since.as_secs())
}

fn kernel() -> Kernel {
    Kernel {
        release: rustix::system::uname().release().to_string_lossy().into_owned(),
        io_uring: nvme::io_uring_refusal().map(|error| error.to_string()),
        memfd: HostPool::new(4096, true).err().map(|error| error.to_string()),
    }
}

fn rdma() -> Rdma {
    let files = fs::read_dir("/dev/infiniband").into_iter().flatten().flatten().map(|file| file.path());
    let open = rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK;
    let mut verbs = files.filter(|path| path.to_string_lossy().contains("uverbs"));
    Rdma {
        library: library("libibverbs.so.1"),
        devices: names(Path::new("/sys/class/infiniband")),
        may_open: verbs.any(|path| rustix::fs::access(path, open).is_ok()),
    }
}

fn cuda() -> Cuda {
    let device = ["/dev/nvidiactl", "/dev/dxg"].into_iter().any(|path| Path::new(path).exists());
    let found = kvasir_dataplane::topology::Topology::probe(Path::new("/sys"), Default::default());
    let cards = found.map_or(0, |found| found.machine().gpus.len());
    Cuda { library: library("libcuda.so.1"), device, cards }
}

/// Where the loader of programs would find a library.
fn library(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let triplet = format!("{}-linux-gnu", std::env::consts::ARCH);
    let usual = ["/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib", "/usr/lib/wsl/lib"];
    let usual = usual.into_iter().map(PathBuf::from);
    let of_architecture = ["/lib", "/usr/lib"].map(|folder| Path::new(folder).join(&triplet));
    let mut folders = std::env::split_paths(&path).chain(of_architecture).chain(usual);
    folders.find_map(|folder| Some(folder.join(name)).filter(|file| file.exists()))
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_port_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let (pid, name) = holder(addr.port()).unwrap();
        assert_eq!(pid, std::process::id(), "{name}");
        assert_eq!(port(addr, Some(pid)), PortState::Own);
        assert_eq!(port(addr, None), PortState::Taken(Some((pid, name))));
        drop(listener);
        assert_eq!(port(addr, None), PortState::Free);
        assert!(matches!(port("192.0.2.1:0".parse().unwrap(), None), PortState::Unusable(_)));
    }

    #[test]
    fn sockets_tell_what_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.sock");
        let state = || socket("node.socket", &path).state;
        assert_eq!(state(), SocketState::Absent);
        fs::write(&path, "").unwrap();
        assert_eq!(state(), SocketState::NotASocket);
        fs::remove_file(&path).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(matches!(state(), SocketState::Answers(_)));
        drop(listener);
        assert_eq!(state(), SocketState::LeftOver);
    }

    #[test]
    fn dates_of_http_read() {
        assert_eq!(http_date("Thu, 01 Jan 1970 00:01:05 GMT"), Some(65));
        assert_eq!(http_date("Sun, 22 Nov 2026 06:37:00 GMT"), Some(1_795_329_420));
        assert_eq!(http_date("yesterday"), None);
    }
}
