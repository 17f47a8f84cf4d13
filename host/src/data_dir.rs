//! The data folder: locked for one host, and for nobody else to write. Compiled code of policies lies in it
//! and is run as it is, so anybody who can write there runs code as this user.

use rustix::fs::FlockOperation;
use std::fs::{DirBuilder, File, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Free space the state database needs at least.
pub(crate) const DISK_BYTES_MIN: u64 = 16 << 20;
/// How long a host that starts waits for the one before it to be gone.
const LOCK_WAIT: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
const STATE_CACHE_BYTES: u64 = 16 << 20;

/// Why the data folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("data folder {} cannot be used: {source}; set node.data_dir to a folder this user can write", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("data folder {} belongs to user {owner}, this is user {user}; set another node.data_dir, or give it to this user", path.display())]
    Foreign { path: PathBuf, owner: u32, user: u32 },
    #[error("data folder {} has mode {mode:o}, so others may write to it; run `chmod go-w` on it, after a look at what is in there", path.display())]
    Open { path: PathBuf, mode: u32 },
    #[error("data folder {} is in use by another kvasir; stop it or set another node.data_dir", path.display())]
    Locked { path: PathBuf },
    #[error("the disk of {} has {free} B free, a host needs {DISK_BYTES_MIN}; make room or set another node.data_dir", path.display())]
    DiskFull { path: PathBuf, free: u64 },
    #[error("the state of policies cannot be opened: {0}")]
    State(#[from] kvasir_state_db::OpenError),
}

/// The data folder, locked for this process, and the database in it.
pub(crate) struct DataDir {
    pub(crate) path: PathBuf,
    pub(crate) state: kvasir_state_db::Db,
    /// The lock goes when this is closed, also by `kill -9`.
    _lock: File,
}

impl DataDir {
    /// Makes the folder, if it is not there, for this user alone.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Io { path: path.into(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
        check_owner(path, &path.metadata().map_err(failed)?)?;
        let lock = File::options().create(true).truncate(false).write(true).open(path.join("lock"));
        let lock = lock.map_err(failed)?;
        if !take(&lock).map_err(failed)? {
            return Err(Error::Locked { path: path.into() });
        }
        let disk = rustix::fs::statvfs(path).map_err(|errno| failed(errno.into()))?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if free < DISK_BYTES_MIN {
            return Err(Error::DiskFull { path: path.into(), free });
        }
        let state = kvasir_state_db::open(&path.join("state"), STATE_CACHE_BYTES)?;
        if let Some(kept) = &state.set_aside {
            let kept = kept.display();
            tracing::error!(%kept, "the state of policies was damaged and is set aside; load your policies again");
        }
        Ok(Self { path: path.into(), state: state.db, _lock: lock })
    }
}

/// Takes the lock if its last owner is gone or about to go: until then also a process that it was just starting has it, and a host
/// that was killed while the kernel takes its memory down.
fn take(lock: &File) -> io::Result<bool> {
    let until = Instant::now() + LOCK_WAIT;
    loop {
        match rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(LOOK_AGAIN),
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(false),
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn check_owner(path: &Path, metadata: &Metadata) -> Result<(), Error> {
    let (owner, user, mode) = (metadata.uid(), rustix::process::geteuid().as_raw(), metadata.mode() & 0o7777);
    if owner != user {
        return Err(Error::Foreign { path: path.into(), owner, user });
    }
    if mode & 0o022 != 0 {
        return Err(Error::Open { path: path.into(), mode });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_folder_is_for_this_user_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        drop(DataDir::open(&path).unwrap());
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o700);
        for mode in [0o770, 0o702, 0o777, 0o1777] {
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let refused = DataDir::open(&path).err().unwrap().to_string();
            assert!(refused.contains(&format!("mode {mode:o}")), "{refused}");
        }
        std::fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        drop(DataDir::open(&path).unwrap());
    }

    #[test]
    fn who_starts_waits_for_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let before = DataDir::open(&path).unwrap();
        std::thread::scope(|scope| {
            let next = scope.spawn(|| DataDir::open(&path).map(drop));
            // Long enough for it to be there first; were it not, it would not have to wait.
            std::thread::sleep(Duration::from_millis(200));
            drop(before);
            next.join().unwrap().unwrap();
        });
    }

    #[test]
    fn damaged_state_is_set_aside_and_the_host_starts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        drop(DataDir::open(&path).unwrap());
        std::fs::write(path.join("state/conf"), "this is no configuration").unwrap();
        drop(DataDir::open(&path).unwrap());
        assert!(path.join("state.damaged-1").exists());
    }

    #[test]
    fn a_folder_of_another_user_is_refused() {
        let all = ["/proc/1", "/usr", "/tmp"]
            .iter()
            .filter_map(|path| Some((path, Path::new(path).metadata().ok()?)));
        let user = rustix::process::geteuid().as_raw();
        for (path, metadata) in all {
            let refused = check_owner(Path::new(path), &metadata);
            assert_eq!(matches!(refused, Err(Error::Foreign { .. })), metadata.uid() != user, "{path}");
        }
    }
}
