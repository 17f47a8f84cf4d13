//! What this host is asked to schedule, written to a file as a trace that every replay reads.
//!
//! Nothing of a prompt is in it but the hashes of its blocks, and these under a secret that is new with every start: two
//! files can only be compared within one run of the host. A line is written when its request has ended, since the tokens
//! of its answer are only known then, and in the order in which requests came, since that is how traces are read. Requests
//! that have not ended wait in memory, within bounds.

mod pending;

use self::pending::{Asked, BLOCKS_MAX, Pending};
use crate::replay::trace::Request;
use crate::rotated::Rotated;
use kvasir_dataplane::Clock;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// Messages told and not yet taken in, beside at most [`BLOCKS_MAX`] blocks; more is dropped and counted.
const TOLD_MAX: usize = 4_096;
/// How often requests are looked for that have waited for too long.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What is recorded, and where.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    pub file: PathBuf,
    /// Beyond this the file is renamed to `FILE.1`, in place of the one before.
    pub file_bytes_max: u64,
    /// Tokens in a block of the trace.
    pub block_size_tokens: u32,
    /// After this a request that has not ended is written as if it had.
    pub waits_ms: u64,
}

/// Counts since the start.
#[derive(Debug, Default)]
pub struct Counts {
    pub written: AtomicU64,
    /// Requests that came faster than they were written, or that the disk did not take.
    pub dropped: AtomicU64,
}

enum Told {
    Asked(Asked),
    /// Tokens that were decoded for a request.
    Decoded(u64, u32),
    Ended(u64),
}

/// The thread that writes; it ends, and has written all, when this is dropped.
pub struct Recorder {
    block_size_tokens: u32,
    secret: RandomState,
    counts: Arc<Counts>,
    /// Blocks of the messages told and not yet taken in.
    told_blocks: Arc<AtomicUsize>,
    /// `None` only while dropped.
    told: Option<mpsc::SyncSender<Told>>,
    thread: Option<JoinHandle<()>>,
}

/// What to record of a request.
pub struct Prompt<'a> {
    /// Names it until it has ended. 0 means that it ended at once, for it was rejected.
    pub id: u64,
    pub tokens: u32,
    /// As the caller expects it. 0 means that it does not say.
    pub output_tokens: u32,
    pub blocks: &'a [u64],
    pub class: u16,
    pub tenant: u16,
    pub session: u64,
}

impl Recorder {
    /// # Errors
    /// The file cannot be opened, or no thread started.
    pub fn start(recording: &Recording, clock: Clock) -> io::Result<Self> {
        let mut out = Rotated::open(&recording.file, recording.file_bytes_max)?;
        // The times of another run of the host, and the numbers of its blocks, mean something else.
        out.rotate()?;
        let counts = Arc::<Counts>::default();
        let told_blocks = Arc::<AtomicUsize>::default();
        let (told, hear) = mpsc::sync_channel(TOLD_MAX);
        let mut writer = Writer {
            out,
            pending: Pending::new(recording.waits_ms),
            counts: Arc::clone(&counts),
            told_blocks: Arc::clone(&told_blocks),
            line: Vec::new(),
        };
        let run = move || writer.run(&hear, clock);
        let thread = std::thread::Builder::new().name("kvasir-traffic".into()).spawn(run)?;
        let secret = RandomState::new();
        let block_size_tokens = recording.block_size_tokens;
        Ok(Self { block_size_tokens, secret, counts, told_blocks, told: Some(told), thread: Some(thread) })
    }

    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Notes that a request came at `now_ms`. Never waits.
    pub fn asked(&self, prompt: &Prompt<'_>, now_ms: u64) {
        let expected = prompt.tokens.div_ceil(self.block_size_tokens) as usize;
        if self.told_blocks.fetch_add(expected, Relaxed) + expected > BLOCKS_MAX {
            self.told_blocks.fetch_sub(expected, Relaxed);
            self.counts.dropped.fetch_add(1, Relaxed);
            return;
        }
        let mut blocks: Vec<u64> = prompt.blocks.iter().map(|block| self.secret.hash_one(block)).collect();
        // A block without a hash is like no other block.
        blocks.resize_with(expected, crate::seed::random);
        let session = (prompt.session != 0).then(|| self.secret.hash_one(("session", prompt.session)));
        let request = Request {
            time_us: now_ms * 1_000,
            input_tokens: prompt.tokens,
            output_tokens: prompt.output_tokens,
            blocks,
            class: (prompt.class != 0).then_some(prompt.class),
            tenant: prompt.tenant,
            turn: None,
            session,
        };
        if !self.tell(Told::Asked(Asked { id: prompt.id, request })) {
            self.told_blocks.fetch_sub(expected, Relaxed);
            self.counts.dropped.fetch_add(1, Relaxed);
        }
    }

