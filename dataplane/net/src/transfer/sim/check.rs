//! What users know about their transfers, and hold the engine to.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::net::{read, write};
use super::*;
use crate::transfer::{Status, Transfer};

/// A transfer may end this long after its deadline: a look at it, and what it takes to cut a rail that holds it up.
const SLACK: u64 = 2 * TICK + 150 * MS;

/// A transfer, and what must become of it.
pub(super) struct Expected {
    us: usize,
    peer: (usize, u64),
    entries: Vec<Entry>,
    /// What writes send.
    sent: Vec<Vec<u8>>,
    transfer: Transfer,
    deadline: u64,
    told: AtomicU32,
    ended_at: AtomicU64,
    end: Mutex<Option<(Status, Vec<EntryStatus>)>>,
}

/// What an entry's remote ranges hold.
fn written(entry: &Entry, memory: &Region) -> Vec<u8> {
    let range = |range: &RemoteRange| memory.range(range.offset, range.len).expect("in range");
    read(&entry.remote.iter().map(range).collect::<Vec<_>>())
}

impl Expected {
    pub(super) fn submit(world: &World, us: usize, peer: (usize, u64), batch: Batch) -> Arc<Self> {
        let entries = batch.entries.clone();
        let sent = entries.iter().map(|entry| read(&entry.local)).collect();
        let deadline = world.net.now() + batch.deadline.unwrap_or_default().as_nanos() as u64;
        let transfer = world.hosts[us].engine.submit(batch).expect("a small batch");
        let expected = Arc::new(Self {
            us,
            peer,
            entries,
            sent,
            transfer,
            deadline,
            told: AtomicU32::new(0),
            ended_at: AtomicU64::new(0),
            end: Mutex::default(),
        });
        let (told, net) = (expected.clone(), world.net.clone());
        let history: Vec<Region> =
            world.hosts[peer.0].epochs.iter().map(|(memory, _)| memory.clone()).collect();
        expected.transfer.on_complete(move |status| told.ended(&net, status, &history[peer.1 as usize - 1]));
        world.check_bounds(us);
        expected
    }

    pub(super) fn cancel(&self, world: &World) {
        world.hosts[self.us].engine.cancel(&self.transfer);
    }

    /// The user learns of the end, checks what is valid, then takes the memory for something else.
    fn ended(&self, net: &Net, status: Status, remote: &Region) {
        assert_eq!(self.told.fetch_add(1, Ordering::AcqRel), 0, "told twice");
        assert_eq!(status.pending, 0);
        self.ended_at.store(net.now(), Ordering::Release);
        let entries: Vec<EntryStatus> = self.statuses();
        for (n, status) in entries.iter().enumerate() {
            self.check_entry(n, status, net, remote);
        }
        *self.end.lock() = Some((status, entries));
        for entry in &self.entries {
            write(&poison(entry.len()), &entry.local);
        }
    }

    fn statuses(&self) -> Vec<EntryStatus> {
        (0..self.entries.len()).map(|n| self.transfer.poll_entry(n).expect("an entry")).collect()
    }

    fn check_entry(&self, n: usize, status: &EntryStatus, net: &Net, remote: &Region) {
        let entry = &self.entries[n];
        assert!(!status.pending, "entry {n} of an ended transfer is pending");
        let whole = status.valid.first() == Some(&(0..entry.len()));
        assert_eq!(status.error.is_none(), whole, "entry {n} of {} B: {status:?}", entry.len());
        assert_eq!(
            status.valid,
            net.reported(self.us, &entry.local),
            "entry {n}: what was delivered is valid"
        );
        let theirs: Vec<u8> = match entry.direction {
            Direction::Read => self.source(entry),
            Direction::Write => written(entry, remote),
        };
        let ours = if entry.direction == Direction::Read { read(&entry.local) } else { self.sent[n].clone() };
        for range in &status.valid {
            let range = range.start as usize..range.end as usize;
            assert!(ours[range.clone()] == theirs[range.clone()], "entry {n}: other bytes in {range:?}");
        }
    }

    /// What the peer held, in the epoch in which the segment was opened.
    fn source(&self, entry: &Entry) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(entry.len() as usize);
        for range in &entry.remote {
            let offsets = range.offset..range.offset + range.len;
            bytes.extend(offsets.map(|offset| pattern(self.peer.0, self.peer.1, offset)));
        }
        bytes
    }

    /// After everything has ended: it ended, once and in time, and nothing has changed since.
    pub(super) fn check_end(&self, world: &World) -> Vec<EntryStatus> {
        let end = self.end.lock().take();
        let (status, entries) = end.unwrap_or_else(|| panic!("never ended: {:?}", self.statuses()));
        let ended = self.ended_at.load(Ordering::Acquire);
        assert!(
            ended <= self.deadline + SLACK,
            "ended {} ms after its deadline: {entries:?}",
            (ended - self.deadline) / MS
        );
        assert_eq!((self.transfer.poll(), &self.statuses()), (status, &entries), "it changed after its end");
        for entry in &self.entries {
            assert!(read(&entry.local) == poison(entry.len()), "memory was written after it was given back");
        }
        let remote = &world.hosts[self.peer.0].epochs[self.peer.1 as usize - 1].0;
        for (n, entry) in self.entries.iter().enumerate() {
            let complete = self.transfer.poll_entry(n).is_some_and(|entry| entry.error.is_none());
            if entry.direction == Direction::Write && complete {
                assert!(written(entry, remote) == self.sent[n], "entry {n}: what was written changed");
            }
        }
        entries
    }

    pub(super) fn check_success(&self, world: &World) {
        self.check_end(world);
        assert_eq!(self.transfer.poll().failed, 0, "all is well, but: {:?}", self.statuses());
    }
}

/// The bytes put into memory that its user has back.
fn poison(len: u64) -> Vec<u8> {
    vec![0xee; len as usize]
}

impl World {
    /// Budgets and windows hold.
    pub(super) fn check_bounds(&self, us: usize) {
        let (plan, host) = (&self.config.plan, &self.hosts[us]);
        let in_flight = host.engine.in_flight_bytes();
        for (class, (bytes, budget)) in in_flight.iter().zip(self.config.budgets).enumerate() {
            let most = budget.max(plan.slice_min) + plan.merged_max;
            assert!(*bytes <= most, "class {class}: {bytes} of {most} B in flight");
        }
        for peer in host.peers.iter().flatten() {
            for rail in peer.rails() {
                let most = plan.window_min.max(plan.slice_max * 4) + plan.slice_max * 3 / 2;
                assert!(rail.queued_bytes <= most, "{} of {most} B on one rail", rail.queued_bytes);
            }
        }
    }

    /// Nothing is in flight, queued or kept.
    pub(super) fn check_nothing_left(&mut self) {
        self.expected.clear();
        for host in &self.hosts {
            host.engine.tick();
            assert_eq!(host.engine.in_flight_bytes(), [0; CLASSES]);
            assert_eq!(host.engine.watched(), 0, "transfers that ended are kept");
            for peer in host.peers.iter().flatten() {
                assert!(peer.rails().iter().all(|rail| rail.queued_bytes == 0), "{:?}", peer.rails());
                assert!(peer.state().schedule.is_empty());
            }
        }
    }
}
