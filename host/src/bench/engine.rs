//! What transfers cost here, each with what it is judged by, measured in the same run.
//!
//! The reference for TCP is a plain blocking socket loop: one thread writes pieces of the same size without being
//! asked, the other reads them. It pays for no requests, no completions and no second party; its rate is the most that
//! sockets give here. It moves the same piece of memory again and again, which stays in the processor's caches; the row
//! `socket/...` is the same loop over as much memory as the transfers use. Rounds alternate, and medians are reported, so
//! that other work on the machine hits all.

mod sealed;

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::Row;
use super::local::{self, Setup};
use kvasir_dataplane::memory::host::HostPool;
use kvasir_dataplane::memory::region::Region;
use kvasir_dataplane::transfer::plan::{PlanConfig, Rail, Schedule, Work};
use kvasir_dataplane::transfer::{Batch, Class, Engine, EngineConfig, Entry, Segment, Transfer};
use kvasir_dataplane::transport::node::{Node, Secret};
use kvasir_dataplane::transport::shm::{Shm, ShmConfig};
use kvasir_dataplane::transport::tcp::{Tcp, TcpConfig, Tls};
use kvasir_dataplane::transport::{Access, Direction, RemoteRange, Transport};

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// Measures the groups of rows whose first name is wanted. `round` is how long one round of one thing lasts; each has
/// `rounds` of them.
pub(super) fn run(round: Duration, rounds: usize, wanted: impl Fn(&str) -> bool) -> io::Result<Vec<Row>> {
    let bench = Bench::over_tcp(64 * MIB, None)?;
    let (mut rows, all) = (Vec::new(), round * rounds as u32);
    for (name, len, depth) in [("64KiB", 64 << 10, 64), ("1MiB", MIB, 16), ("16MiB", 16 * MIB, 2)] {
        if wanted(&format!("tcp/get/{name}")) {
            rows.extend(bench.bandwidth(name, len, depth, round, rounds)?);
        }
    }
    if wanted("tcp/get/4KiB") {
        rows.push(bench.small(round, rounds));
    }
    if wanted("tcp/latency/4KiB") {
        rows.push(bench.latency(all)?);
    }
    if wanted("tcp/batch/32x1MiB") {
        rows.push(bench.batches(round, rounds));
    }
    if wanted("class/decode-p99/unloaded") {
        rows.extend(bench.classes(all));
    }
    bench.check()?;
    if wanted("tls/get/1MiB") {
        rows.extend(sealed::rows(round, rounds)?);
    }
    if wanted("shm/entry") {
        rows.extend(shared_memory(all)?);
    }
    if wanted("plan/slice") {
        rows.push(planning(all));
    }
    if wanted("handover/first-layer") {
        rows.push(hand_over(rounds)?);
    }
    Ok(rows)
}

/// How long until the first of 32 layers can be read, and how long the whole hand-over takes.
fn hand_over(rounds: usize) -> io::Result<Row> {
    let (first, whole): (Vec<f64>, Vec<f64>) = super::first_layer::first_layer(rounds)?.into_iter().unzip();
    let ms = |times: Vec<f64>| median(times) * 1e3;
    Ok(Row::new("handover/first-layer", ms(first), "ms").beside(ms(whole)))
}

/// Two nodes on one machine, one rail between them.
struct Bench {
    engine: Engine,
    segment: Arc<Segment>,
    ours: Region,
    theirs: Region,
    server: Arc<dyn Transport>,
}

impl Bench {
    /// Over one TCP connection, encrypted if there is something to show: by the server, and by the client.
    fn over_tcp(bytes: u64, tls: Option<[Tls; 2]>) -> io::Result<Self> {
        let [server_tls, client_tls] = tls.map_or([None, None], |sides| sides.map(Some));
        let config = TcpConfig {
            listen: Some((Ipv4Addr::LOCALHOST, 0).into()),
            // Other work on the machine must not end a measurement.
            peer_timeout: PATIENCE,
            ..TcpConfig::default()
        };
        let node = |name: &str| Arc::new(Node::new(name, Secret::new(b"bench"), 1));
        let server_node = node("server");
        let server = Tcp::new(server_node.clone(), TcpConfig { tls: server_tls, ..config.clone() })?;
        let client = Tcp::new(node("client"), TcpConfig { listen: None, tls: client_tls, ..config })?;
        Self::over(bytes, &server_node, Arc::new(server), Arc::new(client))
    }

