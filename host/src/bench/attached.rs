//! What an engine pays for an attached host: a scheduler's questions, and jobs that copy its paged memory.
//!
//! The scheduler is simulated and host and client share one process. The memory is laid out as engines do: per layer K of all
//! blocks, then V of all blocks, so that a block of 1 MiB is 64 runs. Every block has its label, and everything that is loaded
//! is verified. References are taken in the same run, over as much memory.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir_dataplane::memory::host::HostPool;
use kvasir_dataplane::server::access::OwnUser;
use kvasir_dataplane::server::node::Node;
use kvasir_dataplane::server::{Listen, Server};
use kvasir_dataplane::{BlockKey, BlockMeta, Clock, DramConfig, DramStore, ServerConfig};
use rustix::event::{PollFd, PollFlags, poll};

use kvasir_client::data::{Endpoint, JobOptions, Jobs, Label, Namespace, Options, Plan, Reconnecting, Run};

use super::Row;
use super::local::{self, Error, Setup, measure, plain_socket, rate};

/// Runs of a block: 32 layers, K apart from V.
const RUNS: usize = 64;
const BLOCK: usize = 1 << 20;
/// Blocks in the engine's memory; the host's pool has room for twice as many.
const BLOCKS: usize = 128;
/// Blocks of one job: a prompt of 4,096 tokens at 256 tokens a block.
const JOB: usize = 16;
/// Blocks that a scheduler asks about at once.
const MATCH: usize = 1024;

/// Every row; each is timed for `each`.
///
/// # Errors
/// The pool does not fit this machine, or a socket cannot be opened.
pub fn rows(each: Duration) -> anyhow::Result<Vec<Row>> {
    measured(each).map_err(anyhow::Error::from_boxed)
}

fn measured(each: Duration) -> Result<Vec<Row>, Error> {
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("engine.sock");
    let setup = Setup { each, socket: &socket };
    let config =
        DramConfig { pool_bytes: (2 * BLOCKS * BLOCK) as u64 * 2, prefault: true, ..DramConfig::default() };
    let store = Arc::new(DramStore::open(config)?);
    let tcp = Some(([127, 0, 0, 1], 0).into());
    let listen = Listen { unix: Some(socket.clone()), tcp, ..Listen::default() };
    // Nobody else knows it, and it ends with this process.
    let token = format!("{:032x}", rand::random::<u128>());
    let gate = Arc::new(OwnUser { token: Some(token.clone()) });
    let node = Node::dram_only(Arc::clone(&store), Clock::start());
    let server = Server::start(node, &listen, gate, ServerConfig::default())?;
    let options = Options { token, ..Options::default() };
    let local = Endpoint::Unix(socket.clone());
    let remote = Endpoint::Tcp(server.tcp_addr().ok_or("no TCP address")?);

    let mut rows = asked(&setup, &store, &Reconnecting::new(local.clone(), options.clone()))?;
    let engine = Engine::new(&local, &options)?;
    rows.push(engine.submit(&setup)?);
    rows.push(engine.empty_drain(&setup)?);
    rows.push(engine.saves(&setup, &store)?);
    rows.push(engine.loads("load/scatter/1MiB", &setup, None)?);
    let over_tcp = Engine { jobs: Jobs::start(&remote, &options, one_thread())?, ..engine };
    let socket = plain_socket(&setup, BLOCK)?;
    rows.push(over_tcp.loads("load/tcp/1MiB", &setup, Some(socket))?);
    drop(over_tcp);
    server.stop();
    Ok(rows)
}

/// A prompt of 1,024 blocks that are all there, by the engine's hashes of 32 bytes, and one of which none is.
fn asked(setup: &Setup<'_>, store: &DramStore, host: &Reconnecting) -> Result<Vec<Row>, Error> {
    let namespace = Namespace::new([1; 32]);
    let hashes: Vec<[u8; 32]> = (0..2 * MATCH).map(hash).collect();
    let client = host.client()?;
    for hash in &hashes[..MATCH] {
        client.put(&BlockMeta::single(namespace.key(hash), 64), &[7; 64])?;
    }
    let ask = |name: &str, hashes: &[[u8; 32]], expected: bool| {
        let keys = || -> Vec<BlockKey> { hashes.iter().map(|hash| namespace.key(hash)).collect() };
        let (calls, _) = measure(setup, || {
            let here = host.client()?.exists(&keys())?;
            if here.iter().all(|&here| here == expected) { Ok(()) } else { Err("a wrong answer".into()) }
        })?;
        let (inside, _) = measure(setup, || {
            black_box(store.exists(&keys())?);
            Ok(())
        })?;
        Ok::<_, Error>(local::row(name, "us", median_us(&calls), &calls, Some(median_us(&inside))))
    };
    let rows =
        vec![ask("match/1024", &hashes[..MATCH], true)?, ask("match/1024/none", &hashes[MATCH..], false)?];
    store.remove(&hashes.iter().map(|hash| namespace.key(hash)).collect::<Vec<_>>(), 0)?;
    Ok(rows)
}