    /// Notes that `tokens` more tokens were decoded for a request.
    pub fn decoded(&self, id: u64, tokens: u32) {
        self.tell(Told::Decoded(id, tokens));
    }

    pub fn ended(&self, id: u64) {
        self.tell(Told::Ended(id));
    }

    /// Returns whether there was room. A lost end costs the request a wait, and a lost count of tokens the length of its answer.
    fn tell(&self, told: Told) -> bool {
        self.told.as_ref().is_some_and(|sender| sender.try_send(told).is_ok())
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.told = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Writer {
    out: Rotated,
    pending: Pending,
    counts: Arc<Counts>,
    told_blocks: Arc<AtomicUsize>,
    line: Vec<u8>,
}

impl Writer {
    fn run(&mut self, told: &mpsc::Receiver<Told>, clock: Clock) {
        loop {
            match told.recv_timeout(LOOK_EVERY) {
                Ok(one) => {
                    self.take(one);
                    told.try_iter().take(TOLD_MAX).for_each(|more| self.take(more));
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
            self.write(clock.now_ms());
        }
        self.write(u64::MAX);
    }

    fn take(&mut self, told: Told) {
        match told {
            Told::Asked(asked) => {
                self.told_blocks.fetch_sub(asked.request.blocks.len(), Relaxed);
                self.pending.add(asked);
            }
            Told::Decoded(id, tokens) => self.pending.decoded(id, tokens),
            Told::Ended(id) => self.pending.ended(id),
        }
    }

    fn write(&mut self, now_ms: u64) {
        while let Some(request) = self.pending.pop(now_ms) {
            let count = match self.line(&request) {
                Ok(()) => &self.counts.written,
                Err(_) => &self.counts.dropped,
            };
            count.fetch_add(1, Relaxed);
        }
        if let Err(error) = self.out.flush() {
            tracing::warn!(%error, file = %self.out.path().display(), "traffic is not recorded");
        }
    }

    fn line(&mut self, request: &Request) -> io::Result<()> {
        self.line.clear();
        serde_json::to_writer(&mut self.line, request)?;
        self.line.push(b'\n');
        self.out.write(&self.line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::trace::Reader;
    use std::path::Path;

    fn recorder(folder: &Path, file_bytes_max: u64) -> (Recorder, PathBuf) {
        let file = folder.join("t.jsonl");
        let recording =
            Recording { file: file.clone(), file_bytes_max, block_size_tokens: 16, waits_ms: 60_000 };
        (Recorder::start(&recording, Clock::start()).unwrap(), file)
    }

    fn prompt(id: u64, tokens: u32, blocks: &[u64]) -> Prompt<'_> {
        Prompt { id, tokens, output_tokens: 9, blocks, class: 0, tenant: 0, session: 0 }
    }

    fn read(file: &Path) -> Vec<Request> {
        Reader::open(file).unwrap().of_blocks(16).map(Result::unwrap).collect()
    }

    #[test]
    fn what_was_asked_is_a_trace_without_the_hashes() {
        let folder = tempfile::tempdir().unwrap();
        let (recorder, file) = recorder(folder.path(), 1 << 20);
        recorder.asked(&Prompt { class: 3, tenant: 4, session: 5, ..prompt(1, 40, &[70, 71, 72]) }, 10);
        recorder.asked(&Prompt { session: 5, ..prompt(2, 50, &[70, 71, 72]) }, 20);
        recorder.asked(&prompt(0, 5, &[]), 30);
        recorder.decoded(1, 5);
        recorder.decoded(1, 6);
        recorder.ended(2);
        recorder.ended(1);
        let counts = Arc::clone(&recorder.counts);
        drop(recorder);
        assert_eq!((counts.written.load(Relaxed), counts.dropped.load(Relaxed)), (3, 0));
        let [first, second, third] = &read(&file)[..] else { panic!("three requests") };
        assert_eq!((first.time_us, first.input_tokens, first.output_tokens), (10_000, 40, 11));
        assert_eq!((first.class, first.tenant), (Some(3), 4));
        assert_eq!((second.output_tokens, second.class, third.blocks.len()), (9, None, 1));
        assert_eq!(first.blocks[..], second.blocks[..3], "equal prefixes stay equal");
        assert_ne!(second.blocks[3], third.blocks[0], "what has no hash is shared with nothing");
        assert!(first.session.is_some() && first.session == second.session && third.session.is_none());
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(!text.contains("[70,") && !text.contains("\"session\":5}"), "{text}");
    }

    #[test]
    fn what_would_take_too_much_memory_is_dropped_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let (recorder, file) = recorder(folder.path(), 1 << 20);
        recorder.asked(&prompt(0, 16 * (BLOCKS_MAX as u32 + 1), &[]), 1);
        recorder.asked(&prompt(0, 16, &[70]), 2);
        let (counts, told_blocks) = (Arc::clone(&recorder.counts), Arc::clone(&recorder.told_blocks));
        drop(recorder);
        assert_eq!((counts.written.load(Relaxed), counts.dropped.load(Relaxed)), (1, 1));
        assert_eq!((told_blocks.load(Relaxed), read(&file)[0].time_ms()), (0, 2));
    }

    #[test]
    fn another_run_begins_another_file_under_another_secret() {
        let folder = tempfile::tempdir().unwrap();
        let runs = [5, 6].map(|at_ms| {
            let (recorder, file) = recorder(folder.path(), 1 << 20);
            recorder.asked(&prompt(0, 16, &[70]), at_ms);
            drop(recorder);
            read(&file)
        });
        assert_eq!(read(&folder.path().join("t.jsonl.1")), runs[0]);
        assert_ne!(runs[0][0].blocks, runs[1][0].blocks);
    }

    #[test]
    fn the_files_stay_small() {
        let folder = tempfile::tempdir().unwrap();
        let (recorder, file) = recorder(folder.path(), 2_000);
        for at_ms in 0..200 {
            while recorder.counts.written.load(Relaxed) < at_ms {
                std::thread::yield_now(); // nothing is dropped
            }
            recorder.asked(&prompt(0, 32, &[at_ms, 1]), at_ms);
        }
        drop(recorder);
        let aside = folder.path().join("t.jsonl.1");
        let times: Vec<u64> = [read(&aside), read(&file)].concat().iter().map(Request::time_ms).collect();
        assert_eq!(times, (200 - times.len() as u64..200).collect::<Vec<_>>());
        assert!([&file, &aside].iter().all(|file| std::fs::metadata(file).unwrap().len() <= 2_000));
        assert!(
            Recorder::start(
                &Recording {
                    file: folder.path().join("none/t"),
                    file_bytes_max: 1,
                    block_size_tokens: 16,
                    waits_ms: 1
                },
                Clock::start()
            )
            .is_err()
        );
    }
}
