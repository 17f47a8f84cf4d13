//! Files on a disk whose failures matter: each call that reads, writes or syncs one, or creates it.
//!
//! What moves bytes between a file and memory of the caller's own kind (`preadv` and the like) is given as `call`, with what it
//! touches beside it. `io_uring` does not come here; the simulation has none.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

/// Opens a file, creating it if the options say so.
///
/// # Errors
/// As [`OpenOptions::open`].
pub fn open(options: &OpenOptions, path: &Path) -> io::Result<File> {
    options.open(path)
}

/// Takes the lock of a file, if no other process holds it.
///
/// # Errors
/// It is held, or the file system has no locks.
pub fn lock(file: &File) -> io::Result<()> {
    Ok(flock(file, FlockOperation::NonBlockingLockExclusive)?)
}

/// # Errors
/// As [`FileExt::read_at`].
pub fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    file.read_at(bytes, offset)
}

/// # Errors
/// As [`FileExt::read_exact_at`].
pub fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    file.read_exact_at(bytes, offset)
}

/// Reads `len` bytes by `call`. Returns how many.
///
/// # Errors
/// As `call`.
pub fn read(
    _: &File,
    _offset: u64,
    _len: usize,
    call: impl FnOnce() -> io::Result<usize>,
) -> io::Result<usize> {
    call()
}

/// Writes `len` bytes by `call`. Returns how many.
///
/// # Errors
/// As `call`.
pub fn write(
    _: &File,
    _offset: u64,
    _len: usize,
    call: impl FnOnce() -> io::Result<usize>,
) -> io::Result<usize> {
    call()
}

/// Makes the names of a folder's files outlive a power cut: `fdatasync` may leave them out.
///
/// # Errors
/// As [`File::sync_all`].
pub fn sync_folder(folder: &File) -> io::Result<()> {
    folder.sync_all()
}

/// Makes what was written to a file outlive a power cut.
///
/// # Errors
/// As [`File::sync_data`]. What was written before may be lost then, whatever a later call says.
pub fn sync(file: &File) -> io::Result<()> {
    file.sync_data()
}
