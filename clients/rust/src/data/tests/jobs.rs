//! Jobs of an engine: each is reported once, whatever happens to its host.

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::connection::mute_host;
use super::*;

/// Of K and of V.
const RUN: usize = 3000;
const SIZE: u32 = 2 * RUN as u32;

/// An engine's memory of `blocks` blocks, K of all before V of all.
struct Engine {
    memory: Vec<u8>,
    blocks: usize,
}

impl Engine {
    fn new(blocks: usize) -> Self {
        Self { memory: vec![0; 2 * RUN * blocks], blocks }
    }

    /// While it exists, the memory is used by it alone.
    fn plan(&mut self) -> Arc<Plan> {
        let base = self.memory.as_mut_ptr().expose_provenance();
        let runs = [0, RUN * self.blocks].map(|kind| Run { addr: base + kind, len: RUN, stride: RUN });
        #[expect(unsafe_code, reason = "what an engine does")]
        // SAFETY: the runs lie in `memory`, which the tests use again only after the jobs, with their plans, are gone; no
        // test names a block in two jobs at once of which one is a load.
        Arc::new(unsafe { Plan::new(&runs, self.blocks) }.unwrap())
    }

    fn block(&mut self, n: usize) -> [&mut [u8]; 2] {
        let (k, v) = self.memory.split_at_mut(RUN * self.blocks);
        [&mut k[n * RUN..][..RUN], &mut v[n * RUN..][..RUN]]
    }

    fn set(&mut self, n: usize, bytes: &[u8]) {
        let [k, v] = self.block(n);
        k.copy_from_slice(&bytes[..RUN]);
        v.copy_from_slice(&bytes[RUN..]);
    }
}

fn meta(n: u64) -> BlockMeta {
    BlockMeta::single(key(n), SIZE)
}

fn is_readable(jobs: &Jobs, patience: Timespec) -> bool {
    let fd = jobs.event_fd();
    let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    poll(&mut polled, Some(&patience)).unwrap() == 1
}

/// Waits by the descriptor until `count` jobs have ended, in the order of their ids.
pub(super) fn wait(jobs: &Jobs, count: usize) -> Vec<Done> {
    let mut all = Vec::new();
    while all.len() < count {
        assert!(is_readable(jobs, Timespec { tv_sec: 120, tv_nsec: 0 }), "{} of {count} came", all.len());
        all.extend(jobs.drain());
    }
    assert_eq!(all.len(), count);
    all.sort_by_key(|done| done.job);
    assert!(all.windows(2).all(|two| two[0].job < two[1].job), "each once");
    all
}

#[test]
fn a_thousand_jobs_are_each_reported_once_and_right() {
    const EACH: usize = 500;
    let host =
        Host::start(DramConfig { pool_bytes: 16 << 20, ..DramConfig::default() }, ServerConfig::default());
    for endpoint in [host.unix(), host.tcp()] {
        let mut engine = Engine::new(2 * EACH);
        (0..EACH).for_each(|n| engine.set(n, &bytes_of(n as u64, SIZE)));
        let plan = engine.plan();
        let jobs = Jobs::start(&endpoint, &options(), JobOptions::default()).unwrap();
        assert!(jobs.drain().is_empty() && !is_readable(&jobs, Timespec::default()));
        for n in 0..EACH {
            // All but every tenth.
            let blocks = if n % 10 == 9 { vec![] } else { vec![(meta(n as u64), n)] };
            jobs.save(n as u64, &plan, blocks).unwrap();
        }
        for done in wait(&jobs, EACH) {
            let blocks = usize::from(done.job % 10 != 9);
            assert!(done.ok && done.blocks == vec![true; blocks], "{done:?}");
            assert_eq!(done.bytes, blocks as u64 * u64::from(SIZE));
        }
        for n in 0..EACH {
            jobs.load(n as u64, &plan, vec![(key(n as u64), EACH + n)]).unwrap();
        }
        for done in wait(&jobs, EACH) {
            let there = done.job % 10 != 9;
            assert_eq!((done.ok, &done.blocks[..]), (there, &[there][..]), "{done:?}");
            assert!(done.error.is_none(), "that a block is not there is no failure");
        }
        assert!(!is_readable(&jobs, Timespec::default()), "nothing is left");
        drop((jobs, plan));
        for n in (0..EACH).filter(|n| n % 10 != 9) {
            assert!(engine.block(EACH + n).concat() == bytes_of(n as u64, SIZE), "block {n}");
        }
        let client = Client::connect(&endpoint, options()).unwrap();
        client.remove(&(0..EACH as u64).map(key).collect::<Vec<_>>()).unwrap();
    }
    host.until(|host| host.store.metrics().leases == 0);
}

