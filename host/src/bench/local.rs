//! Measures the store through this client; each figure has its reference from the same run.
//!
//! Client and server share one process, so CPU time is that of both. Every block read is verified.

use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvasir_dataplane::server::access::OwnUser;
use kvasir_dataplane::server::node::Node;
use kvasir_dataplane::server::{Listen, Server};
use kvasir_dataplane::{BlockKey, BlockMeta, Clock, DramConfig, DramStore, ServerConfig};
use rustix::time::{ClockId, clock_gettime};

use super::Row;
use kvasir_client::data::{Client, Endpoint, Options};

/// How long each figure is measured, and where the socket goes.
pub(super) struct Setup<'a> {
    pub each: Duration,
    pub socket: &'a std::path::Path,
}

pub(super) type Error = Box<dyn std::error::Error + Send + Sync>;

const MIB: usize = 1 << 20;
const POOL: usize = 256 * MIB;
/// Runs of a block in an engine's memory: 32 layers, K apart from V.
const RUNS: usize = 64;

/// Every figure of the DRAM tier and its transports.
pub(super) fn store(setup: &Setup<'_>) -> Result<Vec<Row>, Error> {
    let config = DramConfig { pool_bytes: POOL as u64, prefault: true, ..DramConfig::default() };
    let store = Arc::new(DramStore::open(config)?);
    let tcp = Some(([127, 0, 0, 1], 0).into());
    let listen = Listen { unix: Some(setup.socket.into()), tcp, ..Listen::default() };
    // Nobody else knows it, and it ends with this process.
    let token = format!("{:032x}", rand::random::<u128>());
    let gate = Arc::new(OwnUser { token: Some(token.clone()) });
    let node = Node::dram_only(Arc::clone(&store), Clock::start());
    let server = Server::start(node, &listen, gate, ServerConfig::default())?;
    let local = Client::connect(&Endpoint::Unix(setup.socket.into()), Options::default())?;
    let tcp = server.tcp_addr().ok_or("no TCP address")?;
    let remote = Client::connect(&Endpoint::Tcp(tcp), Options { token, ..Options::default() })?;

    let keys: Vec<BlockKey> =
        (0..1024).map(|n: u32| BlockKey::from_engine_hash("bench", &n.to_le_bytes())).collect();
    let page = vec![7; 4096];
    for &key in &keys {
        local.put(&BlockMeta::single(key, 4096), &page)?;
    }
    let mut rows = vec![
        exists("exists/1024", setup, || Ok(black_box(store.exists(&keys)?).len()))?,
        exists_on_two("exists/1024/two-threads", setup, &store, &keys)?,
        exists("exists/1024/socket", setup, || Ok(local.exists(&keys)?.len()))?,
        get_cpu("get/4KiB/cpu", setup, &local, &keys[..1])?.beside(ping_pong(setup)?),
        get_cpu("get/4KiB/cpu/batch-32", setup, &local, &keys[..32])?,
    ];
    for (name, size) in [("put/1MiB", MIB), ("put/16MiB", 16 * MIB)] {
        rows.push(put(name, setup, &store, &local, size)?);
    }
    rows.push(first_touch("put/1MiB/first-touch", setup, MIB)?);
    rows.push(put_gathered("put/gather/1MiB", setup, &store, &local, MIB)?);
    rows.push(get_scattered("get/scatter/1MiB", setup, &store, &local, MIB)?);
    rows.push(memcpy_in_cache("memcpy/in-cache/1MiB", setup, MIB)?);
    for (name, size) in [("tcp/get/64KiB", 64 << 10), ("tcp/get/1MiB", MIB), ("tcp/get/16MiB", 16 * MIB)] {
        rows.push(tcp_get(name, setup, &remote, size)?);
    }
    server.stop();
    Ok(rows)
}

/// Calls `work` for the given time. Returns the seconds of each call and the CPU seconds of all.
pub(super) fn measure(
    setup: &Setup<'_>,
    mut work: impl FnMut() -> Result<(), Error>,
) -> Result<(Vec<f64>, f64), Error> {
    work()?;
    let (start, cpu) = (Instant::now(), cpu_s());
    let mut calls = Vec::new();
    // At least once, however busy the machine is.
    while calls.is_empty() || start.elapsed() < setup.each {
        let call = Instant::now();
        work()?;
        calls.push(call.elapsed().as_secs_f64());
    }
    let cpu = cpu_s() - cpu;
    calls.sort_by(f64::total_cmp);
    Ok((calls, cpu))
}