/// An engine's memory, and the threads that copy it.
struct Engine {
    jobs: Jobs,
    memory: Arc<HostPool>,
    plan: Arc<Plan>,
    namespace: Namespace,
}

/// What an engine names, and where it lies.
type Named = (Vec<(BlockMeta, usize)>, Vec<Label>);

impl Engine {
    fn new(endpoint: &Endpoint, options: &Options) -> Result<Self, Error> {
        let memory = Arc::new(HostPool::new((BLOCKS * BLOCK) as u64, true)?);
        let run = BLOCK / RUNS;
        let runs: Vec<Run> =
            (0..RUNS).map(|at| Run { addr: at * BLOCKS * run, len: run, stride: run }).collect();
        let plan = Arc::new(Plan::in_pool(&memory, &runs, BLOCKS)?);
        let jobs = Jobs::start(endpoint, options, one_thread())?;
        Ok(Self { jobs, memory, plan, namespace: Namespace::new([2; 32]) })
    }

    /// Job `n`: the blocks that lie behind those of the job before, by `JOB` new hashes.
    fn blocks(&self, n: usize) -> Named {
        let name = |at| {
            let (hash, block) = (hash(at), at % BLOCKS);
            let meta = BlockMeta::single(self.namespace.key(&hash), BLOCK as u32 + Label::BYTES);
            ((meta, block), self.namespace.label(&hash, BLOCK as u32))
        };
        (n * JOB..(n + 1) * JOB).map(name).unzip()
    }

    fn save(&self, n: usize) -> Result<(), Error> {
        let (blocks, labels) = self.blocks(n);
        Ok(self.jobs.save_labelled(n as u64, &self.plan, blocks, labels)?)
    }

    fn load(&self, n: usize) -> Result<(), Error> {
        let (blocks, labels) = self.blocks(n);
        let blocks = blocks.into_iter().map(|(meta, block)| (meta.key, block)).collect();
        Ok(self.jobs.load_labelled(n as u64, &self.plan, blocks, labels)?)
    }

    /// Sleeps until the one job that is under way has ended.
    fn wait(&self) -> Result<(), Error> {
        poll(&mut [PollFd::from_borrowed_fd(self.jobs.event_fd(), PollFlags::IN)], None)?;
        match &self.jobs.drain()[..] {
            [done] if done.ok => Ok(()),
            other => Err(format!("a job failed: {other:?}").into()),
        }
    }

    /// The time to submit a load of blocks that are not there: naming 16 blocks and giving the job.
    fn submit(&self, setup: &Setup<'_>) -> Result<Row, Error> {
        let mut calls = Vec::new();
        measure(setup, || {
            let begun = Instant::now();
            self.load(1 << 20)?;
            calls.push(begun.elapsed().as_secs_f64());
            poll(&mut [PollFd::from_borrowed_fd(self.jobs.event_fd(), PollFlags::IN)], None)?;
            self.jobs.drain();
            Ok(())
        })?;
        calls.sort_by(f64::total_cmp);
        Ok(local::row("submit/16", "us", median_us(&calls), &calls, None))
    }

    fn empty_drain(&self, setup: &Setup<'_>) -> Result<Row, Error> {
        let (calls, _) = measure(setup, || {
            black_box(self.jobs.drain());
            Ok(())
        })?;
        Ok(local::row("drain/empty", "us", median_us(&calls), &calls, None))
    }

    /// Saves of 16 blocks each, beside a memcpy of the same runs to as much memory as they are stored in.
    fn saves(&self, setup: &Setup<'_>, store: &DramStore) -> Result<Row, Error> {
        let jobs = 2 * BLOCKS / JOB;
        let (mut spent, mut n) = (Vec::new(), 0);
        measure(setup, || {
            if n >= jobs {
                let (old, _) = self.blocks(n - jobs);
                store.remove(&old.iter().map(|(meta, _)| meta.key).collect::<Vec<_>>(), 0)?;
            }
            let begun = Instant::now();
            self.save(n)?;
            self.wait()?;
            spent.push(begun.elapsed().as_secs_f64());
            n += 1;
            Ok(())
        })?;
        let left: Vec<BlockKey> =
            (n.saturating_sub(jobs)..n).flat_map(|n| self.blocks(n).0).map(|(meta, _)| meta.key).collect();
        store.remove(&left, 0)?;
        let copies = self.copies(setup, true)?;
        spent.sort_by(f64::total_cmp);
        let reference = rate(BLOCK, &copies);
        Ok(local::row("save/gather/1MiB", "GB/s", rate(JOB * BLOCK, &spent), &spent, Some(reference)))
    }