    fn over(
        bytes: u64,
        server_node: &Node,
        server: Arc<dyn Transport>,
        client: Arc<dyn Transport>,
    ) -> io::Result<Self> {
        let region = || HostPool::new(bytes, true).map(|pool| Region::of_pool(Arc::new(pool)));
        let (ours, theirs) = (region().map_err(io::Error::other)?, region().map_err(io::Error::other)?);
        let pattern: Vec<u8> = (0..bytes).map(|n| (n ^ (n >> 8) ^ (n >> 16)) as u8).collect();
        theirs.whole().map(|range| range.copy_in(&pattern));
        let export = server_node.exports.export("kv", vec![theirs.clone()], Access::Read, PATIENCE * 60);
        export.map_err(io::Error::other)?;
        let engine = Engine::new(EngineConfig::default(), vec![client])?;
        let address = server.address().unwrap_or_default();
        let peer = engine.connect(&[(0, address)]).map_err(io::Error::other)?;
        let segment = peer.open_segment("kv").map_err(io::Error::other)?;
        Ok(Self { engine, segment, ours, theirs, server })
    }

    /// The `n`-th read of `len` bytes, round and round the memory.
    fn entry(&self, n: u64, len: u64) -> Entry {
        let offset = n % (self.ours.len() / len) * len;
        Entry {
            direction: Direction::Read,
            segment: self.segment.clone(),
            local: self.ours.range(offset, len).into_iter().collect(),
            remote: vec![RemoteRange { region: 0, offset, len }],
        }
    }

    fn get(&self, first: u64, count: u64, len: u64) -> Transfer {
        self.get_as(Class::DecodeCritical, first, count, len)
    }

    fn get_as(&self, class: Class, first: u64, count: u64, len: u64) -> Transfer {
        let entries = (first..first + count).map(|n| self.entry(n, len)).collect();
        let batch = Batch { entries, ..Batch::new(class) };
        match self.engine.submit(batch) {
            Ok(transfer) => transfer,
            Err(error) => unreachable!("a batch of {count}: {error}"),
        }
    }

    /// Gets of `len` bytes for a round, `depth` at once. Returns how many were made.
    fn gets(&self, len: u64, depth: usize, round: Duration) -> Round {
        let mut flying = std::collections::VecDeque::new();
        let timer = Timer::start();
        let mut count = 0;
        while timer.start.elapsed() < round || count < depth as u64 {
            flying.push_back(self.get(count, 1, len));
            count += 1;
            if flying.len() >= depth {
                finish(flying.pop_front());
            }
        }
        flying.into_iter().for_each(|transfer| finish(Some(transfer)));
        timer.stop(count * len, count)
    }