/// p50 and p99 are of single calls, in microseconds.
pub(super) fn row(name: &str, unit: &'static str, value: f64, calls: &[f64], reference: Option<f64>) -> Row {
    let percentile = |p: f64| calls.get((calls.len() as f64 * p) as usize).map_or(0.0, |s| s * 1e6);
    let row = Row { p50: Some(percentile(0.5)), p99: Some(percentile(0.99)), ..Row::new(name, value, unit) };
    match reference {
        Some(reference) => row.beside(reference),
        None => row,
    }
}

fn exists(name: &str, setup: &Setup<'_>, work: impl Fn() -> Result<usize, Error>) -> Result<Row, Error> {
    let mut found = 0;
    let (calls, _) = measure(setup, || {
        found += work()?;
        Ok(())
    })?;
    let keys_per_call = (found / (calls.len() + 1)) as f64;
    let total: f64 = calls.iter().sum();
    Ok(row(name, "keys/s", keys_per_call * calls.len() as f64 / total, &calls, None))
}

/// Two threads that ask for the same keys at the same time, compared with one thread.
fn exists_on_two(name: &str, setup: &Setup<'_>, store: &DramStore, keys: &[BlockKey]) -> Result<Row, Error> {
    let ask = || {
        let measured = measure(setup, || {
            black_box(store.exists(keys)?);
            Ok(())
        });
        measured.map(|(calls, _)| (keys.len() as f64 * calls.len() as f64 / calls.iter().sum::<f64>(), calls))
    };
    let (alone, _) = ask()?;
    let (one, other) = std::thread::scope(|scope| {
        let other = scope.spawn(ask);
        (ask(), other.join())
    });
    let ((one, calls), (other, _)) = (one?, other.map_err(|_| "the second thread panicked")??);
    Ok(row(name, "keys/s", one + other, &calls, Some(alone)))
}

fn get_cpu(name: &str, setup: &Setup<'_>, client: &Client, keys: &[BlockKey]) -> Result<Row, Error> {
    let (calls, cpu) = measure(setup, || {
        let blocks = client.get(keys, 0)?;
        if blocks.iter().any(Option::is_none) {
            return Err("a stored block was not found".into());
        }
        Ok(())
    })?;
    Ok(row(name, "us", cpu * 1e6 / (calls.len() * keys.len()) as f64, &calls, None))
}

/// Words on lines of their own.
#[repr(align(128))]
struct Turn(AtomicU64);

/// Microseconds of processor time, of both threads, for each time that one gives the other a turn by a word in memory and gets it back: the
/// least that a question costs if nobody sleeps.
fn ping_pong(setup: &Setup<'_>) -> Result<f64, Error> {
    const OVER: u64 = u64::MAX;
    let (there, back) = (Turn(AtomicU64::new(0)), Turn(AtomicU64::new(0)));
    let wait = |turn: &Turn, beyond: u64| loop {
        match turn.0.load(Ordering::Acquire) {
            now if now > beyond => return now,
            _ => std::hint::spin_loop(),
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut turn = 0;
            while turn != OVER {
                turn = wait(&there, turn);
                back.0.store(turn, Ordering::Release);
            }
        });
        let mut turn = 0;
        let measured = measure(setup, || {
            turn += 1;
            there.0.store(turn, Ordering::Release);
            wait(&back, turn - 1);
            Ok(())
        });
        there.0.store(OVER, Ordering::Release);
        measured.map(|(calls, cpu)| cpu * 1e6 / calls.len() as f64)
    })
}

