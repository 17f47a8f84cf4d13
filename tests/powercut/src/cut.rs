//! Power cuts of a recording: what of it the device may have when the machine is up again.
//!
//! Before any entry of the log, this much is certain: all that an earlier flush covered, and each write that forced unit
//! access, is on the device. Of the other writes that had ended, it has any, whole or some sectors of them, in any order.

use anyhow::{Context, Result, ensure};

use crate::chance::Chance;
use crate::log::Entry;
use crate::model::{Expected, Mark, Model, Outcome};

/// Torn writes are torn between these.
const SECTOR: usize = 512;
/// Where the second of two sectors lies that are never torn apart: ext4 checks its superblock before it replays its journal, so it relies on a
/// disk that writes both or neither.
const SUPERBLOCK_SECOND: u64 = 1536;

/// What happens to writes that were not durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    All,
    /// As if the device wrote in order.
    Nothing,
    /// Each is kept, lost or torn, by this seed.
    Some(u64),
    /// This entry alone is lost.
    One(usize),
}

/// Where a recording is cut, and what is lost there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    /// Behind an answer that owes something; all is lost that may be.
    Answers,
    /// Before a flush that covers much; some is lost.
    Flushes,
    /// Before a flush; the first of writes that follow each other on the device is lost alone.
    Heads,
    Anywhere,
}

/// One power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Entries of the log that had ended.
    pub(crate) at: usize,
    pub(crate) loss: Loss,
}

/// A recording and what a walk through it has seen.
pub(crate) struct Recording {
    log: Vec<Entry>,
    marks: Vec<Option<Mark>>,
    /// What is certain to be on the device.
    durable: Vec<u8>,
    /// Writes that ended and are not durable.
    pending: Vec<usize>,
    model: Model,
    at: usize,
}

impl Recording {
    /// `image` is what the device had at first, `left` what it had in the end; writes behind its end are marks.
    ///
    /// # Errors
    /// A mark cannot be read, is missing or out of turn, or the log does not lead from `image` to `left`: it is no true recording.
    pub(crate) fn new(log: Vec<Entry>, image: Vec<u8>, left: &[u8], expected: &Expected) -> Result<Self> {
        let marks: Vec<_> =
            log.iter().map(|entry| numbered_mark(entry, image.len() as u64)).collect::<Result<_>>()?;
        for ((number, mark), due) in marks.iter().flatten().zip(0..) {
            ensure!(*number == due, "mark {number}, {mark:?}, stands in the log where number {due} is due");
        }
        let mut end = image.clone();
        for (entry, mark) in log.iter().zip(&marks) {
            if mark.is_none() && !entry.data.is_empty() {
                write(&mut end, entry.offset, &entry.data);
            }
        }
        ensure!(end == left, "the log does not lead to what the device has");
        let marks = marks.into_iter().map(|mark| mark.map(|(_, mark)| mark)).collect();
        Ok(Self { log, marks, durable: image, pending: Vec::new(), model: Model::new(expected), at: 0 })
    }

    pub(crate) fn len(&self) -> usize {
        self.log.len()
    }

    /// Cuts by a seed, as many of one kind as of another.
    pub(crate) fn choose(&self, count: usize, kinds: &[Kind], chance: &mut Chance) -> Vec<Cut> {
        let (answers, flushes, heads) = (self.answers(), self.flushes(), self.heads());
        let mut cuts = Vec::new();
        for kind in kinds.iter().cycle().take(count) {
            let mut pick = |count: usize| chance.below(count.max(1) as u64) as usize;
            let some = match kind {
                Kind::Answers => answers.get(pick(answers.len())).map(|&at| (at + 1, Loss::All)),
                Kind::Flushes => {
                    let three = [(); 3].map(|()| flushes.get(pick(flushes.len())));
                    let most = three.into_iter().flatten().max_by_key(|(_, covers)| *covers);
                    most.map(|&(at, _)| (at, Loss::Some(pick(usize::MAX) as u64)))
                }
                Kind::Heads => heads.get(pick(heads.len())).map(|&(at, head)| (at, Loss::One(head))),
                Kind::Anywhere => Some((
                    pick(self.len() + 1),
                    [Loss::Nothing, Loss::Some(pick(usize::MAX) as u64)][pick(2)],
                )),
            };
            cuts.extend(some.map(|(at, loss)| Cut { at, loss }));
        }
        cuts.sort_by_key(|cut| cut.at);
        cuts
    }

    /// Marks of answers that owe something.
    fn answers(&self) -> Vec<usize> {
        let owes = |mark: &Mark| match mark {
            Mark::Ended { outcome, .. } => *outcome == Outcome::Removed,
            mark => matches!(mark, Mark::FlushEnded { .. } | Mark::DatabaseEnded { .. }),
        };
        (0..self.len()).filter(|&at| self.marks[at].as_ref().is_some_and(owes)).collect()
    }

