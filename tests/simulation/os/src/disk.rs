//! The disk: files of the real file system, whose reads and writes take virtual time and may fail, and which remember what they
//! were before each write that is not synced. A power cut takes from these what it likes: whole pages or single sectors of
//! them, later writes and not earlier ones, and the names of files in a folder that was not synced.
//!
//! A sync that fails drops what it should have made durable from the cache, as Linux does: it is lost or not from then on, and
//! no later sync brings it back.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::random::Rng;
use crate::schedule::{self, On};

const MICROSECOND: u64 = 1000;
const MILLISECOND: u64 = 1_000_000;
const PAGE: u64 = 4096;
const SECTOR: u64 = 512;
/// `EIO`.
const IO_ERROR: i32 = 5;
/// `ENOSPC`.
const FULL: i32 = 28;

/// How often something goes wrong: one call in so many; 0 is never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Failing {
    pub reads: u64,
    pub writes: u64,
    pub syncs: u64,
    /// A read finds one bit flipped, for good.
    pub bits: u64,
}

#[derive(Default)]
pub(crate) struct Disks {
    pub(crate) failing: Failing,
    /// What pages were, oldest first.
    before: Vec<Before>,
    /// Files that are not yet in a synced folder.
    created: Vec<(usize, PathBuf)>,
    /// By inode, to write back what pages were.
    files: BTreeMap<u64, Arc<File>>,
    next: u64,
}

/// A page as it was before it was written.
struct Before {
    host: usize,
    number: u64,
    inode: u64,
    file: Arc<File>,
    offset: u64,
    bytes: Vec<u8>,
}

impl Disks {
    fn fails(&self, rng: &mut Rng, one_in: u64) -> bool {
        one_in > 0 && rng.below(one_in) == 0
    }

    /// The power is cut: what was not synced may be lost.
    pub(crate) fn lose(&mut self, host: usize, rng: &mut Rng) {
        self.drop_from_cache(rng, |before| before.host == host);
        for (_, path) in self.created.iter().filter(|(of, _)| *of == host) {
            if rng.below(2) == 0 {
                let _ = std::fs::remove_file(path);
            }
        }
        self.created.retain(|(of, _)| *of != host);
    }

    /// Of these writes, some are on the disk from here on, and some are not.
    fn drop_from_cache(&mut self, rng: &mut Rng, these: impl Fn(&Before) -> bool) {
        self.before.iter().rev().filter(|before| these(before)).for_each(|before| before.lose(rng));
        self.before.retain(|before| !these(before));
    }
}

impl Before {
    fn lose(&self, rng: &mut Rng) {
        match rng.below(4) {
            0 => {}
            1 => {
                let torn = |sector: &u64| *sector < self.bytes.len() as u64 / SECTOR;
                for sector in (0..PAGE / SECTOR).filter(torn).filter(|_| rng.below(2) == 0) {
                    let at = (sector * SECTOR) as usize;
                    let _ = self
                        .file
                        .write_all_at(&self.bytes[at..at + SECTOR as usize], self.offset + sector * SECTOR);
                }
            }
            _ => drop(self.file.write_all_at(&self.bytes, self.offset)),
        }
    }
}

/// What a disk takes: mostly what flash does, sometimes a queue, seldom its own housekeeping.
fn delay(rng: &mut Rng) -> u64 {
    match rng.below(1000) {
        0..3 => 100 * MILLISECOND + rng.below(400 * MILLISECOND),
        3..30 => MILLISECOND + rng.below(10 * MILLISECOND),
        _ => 20 * MICROSECOND + rng.below(200 * MICROSECOND),
    }
}

fn take_time() {
    if schedule::me().is_some() {
        let time = delay(&mut schedule::world().rng);
        schedule::wait(On::Time, Some(schedule::now() + time));
    }
}

/// Whether this call fails, as one of the kind in `one_in` does.
fn fails(one_in: impl Fn(&Failing) -> u64) -> bool {
    let mut world = schedule::world();
    let schedule::World { disks, rng, .. } = &mut *world;
    disks.fails(rng, one_in(&disks.failing))
}