    /// Loads of 16 blocks each, compared with what was saved, beside `reference` or a memcpy of the same runs.
    fn loads(&self, name: &str, setup: &Setup<'_>, reference: Option<f64>) -> Result<Row, Error> {
        for at in 0..BLOCKS * RUNS {
            let run = BLOCK / RUNS;
            self.memory.mapping().write((at * run) as u64, &vec![content(at); run]);
        }
        for n in 0..BLOCKS / JOB {
            self.save(n)?;
            self.wait()?;
        }
        self.memory.mapping().write(0, &vec![0; BLOCKS * BLOCK]);
        let (mut spent, mut n) = (Vec::new(), 0);
        measure(setup, || {
            let begun = Instant::now();
            self.load(n % (BLOCKS / JOB))?;
            self.wait()?;
            spent.push(begun.elapsed().as_secs_f64());
            n += 1;
            Ok(())
        })?;
        self.check(n.min(BLOCKS / JOB) * JOB)?;
        let reference = match reference {
            Some(reference) => reference,
            None => rate(BLOCK, &self.copies(setup, false)?),
        };
        spent.sort_by(f64::total_cmp);
        Ok(local::row(name, "GB/s", rate(JOB * BLOCK, &spent), &spent, Some(reference)))
    }

    /// The first blocks hold what was saved.
    fn check(&self, blocks: usize) -> Result<(), Error> {
        let run = BLOCK / RUNS;
        let wrong = (0..RUNS * BLOCKS).filter(|at| at % BLOCKS < blocks).find(|&at| {
            let bytes = self.memory.mapping().bytes((at * run) as u64, run as u64);
            bytes.is_none_or(|bytes| bytes != vec![content(at); run])
        });
        wrong.map_or(Ok(()), |at| Err(format!("run {at} is not what was saved").into()))
    }

    /// Seconds of copies of one block after the other: its runs into a block elsewhere if it `gathers`, else back.
    fn copies(&self, setup: &Setup<'_>, gathers: bool) -> Result<Vec<f64>, Error> {
        let run = BLOCK / RUNS;
        let (mut paged, mut whole) = (vec![1_u8; BLOCKS * BLOCK], vec![2_u8; BLOCKS * BLOCK]);
        let mut n = 0;
        let (calls, _) = measure(setup, || {
            let block = n % BLOCKS;
            for at in 0..RUNS {
                let paged = &mut black_box(&mut paged)[(at * BLOCKS + block) * run..][..run];
                let whole = &mut black_box(&mut whole)[block * BLOCK + at * run..][..run];
                if gathers {
                    whole.copy_from_slice(paged);
                } else {
                    paged.copy_from_slice(whole);
                }
            }
            n += 1;
            Ok(())
        })?;
        Ok(calls)
    }
}

/// One thread copies, as one does the reference; no job is late, however busy the machine.
fn one_thread() -> JobOptions {
    let time = Duration::from_secs(60);
    JobOptions { load_threads: 1, save_threads: 1, load_time: time, save_time: time, ..JobOptions::default() }
}

/// Stands for an engine's hash of block `n`.
fn hash(n: usize) -> [u8; 32] {
    std::array::from_fn(|at| (n >> (8 * (at % 4))) as u8 ^ at as u8)
}

/// What lies in run `at` of the engine's memory.
fn content(at: usize) -> u8 {
    (at * 31 % 251) as u8
}

fn median_us(calls: &[f64]) -> f64 {
    calls.get(calls.len() / 2).map_or(0.0, |median| median * 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_is_measured() {
        let rows = rows(Duration::from_millis(2)).unwrap();
        let names: Vec<&str> = rows.iter().map(|row| &*row.name).collect();
        assert_eq!(
            names,
            [
                "match/1024",
                "match/1024/none",
                "submit/16",
                "drain/empty",
                "save/gather/1MiB",
                "load/scatter/1MiB",
                "load/tcp/1MiB"
            ]
        );
        assert!(rows.iter().all(|row| row.value.is_finite() && row.value > 0.0), "{rows:?}");
    }
}