/// Puts into a pool of which nothing has been touched yet, compared with puts into the same places once they have been.
fn first_touch(name: &str, setup: &Setup<'_>, size: usize) -> Result<Row, Error> {
    let store = Arc::new(DramStore::open(DramConfig { pool_bytes: POOL as u64, ..DramConfig::default() })?);
    let socket = setup.socket.with_extension("untouched");
    let listen = Listen { unix: Some(socket.clone()), ..Listen::default() };
    let node = Node::dram_only(Arc::clone(&store), Clock::start());
    let server = Server::start(node, &listen, Arc::new(OwnUser { token: None }), ServerConfig::default())?;
    let client = Client::connect(&Endpoint::Unix(socket), Options::default())?;
    // So much of it that the second time finds no others.
    let (bytes, places) = (vec![3; size], POOL / 8 * 7 / size);
    let key = |n: usize| BlockKey::from_engine_hash(name, &n.to_le_bytes());
    let fill = || {
        let mut spent = Vec::with_capacity(places);
        for n in 0..places {
            let start = Instant::now();
            client.put(&BlockMeta::single(key(n), size as u32), &bytes)?;
            spent.push(start.elapsed().as_secs_f64());
        }
        store.remove(&(0..places).map(key).collect::<Vec<_>>(), 0)?;
        spent.sort_by(f64::total_cmp);
        Ok::<_, Error>(spent)
    };
    let (first, again) = (fill()?, fill()?);
    server.stop();
    // Not by the median: pages are populated ahead, as far as that keeps up.
    let mean = |spent: &[f64]| (spent.len() * size) as f64 / spent.iter().sum::<f64>() / 1e9;
    Ok(row(name, "GB/s", mean(&first), &first, Some(mean(&again))))
}

/// Puts that replace the oldest of as many blocks as half the pool holds, compared with a memcpy over as much
/// memory: what is stored is larger than the caches, so both end in main memory.
fn put(name: &str, setup: &Setup<'_>, store: &DramStore, client: &Client, size: usize) -> Result<Row, Error> {
    let bytes = vec![3; size];
    let put = |meta: &BlockMeta| Ok(client.put(meta, &bytes).map(drop)?);
    let spent = puts(name, setup, store, size, put)?;
    let copies = memcpy(setup, &bytes, POOL / 2 / size)?;
    Ok(row(name, "GB/s", rate(size, &spent), &spent, Some(rate(size, &copies))))
}

/// The same from an engine's memory, compared with a memcpy of the same runs over as much memory.
fn put_gathered(
    name: &str,
    setup: &Setup<'_>,
    store: &DramStore,
    client: &Client,
    size: usize,
) -> Result<Row, Error> {
    let (run, places) = (size / RUNS, POOL / 2 / size);
    let memory = vec![3; 2 * size];
    let runs: Vec<&[u8]> = memory.chunks(2 * run).map(|chunk| &chunk[..run]).collect();
    let put = |meta: &BlockMeta| {
        client.put_gathered(&[(*meta, &runs)])?.remove(0)?;
        Ok(())
    };
    let spent = puts(name, setup, store, size, put)?;
    let (mut target, mut n) = (vec![1; size * places], 0);
    let (copies, _) = measure(setup, || {
        let to = black_box(&mut target)[n % places * size..][..size].chunks_mut(run);
        to.zip(black_box(&runs)).for_each(|(to, from)| to.copy_from_slice(from));
        n += 1;
        Ok(())
    })?;
    Ok(row(name, "GB/s", rate(size, &spent), &spent, Some(rate(size, &copies))))
}

/// Fills the runs of the block with the number that it is given.
type Fill<'a> = dyn FnMut(usize, &mut [&mut [u8]]) -> Result<(), Error> + 'a;

/// Gets of one after the other of as many blocks as half the pool holds, into an engine's memory of that size in which each
/// layer keeps its blocks, compared with a memcpy of the same runs.
fn get_scattered(
    name: &str,
    setup: &Setup<'_>,
    store: &DramStore,
    client: &Client,
    size: usize,
) -> Result<Row, Error> {
    let (run, places) = (size / RUNS, POOL / 2 / size);
    let key = |n: usize| BlockKey::from_engine_hash(name, &n.to_le_bytes());
    let source = vec![5; size * places];
    for (n, bytes) in source.chunks(size).enumerate() {
        client.put(&BlockMeta::single(key(n), size as u32), bytes)?;
    }
    let mut memory = vec![0; size * places];
    // The runs of block `n`, and the seconds that `fill` takes for them.
    let mut each = |fill: &mut Fill<'_>| {
        let (mut spent, mut n) = (Vec::new(), 0);
        measure(setup, || {
            let layers = black_box(&mut memory).chunks_mut(run * places);
            let mut runs: Vec<&mut [u8]> =
                layers.map(|layer| &mut layer[n % places * run..][..run]).collect();
            let start = Instant::now();
            fill(n % places, &mut runs)?;
            spent.push(start.elapsed().as_secs_f64());
            n += 1;
            Ok(())
        })?;
        spent.sort_by(f64::total_cmp);
        Ok::<_, Error>(spent)
    };
    let spent = each(&mut |n, runs| match client.get_scattered(&[key(n)], 0, &mut [runs])?[0] {
        Some(_) => Ok(()),
        None => Err("a stored block was not found".into()),
    })?;
    let copies = each(&mut |n, runs| {
        let from = black_box(&source)[n * size..][..size].chunks(run);
        runs.iter_mut().zip(from).for_each(|(to, from)| to.copy_from_slice(from));
        Ok(())
    })?;
    store.remove(&(0..places).map(key).collect::<Vec<_>>(), 0)?;
    Ok(row(name, "GB/s", rate(size, &spent), &spent, Some(rate(size, &copies))))
}