fn error(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

fn inode(file: &File) -> io::Result<u64> {
    Ok(file.metadata()?.ino())
}

/// The host whose thread this is.
fn host(world: &schedule::World) -> usize {
    schedule::me().and_then(|me| world.tasks[me].host).unwrap_or(usize::MAX)
}

pub fn open(options: &OpenOptions, path: &Path) -> io::Result<File> {
    let is_new = !path.exists();
    let file = options.open(path)?;
    let mut world = schedule::world();
    if is_new && path.exists() {
        let host = host(&world);
        world.disks.created.push((host, path.into()));
        let (inode, kept) = (inode(&file)?, Arc::new(file.try_clone()?));
        world.disks.files.insert(inode, kept);
    }
    Ok(file)
}

/// Of the processes that ever opened it here only one has not crashed.
pub fn lock(_: &File) -> io::Result<()> {
    Ok(())
}

pub fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    read(file, offset, bytes.len(), || file.read_at(bytes, offset))
}

pub fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let len = bytes.len();
    read(file, offset, len, || file.read_exact_at(bytes, offset).map(|()| len)).map(drop)
}

pub fn read(
    file: &File,
    offset: u64,
    len: usize,
    call: impl FnOnce() -> io::Result<usize>,
) -> io::Result<usize> {
    take_time();
    if fails(|failing| failing.reads) {
        return Err(error(IO_ERROR));
    }
    if len > 0 && fails(|failing| failing.bits) {
        let at = offset + schedule::world().rng.below(len as u64);
        let mut byte = [0];
        if file.read_exact_at(&mut byte, at).is_ok() {
            byte[0] ^= 1 << schedule::world().rng.below(8);
            file.write_all_at(&byte, at)?;
        }
    }
    call()
}

pub fn write(
    file: &File,
    offset: u64,
    len: usize,
    call: impl FnOnce() -> io::Result<usize>,
) -> io::Result<usize> {
    take_time();
    let failure = fails(|failing| failing.writes).then(|| {
        let full = schedule::world().rng.below(2) == 0;
        error(if full { FULL } else { IO_ERROR })
    });
    // Of those that fail, some reach the disk all the same.
    if failure.is_none() || schedule::world().rng.below(2) == 0 {
        remember(file, offset, len)?;
        let written = call();
        if failure.is_none() {
            take_time();
            return written;
        }
    }
    failure.map_or(Ok(0), Err)
}

fn remember(file: &File, offset: u64, len: usize) -> io::Result<()> {
    let mut world = schedule::world();
    let (host, inode) = (host(&world), inode(file)?);
    let kept = match world.disks.files.get(&inode) {
        Some(kept) => Arc::clone(kept),
        None => Arc::new(file.try_clone()?),
    };
    world.disks.files.insert(inode, Arc::clone(&kept));
    for at in (offset..offset + len as u64).step_by(PAGE as usize) {
        let mut bytes = vec![0; PAGE as usize];
        let read = file.read_at(&mut bytes, at)?;
        bytes.truncate(read);
        let number = world.disks.next;
        world.disks.next += 1;
        let file = Arc::clone(&kept);
        world.disks.before.push(Before { host, number, inode, file, offset: at, bytes });
    }
    Ok(())
}

pub fn sync_folder(folder: &File) -> io::Result<()> {
    sync(folder)
}

pub fn sync(file: &File) -> io::Result<()> {
    // What is written while it goes on may be in it or not.
    let until = schedule::world().disks.next;
    let folder = file.metadata()?.is_dir();
    take_time();
    let (inode, failed) = (inode(file)?, fails(|failing| failing.syncs));
    let mut world = schedule::world();
    let host = host(&world);
    let schedule::World { disks, rng, .. } = &mut *world;
    let concerns = |before: &Before| before.inode == inode && before.number < until;
    if failed {
        disks.drop_from_cache(rng, concerns);
        return Err(error(IO_ERROR));
    }
    disks.before.retain(|before| !concerns(before));
    if folder {
        disks.created.retain(|(of, _)| *of != host);
    }
    Ok(())
}