    fn bandwidth(
        &self,
        name: &str,
        len: u64,
        depth: usize,
        round: Duration,
        rounds: usize,
    ) -> io::Result<Vec<Row>> {
        let (plain, wide) = (Plain::new(len, len)?, Plain::new(len, self.ours.len())?);
        let (mut ours, mut theirs, mut widely) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            theirs.push(plain.stream(round)?);
            ours.push(self.gets(len, depth, round));
            widely.push(wide.stream(round)?);
        }
        // The published figure is the one for the middle size.
        let cpu_name = if name == "1MiB" { "tcp/cpu".to_owned() } else { format!("tcp/cpu/{name}") };
        Ok(vec![
            Row::new(format!("tcp/get/{name}"), rate(&ours), "GB/s").beside(rate(&theirs)),
            Row::new(cpu_name, cpu(&ours), "CPU-s/GB").beside(cpu(&theirs)),
            Row::new(format!("socket/{name}"), rate(&widely), "GB/s").beside(rate(&theirs)),
            Row::new(format!("socket/cpu/{name}"), cpu(&widely), "CPU-s/GB").beside(cpu(&theirs)),
        ])
    }

    fn small(&self, round: Duration, rounds: usize) -> Row {
        let rates = (0..rounds).map(|_| self.gets(4096, 32, round)).map(|r| r.count as f64 / r.seconds);
        Row::new("tcp/get/4KiB", median(rates.collect()), "ops/s")
    }

    /// Beside a byte that is sent over a plain socket, and as many bytes that come back.
    fn latency(&self, time: Duration) -> io::Result<Row> {
        const LEN: usize = 4096;
        let times = self.times(LEN as u64, time);
        // It needs no path.
        let setup = Setup { each: time, socket: Path::new("") };
        let plain = local::plain_socket(&setup, LEN).map_err(io::Error::other)?;
        let p50 = at(&times, 0.5);
        let row = Row::new("tcp/latency/4KiB", p50, "us").beside(LEN as f64 / plain / 1e3);
        Ok(Row { p50: Some(p50), p99: Some(at(&times, 0.99)), ..row })
    }

    /// Urgent gets of `len` bytes, one after the other: how long each took in µs, sorted.
    fn times(&self, len: u64, time: Duration) -> Vec<f64> {
        let (start, mut times) = (Instant::now(), Vec::new());
        while times.is_empty() || start.elapsed() < time {
            let before = Instant::now();
            finish(Some(self.get(times.len() as u64, 1, len)));
            times.push(before.elapsed().as_secs_f64() * 1e6);
        }
        times.sort_by(f64::total_cmp);
        times
    }

    /// What an urgent get of 64 KiB takes at the 99th percentile, on an idle rail and beside replication that has
    /// always more to send than the rail takes. Rounds of both alternate.
    fn classes(&self, time: Duration) -> Vec<Row> {
        const LEN: u64 = 64 << 10;
        const ROUNDS: u32 = 4;
        let (mut unloaded, mut loaded) = (Vec::new(), Vec::new());
        let (mut replicated, mut seconds) = (0, 0.0);
        for _ in 0..ROUNDS {
            unloaded.extend(self.times(LEN, time / ROUNDS));
            let ended = AtomicBool::new(false);
            thread::scope(|scope| {
                let start = Instant::now();
                let backlog = scope.spawn(|| self.replicate(&ended));
                loaded.extend(self.times(LEN, time / ROUNDS));
                ended.store(true, Ordering::Release);
                seconds += start.elapsed().as_secs_f64();
                replicated += backlog.join().unwrap_or_default();
            });
        }
        unloaded.sort_by(f64::total_cmp);
        loaded.sort_by(f64::total_cmp);
        let row = |name: &str, times: &[f64]| {
            let p99 = at(times, 0.99);
            let row = Row::new(format!("class/decode-p99/{name}"), p99, "us");
            Row { p50: Some(at(times, 0.5)), p99: Some(p99), ..row }
        };
        let idle = at(&unloaded, 0.99);
        let rate = replicated as f64 / seconds / 1e9;
        vec![
            row("unloaded", &unloaded),
            row("loaded", &loaded).beside(idle),
            Row::new("class/replication/loaded", rate, "GB/s"),
        ]
    }

    /// Replication that never runs dry, until it is told to end. Returns how many bytes had arrived by then.
    fn replicate(&self, ended: &AtomicBool) -> u64 {
        let more = |n: u64| self.get_as(Class::Replication, n * 16, 16, MIB);
        let mut flying: std::collections::VecDeque<Transfer> = (0..4).map(more).collect();
        let mut bytes = 0;
        // A round can end before the first batch has arrived: it counts all the same.
        while bytes == 0 || !ended.load(Ordering::Acquire) {
            finish(flying.pop_front());
            flying.push_back(more(0));
            bytes += 16 * MIB;
        }
        flying.into_iter().for_each(|transfer| finish(Some(transfer)));
        bytes
    }

    fn batches(&self, round: Duration, rounds: usize) -> Row {
        let rate = |submit: &dyn Fn(u64)| {
            let timer = Timer::start();
            let mut count = 0;
            while count == 0 || timer.start.elapsed() < round {
                submit(count * 32);
                count += 1;
            }
            let done = timer.stop(count * 32 * MIB, count);
            done.bytes as f64 / done.seconds / 1e9
        };
        let together = |first| finish(Some(self.get(first, 32, MIB)));
        let apart = |first| {
            let all: Vec<Transfer> = (first..first + 32).map(|n| self.get(n, 1, MIB)).collect();
            all.into_iter().for_each(|transfer| finish(Some(transfer)));
        };
        let (mut batches, mut singles) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            singles.push(rate(&apart));
            batches.push(rate(&together));
        }
        Row::new("tcp/batch/32x1MiB", median(batches), "GB/s").beside(median(singles))
    }

    /// The bytes moved are the right ones.
    fn check(&self) -> io::Result<()> {
        finish(Some(self.get(0, 4, 16 * MIB)));
        let bytes = |region: &Region| {
            let mut out = vec![0; region.len() as usize];
            region.whole().map(|range| range.copy_out(&mut out));
            out
        };
        if bytes(&self.ours) == bytes(&self.theirs) {
            Ok(())
        } else {
            Err(io::Error::other("other bytes arrived"))
        }
    }
}

