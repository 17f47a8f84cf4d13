//! Reads what `dm-log-writes` recorded of a device (the kernel's `Documentation/admin-guide/device-mapper/log-writes.rst`).
//!
//! The log is a sector that describes it, then entries: a sector each, followed by the data. All numbers are little-endian.
//! A write stands in it when it can no longer be lost: one that forces unit access (FUA) at its end, any other before the
//! flush that covers it, in the order in which they ended. That holds as long as no flush overtakes another (`machine.rs`).

use std::io::{Read, Seek, SeekFrom};

use anyhow::{Context, Result, ensure};

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;
/// What one recording may take of our memory.
const DATA_MAX: u64 = 512 << 20;

/// One request that reached the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Everything that had ended when it began is durable when it has ended.
    pub(crate) flush: bool,
    /// Its own data are durable when it has ended.
    pub(crate) fua: bool,
    /// Byte of the device at which the data go.
    pub(crate) offset: u64,
    /// Empty if it writes nothing; what was discarded may be there all the same.
    pub(crate) data: Vec<u8>,
}

/// All that was recorded.
///
/// # Errors
/// It is no such log, it ends early, or it is larger than half a GiB.
pub(crate) fn read(mut log: impl Read + Seek) -> Result<Vec<Entry>> {
    log.rewind().context("a log that cannot be read from its start")?;
    let head: [u8; 32] = take(&mut log).context("the head of the log")?;
    ensure!(u64_at(&head, 0) == MAGIC, "this is no log of dm-log-writes");
    ensure!(u64_at(&head, 8) == VERSION, "the log has version {}, not {VERSION}", u64_at(&head, 8));
    let (count, sector) = (u64_at(&head, 16), u64_at(&head, 24) & 0xffff_ffff);
    ensure!(sector.is_power_of_two() && (512..=4096).contains(&sector), "sectors of {sector} B");
    let mut at = sector;
    let mut left = DATA_MAX;
    let mut entries = Vec::new();
    for number in 0..count {
        log.seek(SeekFrom::Start(at)).with_context(|| format!("entry {number} of {count}"))?;
        let head: [u8; 32] = take(&mut log).with_context(|| format!("entry {number} of {count}"))?;
        let (place, sectors, flags) = (u64_at(&head, 0), u64_at(&head, 8), u64_at(&head, 16));
        let bytes = if flags & (DISCARD | MARK) == 0 { sectors.saturating_mul(sector) } else { 0 };
        ensure!(bytes <= left, "entry {number} of {count}: more than {DATA_MAX} B in all");
        left -= bytes;
        let mut data = vec![0; bytes as usize];
        log.seek(SeekFrom::Start(at + sector)).with_context(|| format!("entry {number} of {count}"))?;
        log.read_exact(&mut data).with_context(|| format!("the data of entry {number} of {count}"))?;
        let offset = place.checked_mul(sector).with_context(|| format!("entry {number}: sector {place}"))?;
        entries.push(Entry { flush: flags & FLUSH != 0, fua: flags & FUA != 0, offset, data });
        at += sector + bytes;
    }
    Ok(entries)
}

fn take<const N: usize>(log: &mut impl Read) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    log.read_exact(&mut bytes).map(|()| bytes)
}

fn u64_at(bytes: &[u8; 32], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    fn sector(words: &[u64]) -> Vec<u8> {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.resize(512, 0);
        bytes
    }

    fn log() -> Vec<u8> {
        let write = [sector(&[8, 1, 0, 0]), vec![7; 512]].concat();
        let fua = [sector(&[3, 2, FUA, 0]), vec![9; 1024]].concat();
        let (discard, mark) = (sector(&[1, 100, DISCARD, 0]), sector(&[0, 0, MARK, 5]));
        [sector(&[MAGIC, 1, 5, 512]), write, discard, mark, sector(&[0, 0, FLUSH, 0]), fua].concat()
    }

    #[test]
    fn entries_have_their_place_data_and_flags() {
        let plain = |flush| Entry { flush, fua: false, offset: 0, data: vec![] };
        let expected = [
            Entry { offset: 4096, data: vec![7; 512], ..plain(false) },
            Entry { offset: 512, ..plain(false) },
            plain(false),
            plain(true),
            Entry { fua: true, offset: 1536, data: vec![9; 1024], ..plain(false) },
        ];
        assert_eq!(read(Cursor::new(log())).unwrap(), expected);
    }

    #[test]
    fn what_is_no_whole_log_is_refused() {
        let check = |log: Vec<u8>, why: &str| {
            let error = format!("{:#}", read(Cursor::new(log)).unwrap_err());
            assert!(error.contains(why), "{error}");
        };
        check(vec![], "the head of the log");
        check(sector(&[MAGIC + 1, 1, 0, 512]), "no log of dm-log-writes");
        check(sector(&[MAGIC, 2, 0, 512]), "version 2");
        check(sector(&[MAGIC, 1, 0, 7]), "sectors of 7 B");
        let whole = log();
        check(whole[..whole.len() - 1].to_vec(), "the data of entry 4 of 5");
        check([sector(&[MAGIC, 1, 1, 512]), sector(&[0, u64::MAX, 0, 0])].concat(), "more than");
        check(
            [sector(&[MAGIC, 1, 1, 512]), sector(&[u64::MAX, 0, 0, 0])].concat(),
            "sector 18446744073709551615",
        );
    }
}