    /// What each flush covers.
    fn covered(&self) -> Vec<(usize, Vec<usize>)> {
        let (mut flushes, mut covered) = (Vec::new(), Vec::new());
        for (at, (entry, mark)) in self.log.iter().zip(&self.marks).enumerate() {
            if entry.flush {
                flushes.push((at, std::mem::take(&mut covered)));
            } else if mark.is_none() && !entry.fua && !entry.data.is_empty() {
                covered.push(at);
            }
        }
        flushes
    }

    /// Flushes, each with the number of writes that it covers.
    fn flushes(&self) -> Vec<(usize, usize)> {
        self.covered().into_iter().map(|(at, covered)| (at, covered.len())).collect()
    }

    /// Flushes, each with a write that it covers, behind which another of them goes on, and which goes on behind none.
    fn heads(&self) -> Vec<(usize, usize)> {
        let mut heads = Vec::new();
        for (flush, covered) in self.covered() {
            let ends = |at: usize| self.log[at].offset + self.log[at].data.len() as u64;
            let is_head = |&at: &usize| {
                covered.iter().any(|&other| self.log[other].offset == ends(at))
                    && !covered.iter().any(|&other| ends(other) == self.log[at].offset)
            };
            heads.extend(covered.iter().copied().filter(is_head).map(|at| (flush, at)));
        }
        heads
    }

    /// Every prefix: with all lost that may be lost, with nothing, and with some by a seed.
    pub(crate) fn all(&self, chance: &mut Chance) -> Vec<Cut> {
        let mut at = |at| [Loss::All, Loss::Nothing, Loss::Some(chance.any())].map(|loss| Cut { at, loss });
        (0..=self.len()).flat_map(&mut at).collect()
    }

    /// The device after a cut, and what must be on it. Cuts come in the order of the log.
    pub(crate) fn cut(&mut self, cut: Cut) -> (Vec<u8>, Expected) {
        while self.at < cut.at.min(self.log.len()) {
            self.step();
        }
        let mut image = self.durable.clone();
        let mut chance = Chance::new(if let Loss::Some(seed) = cut.loss { seed } else { 0 });
        for &number in &self.pending {
            let entry = &self.log[number];
            match (cut.loss, chance.below(4)) {
                (Loss::All, _) | (Loss::Some(_), 0) => {}
                (Loss::One(lost), _) if lost == number => {}
                (Loss::Nothing | Loss::One(_), _) | (Loss::Some(_), 1 | 2) => {
                    write(&mut image, entry.offset, &entry.data)
                }
                (Loss::Some(_), _) => {
                    let mut kept = false;
                    for (at, sector) in (entry.offset..).step_by(SECTOR).zip(entry.data.chunks(SECTOR)) {
                        kept = if at == SUPERBLOCK_SECOND { kept } else { chance.below(2) == 0 };
                        if kept {
                            write(&mut image, at, sector);
                        }
                    }
                }
            }
        }
        (image, self.model.expected())
    }

    fn step(&mut self) {
        let entry = &self.log[self.at];
        if entry.flush {
            for number in self.pending.drain(..) {
                write(&mut self.durable, self.log[number].offset, &self.log[number].data);
            }
        }
        match &self.marks[self.at] {
            Some(mark) => self.model.hear(mark),
            None if entry.fua => write(&mut self.durable, entry.offset, &entry.data),
            None if !entry.data.is_empty() => self.pending.push(self.at),
            None => {}
        }
        self.at += 1;
    }
}

/// What a write behind the end of the device tells, and its number.
fn numbered_mark(entry: &Entry, end: u64) -> Result<Option<(u64, Mark)>> {
    let ends = entry.offset.saturating_add(entry.data.len() as u64);
    if entry.data.is_empty() || entry.offset < end {
        ensure!(entry.data.is_empty() || ends <= end, "a write across the end, at {ends}");
        return Ok(None);
    }
    let text = entry.data.split(|byte| *byte == 0).next().unwrap_or_default();
    serde_json::from_slice(text).map(Some).context("a mark that cannot be read")
}

