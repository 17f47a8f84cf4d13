//! Writes a sample of the decisions to a file, off their path.

use super::Tapes;
use crate::policy::record::Record;
use crate::rotated::Rotated;
use kvasir_dataplane::Clock;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// Decisions that wait to be written; more are dropped and counted.
const WAITING_MAX: usize = 1_024;

/// What is written, and where.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    pub file: PathBuf,
    /// Beyond this the file is renamed to `FILE.1`, in place of the one before.
    pub file_bytes_max: u64,
    /// Share of the decisions, 0 to 1.
    pub share: f64,
}

/// What was written since the start.
#[derive(Debug, Default)]
pub struct Counts {
    pub written: AtomicU64,
    /// Sampled and not written: the queue was full, the decision not kept any more, or the disk failed.
    pub dropped: AtomicU64,
}

/// A sampled decision.
pub(super) enum Sample {
    /// A decision about a request, by its id: it is copied from the tape when it is written.
    Decision(u64),
    /// A decision that the writing thread makes into a record.
    Other(Box<dyn FnOnce() -> Option<Record> + Send>),
}

/// The thread that writes; it ends, and has written all, when this is dropped.
#[derive(Debug)]
pub(super) struct Sampler {
    share: f64,
    counts: Arc<Counts>,
    /// `None` only while dropped.
    queue: Option<mpsc::SyncSender<Sample>>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// # Errors
    /// The file cannot be opened, or no thread started.
    pub(super) fn start(sampling: &Sampling, tapes: Arc<Tapes>, clock: Clock) -> io::Result<Self> {
        let counts = Arc::<Counts>::default();
        let (queue, samples) = mpsc::sync_channel(WAITING_MAX);
        let out = Rotated::open(&sampling.file, sampling.file_bytes_max)?;
        let mut writer = Writer { out, tapes, clock, counts: Arc::clone(&counts), line: Vec::new() };
        let run = move || {
            while let Ok(sample) = samples.recv() {
                writer.write(sample);
                while let Ok(sample) = samples.try_recv() {
                    writer.write(sample);
                }
                writer.flush();
            }
        };
        let thread = std::thread::Builder::new().name("kvasir-record".into()).spawn(run)?;
        Ok(Self { share: sampling.share, counts, queue: Some(queue), thread: Some(thread) })
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Whether the decision with that number is sampled: always the same for the same number.
    pub(super) fn takes(&self, number: u64) -> bool {
        let spread = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 11;
        (spread as f64) < self.share * (1u64 << 53) as f64
    }

    /// Never waits.
    pub(super) fn offer(&self, sample: Sample) {
        let sent = self.queue.as_ref().is_some_and(|queue| queue.try_send(sample).is_ok());
        if !sent {
            self.counts.dropped.fetch_add(1, Relaxed);
        }
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Writer {
    out: Rotated,
    tapes: Arc<Tapes>,
    clock: Clock,
    counts: Arc<Counts>,
    line: Vec<u8>,
}

impl Writer {
    fn write(&mut self, sample: Sample) {
        match sample {
            Sample::Decision(id) => {
                let Some(found) = self.tapes.find(id) else { return self.put(None) };
                let at_ms = super::unix_ms_of(found.decided.at_ms, self.clock.now_ms());
                self.put(Some(found.record(at_ms)));
                if let Some(admitted) = found.admitter_record(at_ms) {
                    self.put(Some(admitted));
                }
            }
            Sample::Other(make) => self.put(make()),
        }
    }

    fn put(&mut self, record: Option<Record>) {
        let written = record.is_some_and(|record| record.check().is_ok() && self.line(&record).is_ok());
        let count = if written { &self.counts.written } else { &self.counts.dropped };
        count.fetch_add(1, Relaxed);
    }

    fn line(&mut self, record: &Record) -> io::Result<()> {
        self.line.clear();
        record.write(&mut self.line)?;
        self.out.write(&self.line)
    }

    fn flush(&mut self) {
        if let Err(error) = self.out.flush() {
            tracing::warn!(%error, file = %self.out.path().display(), "sampled decisions are not written");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::record::{Call, FORMAT, PolicyOf, Records};
    use std::fs::File;
    use std::io::BufReader;
    use std::path::Path;

    fn record(id: u64) -> Record {
        Record {
            record: FORMAT,
            slot: "balancer".into(),
            id,
            at_ms: 1,
            policy: PolicyOf::default(),
            pushed: Vec::new(),
            asked: Call { name: "tick".into(), scalars: vec![1], lists: vec![vec![]; 3] },
            answer: Vec::new(),
            scores: Vec::new(),
            fallback: None,
            ns: 0,
        }
    }

    fn sampler(folder: &Path, file_bytes_max: u64, share: f64) -> (Sampler, PathBuf) {
        let file = folder.join("decisions.jsonl");
        let sampling = Sampling { file: file.clone(), file_bytes_max, share };
        (Sampler::start(&sampling, Arc::default(), Clock::start()).unwrap(), file)
    }

    fn ids(file: &Path) -> Vec<u64> {
        Records::new(BufReader::new(File::open(file).unwrap())).map(|record| record.unwrap().id).collect()
    }

    #[test]
    fn files_stay_small_and_the_last_records_are_there() {
        let folder = tempfile::tempdir().unwrap();
        let (sampler, file) = sampler(folder.path(), 2_000, 1.0);
        for id in 0..100 {
            while sampler.counts().written.load(Relaxed) < id {
                std::thread::yield_now(); // nothing is dropped
            }
            sampler.offer(Sample::Other(Box::new(move || Some(record(id)))));
        }
        let counts = Arc::clone(&sampler.counts);
        drop(sampler);
        assert_eq!((counts.written.load(Relaxed), counts.dropped.load(Relaxed)), (100, 0));
        let aside = folder.path().join("decisions.jsonl.1");
        let written = [ids(&aside), ids(&file)].concat();
        assert_eq!(written, (100 - written.len() as u64..100).collect::<Vec<_>>());
        assert!([&file, &aside].iter().all(|file| std::fs::metadata(file).unwrap().len() <= 2_000));
    }

    #[test]
    fn what_cannot_be_written_is_counted() {
        let folder = tempfile::tempdir().unwrap();
        let (sampler, file) = sampler(folder.path(), 1 << 20, 1.0);
        let counts = Arc::clone(&sampler.counts);
        sampler.offer(Sample::Decision(7)); // nobody keeps it
        sampler.offer(Sample::Other(Box::new(|| None)));
        sampler.offer(Sample::Other(Box::new(|| Some(Record { record: 9, ..record(1) }))));
        drop(sampler);
        assert_eq!((counts.written.load(Relaxed), counts.dropped.load(Relaxed)), (0, 3));
        assert!(ids(&file).is_empty());
    }

    #[test]
    fn the_share_is_kept_and_the_same_decisions_are_taken() {
        let folder = tempfile::tempdir().unwrap();
        for share in [0.0, 0.01, 0.5, 1.0] {
            let (sampler, _) = sampler(folder.path(), 1 << 20, share);
            let taken = (0..100_000).filter(|id| sampler.takes(*id)).count() as f64 / 100_000.0;
            assert!((taken - share).abs() < 0.005, "{taken} of {share}");
        }
    }
}
