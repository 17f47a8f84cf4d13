//! A host as its users run it: the real binary in a process of its own.

use kvasir_client::control::ControlAddr;
use kvasir_client::data::{Client, ClientError, Endpoint, Options};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

pub(crate) const KVASIR: &str = env!("CARGO_BIN_EXE_kvasir");

/// A running host; dropping it kills it.
pub(crate) struct Host {
    child: Child,
    addrs: serde_json::Value,
    log: Arc<Mutex<String>>,
}

/// Of a host's own log: what is kept, in bytes.
const LOG_BYTES: usize = 4 << 20;

impl Host {
    pub(crate) fn start(dir: &Path) -> Self {
        Self::start_with(dir, &[])
    }

    /// With more settings, `key=value` each. Returns once it is ready.
    pub(crate) fn start_with(dir: &Path, set: &[&str]) -> Self {
        let mut command = serve(dir);
        for set in set {
            command.args(["--set", set]);
        }
        Self::spawn(command, &format!("{set:?}"))
    }

    /// With more flags of `kvasir serve`.
    pub(crate) fn start_by(dir: &Path, flags: &[&str]) -> Self {
        let mut command = serve(dir);
        command.args(flags);
        Self::spawn(command, &format!("{flags:?}"))
    }

    /// Where a process may map that much and no more.
    pub(crate) fn start_within(dir: &Path, address_space_kib: u64) -> Self {
        let inner = serve(dir);
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -v {address_space_kib} && exec \"$0\" \"$@\"")]);
        command.arg(inner.get_program()).args(inner.get_args());
        Self::spawn(command, &format!("ulimit -v {address_space_kib}"))
    }

    fn spawn(mut command: Command, what: &str) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let stderr = child.stderr.take().unwrap();
        let Ok(addrs) = serde_json::from_str(&line) else {
            let _ = child.kill();
            panic!("no host with {what}: {}", std::io::read_to_string(stderr).unwrap_or_default());
        };
        let log = Arc::<Mutex<String>>::default();
        let kept = Arc::clone(&log);
        // A pipe nobody reads would block the host once it is full.
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
                let mut kept = kept.lock().unwrap();
                if kept.len() < LOG_BYTES {
                    *kept += &(String::from_utf8_lossy(&line) + "\n");
                }
            }
        });
        Self { child, addrs, log }
    }

    /// What the host has written to its own log so far.
    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// On ports that stay free while it is down, for [`Self::restart`].
    pub(crate) fn start_to_restart(dir: &Path, set: &[&str]) -> Self {
        let ports = ["http", "data"].map(|key| format!("listen.{key}=127.0.0.1:{}", quiet_port()));
        let all: Vec<_> = ports.iter().map(String::as_str).chain(set.iter().copied()).collect();
        Self::start_with(dir, &all)
    }

    /// The same folder, ports and socket as `self` had, after a `kill -9`.
    pub(crate) fn restart(mut self, dir: &Path, set: &[&str]) -> Self {
        let ports = ["http", "data"].map(|key| format!("listen.{key}={}", self.addr(key)));
        let socket = self.addr("socket").to_owned();
        self.kill();
        let all: Vec<_> = ports.iter().map(String::as_str).chain(set.iter().copied()).collect();
        let again = Self::start_with(dir, &all);
        assert_eq!(again.addr("socket"), socket);
        again
    }

    /// Address under that name in the line the host announces itself with.
    pub(crate) fn addr(&self, key: &str) -> &str {
        self.addrs[key].as_str().unwrap()
    }

    pub(crate) fn control(&self) -> ControlAddr {
        ControlAddr::Unix(self.addr("control").into())
    }

    /// A token of this host that allows everything, made by its own command.
    pub(crate) fn token(&self) -> String {
        self.token_for(&["--role", "operator"])
    }

    /// A page, over the control socket. A host that hangs fails the test, and does not hang it.
    pub(crate) fn page(&self, path: &str) -> String {
        let mut stream = std::os::unix::net::UnixStream::connect(self.addr("control")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        std::io::read_to_string(stream).unwrap()
    }

    pub(crate) fn token_for(&self, args: &[&str]) -> String {
        let mut command = Command::new(KVASIR);
        command.args(["token", "new"]).args(args).arg("--set");
        command.arg(format!("node.data_dir={}", Path::new(self.addr("control")).parent().unwrap().display()));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    pub(crate) fn endpoint(&self, transport: Transport) -> Endpoint {
        match transport {
            Transport::Unix => Endpoint::Unix(self.addr("socket").into()),
            Transport::Tcp => Endpoint::Tcp(self.addr("data").parse().unwrap()),
        }
    }

    pub(crate) fn client(&self, transport: Transport) -> Client {
        self.try_client(transport).unwrap()
    }

    pub(crate) fn try_client(&self, transport: Transport) -> Result<Client, ClientError> {
        let token = match transport {
            Transport::Unix => String::new(),
            Transport::Tcp => self.token(),
        };
        // Longer than what hosts wait for space by `PATIENT`.
        let timeout = Duration::from_secs(100);
        Client::connect(&self.endpoint(transport), Options { token, timeout, ..Options::default() })
    }

    pub(crate) fn run(&self, args: &[&str], input: &[u8]) -> Output {
        self.run_with(args, input, "")
    }

    /// As a caller with a token.
    pub(crate) fn run_with(&self, args: &[&str], input: &[u8], token: &str) -> Output {
        let mut command = Command::new(KVASIR);
        command.args(args);
        command.env("KVASIR_HOST", format!("unix:{}", self.addr("socket")));
        command.env("KVASIR_TOKEN", token);
        command.env("KVASIR_GRPC", format!("unix:{}", self.addr("control")));
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn().unwrap();
        // A command that refuses its arguments does not read.
        let _ = child.stdin.take().unwrap().write_all(input);
        child.wait_with_output().unwrap()
    }

    /// Exit code and output of a command.
    pub(crate) fn check(&self, args: &[&str], input: &[u8], code: i32, part: &str) -> String {
        let output = self.run(args, input);
        let text = [&output.stdout[..], &output.stderr[..]].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
        assert!(text.contains(part), "{args:?}: `{text}` lacks `{part}`");
        text
    }

    /// The row of one slot in `kvasir policy list --json`.
    pub(crate) fn policy(&self, slot: &str) -> serde_json::Value {
        let output = self.run(&["policy", "list", "--json"], b"");
        let list: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let mut rows = list["policies"].as_array().unwrap_or_else(|| panic!("{list}")).iter();
        rows.find(|row| row["slot"] == slot).unwrap_or_else(|| panic!("{slot} in {list}")).clone()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(crate) fn terminate(mut self) -> Option<i32> {
        self.signal(rustix::process::Signal::TERM);
        self.child.wait().unwrap().code()
    }

    /// `kill -9`; returns once the process is gone.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Ok(log) = self.log.lock()
        {
            let lines: Vec<&str> = log.lines().collect();
            println!("the host's last words:\n{}", lines[lines.len().saturating_sub(30)..].join("\n"));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A free port below those that the system gives to a caller that asks for any, so that nobody takes it by chance.
pub(crate) fn quiet_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 15_000 + (std::process::id() % 1_000) as u16 * 16;
    let next = || first + NEXT.fetch_add(1, Ordering::Relaxed) % 1_000;
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    std::iter::repeat_with(next).take(1_000).find(free).unwrap()
}

/// How a client reaches the blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Transport {
    Unix,
    Tcp,
}

/// Times that a busy machine does not reach; what is tested here does not depend on them.
const PATIENT: [&str; 5] = [
    "store.put_wait=60s",
    "store.lease_ttl=300s",
    "store.reservation_ttl=300s",
    "store.stall_timeout=60s",
    "conductor.instance_ttl=1h",
];

/// `kvasir serve` on a small pool and ports of the system's choice.
pub(crate) fn serve(dir: &Path) -> Command {
    Compiled::of_the_defaults().lend(dir);
    serve_anew(dir)
}

/// The same, and it compiles its policies itself.
fn serve_anew(dir: &Path) -> Command {
    let mut command = Command::new(KVASIR);
    command.args(["serve", "--json", "--set", "store.pool_bytes=4MiB"]);
    for set in PATIENT {
        command.args(["--set", set]);
    }
    command.arg("--set").arg(format!("node.data_dir={}", dir.display()));
    for key in ["http", "data"] {
        command.arg("--set").arg(format!("listen.{key}=127.0.0.1:0"));
    }
    command
}

/// Compiled code as a host keeps it, by file. Most of what a host takes to start is compiling the default policies.
struct Compiled(Vec<(PathBuf, Vec<u8>)>);

impl Compiled {
    const FOLDER: &str = "compiled";

    /// By the first host that starts.
    fn of_the_defaults() -> &'static Self {
        static COMPILED: OnceLock<Compiled> = OnceLock::new();
        COMPILED.get_or_init(|| {
            let dir = tempfile::tempdir().unwrap();
            drop(Host::spawn(serve_anew(dir.path()), "the default settings"));
            let (mut folders, mut files) = (vec![PathBuf::from(Self::FOLDER)], Vec::new());
            while let Some(folder) = folders.pop() {
                for entry in dir.path().join(&folder).read_dir().unwrap() {
                    let entry = entry.unwrap();
                    let path = folder.join(entry.file_name());
                    if entry.file_type().unwrap().is_dir() {
                        folders.push(path);
                    } else {
                        files.push((path, std::fs::read(entry.path()).unwrap()));
                    }
                }
            }
            Self(files)
        })
    }

    /// Into the folder of a host that is there, and has none.
    fn lend(&self, dir: &Path) {
        if !dir.is_dir() || dir.join(Self::FOLDER).exists() {
            return;
        }
        for (path, bytes) in &self.0 {
            let path = dir.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }
    }
}

/// The content of a block of that number: no two blocks agree, and no half of one passes for a whole.
pub(crate) fn content(number: u32, bytes: u32) -> Vec<u8> {
    let word = |i: u32| (u64::from(i) ^ (u64::from(number) << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..bytes.div_ceil(8)).flat_map(|i| word(i).to_le_bytes()).take(bytes as usize).collect()
}

/// Where a test makes its control calls. Connections live on a thread of their own: were they only looked after during a call, a test
/// that does something else for a minute would not answer the host's pings, and lose them.
pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}