/// One who drains without waiting may come between a report and the word of it.
#[test]
fn it_is_not_readable_for_what_was_drained_already() {
    const ROUNDS: u64 = 2_000;
    let host = Host::small();
    let jobs = Jobs::start(&host.unix(), &options(), JobOptions::default()).unwrap();
    for job in 0..ROUNDS {
        jobs.shared().take().unwrap();
        std::thread::scope(|scope| {
            let done = Done { job, ok: true, blocks: vec![], bytes: 0, error: None };
            scope.spawn(|| jobs.shared().report(done));
            while jobs.drain().is_empty() {}
        });
        assert!(!is_readable(&jobs, Timespec::default()), "round {job}");
    }
}

#[test]
fn a_job_of_many_blocks_says_which_of_them_are_there() {
    let host = Host::small();
    let mut engine = Engine::new(4);
    (0..4).for_each(|n| engine.set(n, &bytes_of(n as u64, SIZE)));
    let plan = engine.plan();
    let jobs = Jobs::start(&host.unix(), &options(), JobOptions::default()).unwrap();
    jobs.save(1, &plan, vec![(meta(0), 0), (meta(1), 1)]).unwrap();
    assert!(wait(&jobs, 1)[0].ok);
    jobs.save(2, &plan, vec![(meta(1), 1), (BlockMeta::single(key(5), 1 << 30), 2)]).unwrap();
    let refused = wait(&jobs, 1).remove(0);
    assert!(!refused.ok && refused.error.is_some(), "its size is another: {refused:?}");
    jobs.save(3, &plan, vec![(meta(1), 1), (meta(2), 2)]).unwrap();
    let again = wait(&jobs, 1).remove(0);
    assert_eq!((again.ok, again.bytes), (true, SIZE.into()), "one of them was stored already");
    jobs.load(4, &plan, vec![(key(0), 3), (key(9), 0)]).unwrap();
    let part = wait(&jobs, 1).remove(0);
    assert_eq!((part.ok, &part.blocks[..], part.bytes), (false, &[true, false][..], SIZE.into()));
    assert_eq!(
        jobs.load(5, &plan, vec![(key(0), 4)]),
        Err(JobError::NoBlock { block: 4, blocks: 4 }),
        "it is not taken, so it is not reported"
    );
    drop(jobs);
}

#[test]
fn jobs_outlive_their_host() {
    const BLOCKS: usize = 300;
    for over_tcp in [false, true] {
        let mut host = Host::start(
            DramConfig { pool_bytes: 16 << 20, ..DramConfig::default() },
            ServerConfig::default(),
        );
        let endpoint = if over_tcp { host.tcp() } else { host.unix() };
        let client = Client::connect(&endpoint, options()).unwrap();
        (0..BLOCKS as u64).for_each(|n| assert_eq!(put(&client, n, SIZE).unwrap(), Put::Stored));
        let mut engine = Engine::new(BLOCKS);
        let plan = engine.plan();
        let jobs = Jobs::start(&endpoint, &options(), JobOptions::default()).unwrap();
        for n in 0..BLOCKS {
            jobs.load(n as u64, &plan, vec![(key(n as u64), n)]).unwrap();
        }
        assert!(is_readable(&jobs, Timespec { tv_sec: 120, tv_nsec: 0 }));
        let addr = host.stop();
        let all = wait(&jobs, BLOCKS);
        let loaded: Vec<usize> = all.iter().filter(|done| done.ok).map(|done| done.job as usize).collect();
        assert!(!loaded.is_empty());
        assert!(all.iter().all(|done| done.ok || done.error.is_some()), "{all:?}");

        // The same jobs with the host that comes after.
        let host = host.again(addr);
        jobs.save(1, &plan, vec![(BlockMeta::single(key(900), SIZE), loaded[0])]).unwrap();
        let saved = wait(&jobs, 1);
        assert!(saved[0].ok, "{saved:?}");
        jobs.load(2, &plan, vec![(key(900), 0), (key(0), 1)]).unwrap();
        let again = wait(&jobs, 1).remove(0);
        assert_eq!(again.blocks, [true, false], "it has none of the first one's blocks: {:?}", again.error);
        drop((jobs, plan));
        for n in loaded.into_iter().filter(|&n| n > 1) {
            assert!(engine.block(n).concat() == bytes_of(n as u64, SIZE), "block {n}");
        }
        drop(host);
    }
}

#[test]
fn a_load_ends_by_its_time_though_the_host_says_nothing() {
    let (_dir, endpoint, host) = mute_host();
    let mut engine = Engine::new(8);
    engine.memory.fill(0xee);
    let plan = engine.plan();
    let patient = Options { timeout: Duration::from_secs(3600), ..Options::default() };
    let soon = JobOptions { load_time: Duration::from_millis(50), ..JobOptions::default() };
    let jobs = Jobs::start(&endpoint, &patient, soon).unwrap();
    // One gets as far as its request; the others wait to be let in, or for a thread.
    (0..8).for_each(|n| jobs.load(n, &plan, vec![(key(n), n as usize)]).unwrap());
    let stream = host.join().unwrap();
    for done in wait(&jobs, 8) {
        assert!(!done.ok && done.error.is_some() && done.bytes == 0, "{done:?}");
    }
    drop((jobs, plan, stream));
    assert!(engine.memory.iter().all(|&byte| byte == 0xee));
}