/// Seconds of puts that replace the oldest of as many blocks as half the pool holds.
fn puts(
    name: &str,
    setup: &Setup<'_>,
    store: &DramStore,
    size: usize,
    put: impl Fn(&BlockMeta) -> Result<(), Error>,
) -> Result<Vec<f64>, Error> {
    let places = POOL / 2 / size;
    let key = |n: usize| BlockKey::from_engine_hash(name, &n.to_le_bytes());
    let (mut spent, mut n) = (Vec::new(), 0);
    measure(setup, || {
        if n >= places {
            store.remove(&[key(n - places)], 0)?;
        }
        let start = Instant::now();
        put(&BlockMeta::single(key(n), size as u32))?;
        spent.push(start.elapsed().as_secs_f64());
        n += 1;
        Ok(())
    })?;
    let left: Vec<BlockKey> = (n.saturating_sub(places)..n).map(key).collect();
    store.remove(&left, 0)?;
    spent.sort_by(f64::total_cmp);
    Ok(spent)
}

/// The same copy over and over, which stays in the caches: no put into a pool can be as fast.
fn memcpy_in_cache(name: &str, setup: &Setup<'_>, size: usize) -> Result<Row, Error> {
    let copies = memcpy(setup, &vec![3; size], 1)?;
    Ok(row(name, "GB/s", rate(size, &copies), &copies, None))
}

/// Seconds of each copy of `bytes` to one of `places` after the other.
fn memcpy(setup: &Setup<'_>, bytes: &[u8], places: usize) -> Result<Vec<f64>, Error> {
    let mut memory = vec![1; bytes.len() * places];
    let mut n = 0;
    let (copies, _) = measure(setup, || {
        let at = (n % places) * bytes.len();
        black_box(&mut memory)[at..at + bytes.len()].copy_from_slice(black_box(bytes));
        n += 1;
        Ok(())
    })?;
    Ok(copies)
}

fn tcp_get(name: &str, setup: &Setup<'_>, client: &Client, size: usize) -> Result<Row, Error> {
    let key = BlockKey::from_name(name);
    client.put(&BlockMeta::single(key, size as u32), &vec![5; size])?;
    let mut buffer = vec![0; size];
    let (calls, _) = measure(setup, || match client.get_into(&[key], 0, &mut [&mut buffer])?[0] {
        Some(_) => Ok(()),
        None => Err("a stored block was not found".into()),
    })?;
    client.remove(&[key])?;
    let plain = plain_socket(setup, size)?;
    Ok(row(name, "GB/s", rate(size, &calls), &calls, Some(plain)))
}

/// GB/s of a blocking loop that asks with one byte and reads `size` bytes.
pub(super) fn plain_socket(setup: &Setup<'_>, size: usize) -> Result<f64, Error> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut client = TcpStream::connect(listener.local_addr()?)?;
    let (mut server, _) = listener.accept()?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let data = vec![5; size];
            let mut ask = [0];
            while server.read_exact(&mut ask).is_ok() && server.write_all(&data).is_ok() {}
        });
        let mut buffer = vec![0; size];
        let measured = measure(setup, || {
            client.write_all(&[1])?;
            Ok(client.read_exact(&mut buffer)?)
        });
        drop(client);
        Ok(rate(size, &measured?.0))
    })
}

/// Computed from the median call, which a shared machine disturbs least.
pub(super) fn rate(size: usize, calls: &[f64]) -> f64 {
    calls.get(calls.len() / 2).map_or(0.0, |median| size as f64 / median / 1e9)
}

fn cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_is_measured() {
        let dir = tempfile::tempdir().unwrap();
        let setup = Setup { each: Duration::from_millis(5), socket: &dir.path().join("bench.sock") };
        let rows = store(&setup).unwrap();
        assert_eq!(rows.len(), 14);
        assert!(rows.iter().all(|row| row.value.is_finite() && row.value > 0.0), "{rows:?}");
    }
}