/// The value below which a share of sorted values lies.
fn at(sorted: &[f64], share: f64) -> f64 {
    sorted.get(((sorted.len() as f64 - 1.0) * share) as usize).copied().unwrap_or(0.0)
}

fn finish(transfer: Option<Transfer>) {
    if let Some(transfer) = transfer {
        let status = transfer.wait(Instant::now() + PATIENCE);
        assert!(
            status.pending == 0 && status.failed == 0,
            "a measured transfer failed: {:?}",
            transfer.poll_entry(0)
        );
    }
}

struct Round {
    bytes: u64,
    count: u64,
    seconds: f64,
    cpu_seconds: f64,
}

struct Timer {
    start: Instant,
    cpu: f64,
}

impl Timer {
    fn start() -> Self {
        Self { start: Instant::now(), cpu: process_cpu() }
    }

    fn stop(self, bytes: u64, count: u64) -> Round {
        let (seconds, cpu_seconds) = (self.start.elapsed().as_secs_f64(), process_cpu() - self.cpu);
        Round { bytes, count, seconds, cpu_seconds }
    }
}

/// GB/s, in the median of rounds.
fn rate(rounds: &[Round]) -> f64 {
    median(rounds.iter().map(|round| round.bytes as f64 / round.seconds / 1e9).collect())
}

/// Seconds of processor time for a GB, in the median of rounds.
fn cpu(rounds: &[Round]) -> f64 {
    median(rounds.iter().map(|round| round.cpu_seconds / (round.bytes as f64 / 1e9)).collect())
}

/// CPU time of all threads of this process: both sides of a transfer.
fn process_cpu() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn thread_cpu() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// The reference: sockets and nothing else.
struct Plain {
    len: usize,
    /// Bytes of each side that pieces come from and go to, round and round.
    memory: usize,
    listener: TcpListener,
}

impl Plain {
    fn new(len: u64, memory: u64) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        Ok(Self { len: len as usize, memory: memory as usize, listener })
    }

    fn stream(&self, round: Duration) -> io::Result<Round> {
        let (reader, writer) = self.pair()?;
        self.measure(reader, writer, round)
    }

    fn pair(&self) -> io::Result<(TcpStream, TcpStream)> {
        let reader = TcpStream::connect(self.listener.local_addr()?)?;
        let (writer, _) = self.listener.accept()?;
        writer.set_nodelay(true)?;
        Ok((reader, writer))
    }

    /// What comes through in a round, over whatever lies above the sockets.
    fn measure(
        &self,
        mut reader: impl Read,
        mut writer: impl Write + Send + 'static,
        round: Duration,
    ) -> io::Result<Round> {
        let (len, source) = (self.len, vec![7; self.memory]);
        // The writer ends when the reader has gone.
        let send = move || source.chunks(len).cycle().try_for_each(|piece| writer.write_all(piece));
        let sender = thread::spawn(send);
        // Filled with a value other than 0, so that the system has allocated the memory before the timing begins.
        let mut target = vec![1; self.memory];
        reader.read_exact(&mut target[..len])?;
        let timer = Timer::start();
        let mut count = 0;
        while count == 0 || timer.start.elapsed() < round {
            let start = count as usize % (self.memory / len) * len;
            reader.read_exact(&mut target[start..start + len])?;
            count += 1;
        }
        let done = timer.stop(count * len as u64, count);
        drop(reader);
        let _ = sender.join();
        Ok(done)
    }
}