#[test]
fn jobs_that_are_closed_report_what_is_left_and_take_no_more() {
    let (_dir, endpoint, host) = mute_host();
    let mut engine = Engine::new(1);
    let plan = engine.plan();
    let few = JobOptions {
        load_threads: 1,
        load_time: Duration::from_millis(200),
        jobs_max: 20,
        ..JobOptions::default()
    };
    let jobs = Jobs::start(&endpoint, &Options::default(), few).unwrap();
    (0..20).for_each(|n| jobs.load(n, &plan, vec![(key(n), 0)]).unwrap());
    assert_eq!(jobs.load(20, &plan, vec![(key(20), 0)]), Err(JobError::Full { max: 20 }));
    jobs.close();
    assert!(wait(&jobs, 20).iter().all(|done| !done.ok && done.blocks == [false]));
    assert_eq!(jobs.load(21, &plan, vec![(key(21), 0)]), Err(JobError::Closed));
    assert_eq!(jobs.save(22, &plan, vec![(meta(22), 0)]), Err(JobError::Closed));
    jobs.close();
    assert!(jobs.drain().is_empty());
    assert_eq!(Arc::strong_count(&plan), 1, "no job of it is left");
    // In case no job got as far as that.
    let Endpoint::Unix(path) = &endpoint else { panic!("{endpoint}") };
    let _ = UnixStream::connect(path);
    drop(host.join().unwrap());
}

/// Blocks of so many bytes that each is a part of its own.
const LARGE: usize = 20 << 20;

fn large(memory: &mut [u8]) -> Arc<Plan> {
    let run = Run { addr: memory.as_mut_ptr().expose_provenance(), len: LARGE, stride: LARGE };
    #[expect(unsafe_code, reason = "what an engine does")]
    // SAFETY: as in `Engine::plan`.
    Arc::new(unsafe { Plan::new(&[run], memory.len() / LARGE) }.unwrap())
}

#[test]
fn what_threads_do_in_parts_is_one_job() {
    let dram = DramConfig { pool_bytes: 128 << 20, ..DramConfig::default() };
    let mut host = Host::start(dram, ServerConfig::default());
    let mut memory: Vec<u8> = (0..8 * LARGE).map(|at| (at / LARGE + at) as u8).collect();
    let plan = large(&mut memory);
    let jobs = Jobs::start(&host.unix(), &options(), JobOptions::default()).unwrap();
    let meta = |n| (BlockMeta::single(key(n), LARGE as u32), n as usize);
    jobs.save(1, &plan, (0..4).map(meta).collect()).unwrap();
    let saved = wait(&jobs, 1).remove(0);
    assert_eq!((saved.ok, saved.blocks, saved.bytes), (true, vec![true; 4], 4 * LARGE as u64));
    jobs.load(2, &plan, [(0, 4), (1, 5), (9, 6), (3, 7)].map(|(n, block)| (key(n), block)).to_vec()).unwrap();
    let loaded = wait(&jobs, 1).remove(0);
    assert!(!loaded.ok && loaded.error.is_none() && loaded.bytes == 3 * LARGE as u64, "{loaded:?}");
    assert_eq!(loaded.blocks, [true, true, false, true]);
    host.stop();
    jobs.load(3, &plan, (0..4).map(|n| (key(n), 4 + n as usize)).collect()).unwrap();
    let lost = wait(&jobs, 1).remove(0);
    assert!(!lost.ok && lost.error.is_some() && lost.blocks == [false; 4] && lost.bytes == 0, "{lost:?}");
    drop((jobs, plan));
    let (stored, found) = memory.split_at(4 * LARGE);
    assert!([0, 1, 3].iter().all(|n| stored[n * LARGE..][..LARGE] == found[n * LARGE..][..LARGE]));
}

#[test]
fn a_job_whose_parts_wait_when_all_is_closed_is_reported_once() {
    let (_dir, endpoint, host) = mute_host();
    let mut memory = vec![0; 4 * LARGE];
    let plan = large(&mut memory);
    let one = JobOptions { load_threads: 1, load_time: Duration::from_millis(200), ..JobOptions::default() };
    let jobs = Jobs::start(&endpoint, &Options::default(), one).unwrap();
    jobs.load(1, &plan, (0..4).map(|n| (key(n), n as usize)).collect()).unwrap();
    jobs.close();
    assert!(wait(&jobs, 1).iter().all(|done| !done.ok && done.blocks == [false; 4]));
    assert_eq!(Arc::strong_count(&plan), 1, "no part of it is left");
    let Endpoint::Unix(path) = &endpoint else { panic!("{endpoint}") };
    let _ = UnixStream::connect(path);
    drop(host.join().unwrap());
}