fn write(image: &mut [u8], offset: u64, data: &[u8]) {
    image[offset as usize..][..data.len()].copy_from_slice(data);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::State;
    use clap::ValueEnum;

    const IMAGE: usize = 8 * SECTOR;

    fn entry(sector: usize, byte: u8) -> Entry {
        let (offset, data) = ((sector * SECTOR) as u64, vec![byte; 2 * SECTOR]);
        Entry { flush: false, fua: false, offset, data }
    }

    fn mark(number: u64, mark: &Mark) -> Entry {
        let mut data = serde_json::to_vec(&(number, mark)).unwrap();
        data.resize(SECTOR, 0);
        Entry { data, ..entry(IMAGE / SECTOR, 0) }
    }

    /// What such a log leaves of an empty device.
    fn left(log: &[Entry]) -> Vec<u8> {
        let mut left = vec![0; IMAGE];
        log.iter()
            .filter(|entry| entry.offset < IMAGE as u64)
            .for_each(|entry| write(&mut left, entry.offset, &entry.data));
        left
    }

    fn log() -> Vec<Entry> {
        let flush = Entry { flush: true, offset: 0, data: vec![], ..entry(0, 0) };
        vec![
            mark(0, &Mark::Begins { block: 0 }),
            entry(0, 1),
            entry(2, 2),
            flush,
            entry(4, 3),
            Entry { fua: true, ..entry(6, 4) },
            mark(1, &Mark::Ended { block: 0, outcome: Outcome::Removed }),
        ]
    }

    fn made(log: Vec<Entry>) -> Result<Recording> {
        let left = left(&log);
        Recording::new(log, vec![0; IMAGE], &left, &Expected::nothing())
    }

    fn recording() -> Recording {
        made(log()).unwrap()
    }

    /// The first byte of each pair of sectors.
    fn pairs(image: &[u8]) -> Vec<u8> {
        image.iter().copied().step_by(2 * SECTOR).collect()
    }

    #[test]
    fn a_cut_takes_nothing_that_a_flush_or_forced_access_made_durable() {
        let check = |at, loss, expected: [u8; 4]| {
            let (image, _) = recording().cut(Cut { at, loss });
            assert_eq!(pairs(&image), expected, "{at} {loss:?}");
        };
        check(3, Loss::All, [0, 0, 0, 0]);
        check(3, Loss::Nothing, [1, 2, 0, 0]);
        check(3, Loss::One(1), [0, 2, 0, 0]);
        check(4, Loss::All, [1, 2, 0, 0]);
        check(7, Loss::All, [1, 2, 0, 4]);
        check(7, Loss::Nothing, [1, 2, 3, 4]);
        check(99, Loss::Nothing, [1, 2, 3, 4]);
    }

    #[test]
    fn seeds_keep_later_writes_without_earlier_ones_and_tear_them() {
        let images: Vec<_> =
            (0..200).map(|seed| recording().cut(Cut { at: 3, loss: Loss::Some(seed) }).0).collect();
        assert!(images.iter().any(|image| pairs(image) == [0, 2, 0, 0]), "the second and not the first");
        assert!(images.iter().any(|image| image[0] != image[SECTOR]), "one is torn");
        assert!(images.iter().all(|image| image[4 * SECTOR..].iter().all(|byte| *byte == 0)));
    }

    #[test]
    fn the_superblock_of_the_file_system_stays_whole() {
        let log = vec![Entry { data: vec![1; IMAGE], ..entry(0, 1) }];
        let cut = |seed| made(log.clone()).unwrap().cut(Cut { at: 1, loss: Loss::Some(seed) }).0;
        let images: Vec<_> = (0..200).map(cut).collect();
        let differ = |a: usize, b: usize| images.iter().any(|image| image[a * SECTOR] != image[b * SECTOR]);
        assert!(!differ(2, 3), "its two sectors");
        assert!(differ(1, 2) && differ(3, 4), "all others go alone");
    }

    #[test]
    fn marks_say_what_was_answered_by_then() {
        let expected = |at| recording().cut(Cut { at, loss: Loss::All }).1.blocks[0];
        assert_eq!(
            [0, 1, 6, 7].map(expected),
            [State::Absent, State::Unknown, State::Unknown, State::Absent]
        );
        let recording = recording();
        let cuts = recording.choose(30, Kind::value_variants(), &mut Chance::new(1));
        assert!(cuts.is_sorted_by_key(|cut| cut.at) && cuts.iter().all(|cut| cut.at <= recording.len()));
        assert!(cuts.contains(&Cut { at: 7, loss: Loss::All }), "right behind the answer");
        assert!(cuts.contains(&Cut { at: 3, loss: Loss::One(1) }), "the first of two");
        assert!(!cuts.contains(&Cut { at: 3, loss: Loss::One(2) }), "the second of two");
        assert_eq!(recording.all(&mut Chance::new(1)).len(), 24);
    }

    #[test]
    fn what_is_no_true_recording_is_refused() {
        let check = |log: Vec<Entry>, left: &[u8], why: &str| {
            let made = Recording::new(log, vec![0; IMAGE], left, &Expected::nothing());
            let error = made.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains(why), "{error}");
        };
        let left = left(&log());
        check(vec![entry(7, 1)], &left, "across the end");
        check(vec![entry(8, 1)], &left, "a mark that cannot be read");
        check(log().split_off(1), &left, "mark 1, Ended");
        let mut changed = log();
        changed.swap(0, 6);
        check(changed, &left, "where number 0 is due");
        // A later write to the same place stands before it.
        let [mut earlier, mut later] = [log(), log()];
        earlier.insert(4, entry(0, 5));
        later.insert(1, entry(0, 5));
        check(later, &self::left(&earlier), "does not lead to what the device has");
    }
}