/// Batches of small entries over shared memory, through the engine; and the cost of lending 1 MiB in place.
fn shared_memory(time: Duration) -> io::Result<Vec<Row>> {
    const BATCH: u64 = 4096;
    let folder = tempfile::tempdir()?;
    let node = |name: &str| Arc::new(Node::new(name, Secret::new(b"bench"), 1));
    let server_node = node("server");
    let server = Shm::new(
        server_node.clone(),
        ShmConfig { listen: Some(folder.path().join("shm.sock")), ..ShmConfig::default() },
    )?;
    let client = Arc::new(Shm::new(node("client"), ShmConfig::default())?);
    let bench = Bench::over(16 * MIB, &server_node, Arc::new(server), client.clone())?;
    let (mut count, start) = (0, Instant::now());
    while count == 0 || start.elapsed() < time {
        finish(Some(bench.get(count, BATCH, 4096)));
        count += BATCH;
    }
    let entries = Row::new("shm/entry", count as f64 / start.elapsed().as_secs_f64(), "entries/s");

    let address = bench.server.address().unwrap_or_default();
    let endpoint = client.connect(&address).map_err(io::Error::other)?;
    let grant = endpoint.open("kv").map_err(io::Error::other)?;
    let mut copy = vec![0; MIB as usize];
    let (mut mapped, mut copied, mut times) = (0.0, 0.0, 0u32);
    let start = Instant::now();
    while times == 0 || start.elapsed() < time {
        let offset = u64::from(times % 16) * MIB;
        let before = Instant::now();
        let lent = endpoint.map(&grant, grant.range(offset, MIB)).map_err(io::Error::other)?;
        let between = Instant::now();
        lent.bytes().copy_to(&mut copy);
        // Otherwise the compiler sees that nobody reads the copy, and makes none.
        std::hint::black_box(&mut copy[..]);
        mapped += (between - before).as_secs_f64() * 1e6;
        copied += between.elapsed().as_secs_f64() * 1e6;
        times += 1;
    }
    let (mapped, copied) = (mapped / f64::from(times), copied / f64::from(times));
    Ok(vec![entries, Row::new("shm/map/1MiB", mapped, "us").beside(copied)])
}

/// Planning a slice: choice of class and rail, cut, issue, and the account of its completion. In CPU time: it is pure
/// computation.
fn planning(time: Duration) -> Row {
    const ENTRY: u64 = 1 << 30;
    let config = PlanConfig::default();
    let mut rails: Vec<Rail> = (0..4).map(|_| Rail::new(&config)).collect();
    let mut schedule = Schedule::default();
    let mut flying = std::collections::VecDeque::new();
    let (mut slices, mut now) = (0u64, 0u64);
    let (start, cpu) = (Instant::now(), thread_cpu());
    while slices == 0 || start.elapsed() < time {
        for class in [Class::DecodeCritical, Class::Prefill, Class::Replication] {
            let token = Arc::new(());
            schedule.push(
                class,
                Work {
                    token,
                    offset: 0,
                    len: ENTRY,
                    ranges: 1,
                    merge_key: (0, 0),
                    avoid: 0,
                    order: Default::default(),
                },
            );
        }
        loop {
            now += 100_000;
            if let Ok(slice) = schedule.next(&rails, &config, [u64::MAX; 3], now) {
                let issued = rails[slice.rail].issue(slice.class, slice.len, now);
                flying.push_back((slice, issued));
                slices += 1;
            } else if let Some((slice, issued)) = flying.pop_front() {
                rails[slice.rail].complete(issued, slice.len, slice.len, now);
            } else {
                break;
            }
        }
    }
    Row::new("plan/slice", (thread_cpu() - cpu) * 1e9 / slices as f64, "ns")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The smallest size, so that it cannot rot: everything is measured and the bytes are right.
    #[test]
    fn smoke() {
        let rows = run(Duration::from_millis(1), 1, |_| true).unwrap();
        assert_eq!(rows.len(), 24);
        assert!(rows.iter().all(|row| row.value > 0.0 && row.reference.is_none_or(|r| r > 0.0)), "{rows:?}");
    }
}
