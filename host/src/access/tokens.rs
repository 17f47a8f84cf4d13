//! Tokens: what a caller over TCP shows. They are kept in one file of the data folder, as hashes.
//!
//! A token reads `kvasir_ID_SECRET`. The file is written by the command line and read by the daemon, which looks at its time
//! stamp at every use, so that a new or revoked token counts at once and no restart is needed.

use kvasir_dataplane::server::access::{Identity, NO_TOKEN, Refused, Role};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const FILE: &str = "tokens.json";
const PREFIX: &str = "kvasir_";
/// More than anybody hands out; a longer file is somebody's mistake.
const TOKENS_MAX: usize = 10_000;

/// A token as it is kept. The token itself is shown once, when it is made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Token {
    pub id: String,
    /// SHA-256 of the whole token, hexadecimal.
    pub sha256: String,
    pub roles: Vec<String>,
    pub tenant: u16,
    /// Numbers of the namespaces that its bearer shares with other tenants.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub namespaces: Vec<u16>,
    /// Seconds since 1970.
    pub created: u64,
    /// Seconds since 1970. Without it, the token never expires.
    #[serde(default)]
    pub expires: Option<u64>,
}

/// The tokens of one host.
pub struct Tokens {
    path: PathBuf,
    read: Mutex<(Option<Stamp>, Vec<Token>)>,
}

/// What changes when a file is replaced.
type Stamp = (u64, i64, i64, u64);

/// Why the tokens cannot be changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{} cannot be used: {source}; run this as the user of the host", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{} does not read as tokens: {reason}; move it away and make new tokens", path.display())]
    Damaged { path: PathBuf, reason: String },
    #[error("there is no token {id}; `kvasir token list` shows them")]
    Unknown { id: String },
    #[error("{TOKENS_MAX} tokens are kept already; revoke some first")]
    TooMany,
    #[error("no randomness from the system: {0}")]
    Random(io::Error),
}

impl Tokens {
    /// The tokens of the host whose data folder this is. Nothing is read yet.
    pub fn in_folder(data_dir: &Path) -> Self {
        Self { path: data_dir.join(FILE), read: Mutex::default() }
    }

    /// Makes one, and returns its text, which is kept nowhere.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn create(
        &self,
        roles: &[Role],
        tenant: u16,
        namespaces: &[u16],
        ttl: Option<Duration>,
    ) -> Result<String, Error> {
        let mut random = [0; 36];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| Error::Random(error.into()))?;
        let id = hex(&random[..4]);
        let text = format!("{PREFIX}{id}_{}", hex(&random[4..]));
        let now = seconds(SystemTime::now());
        self.change(|tokens| {
            if tokens.len() >= TOKENS_MAX {
                return Err(Error::TooMany);
            }
            tokens.push(Token {
                id,
                sha256: hash(&text),
                roles: roles.iter().map(|role| role.name().to_owned()).collect(),
                tenant,
                namespaces: namespaces.to_vec(),
                created: now,
                expires: ttl.map(|ttl| now.saturating_add(ttl.as_secs())),
            });
            Ok(())
        })?;
        Ok(text)
    }

    /// # Errors
    /// There is no such token, or the file cannot be read or written.
    pub fn revoke(&self, id: &str) -> Result<(), Error> {
        self.change(|tokens| {
            let before = tokens.len();
            tokens.retain(|token| token.id != id);
            if tokens.len() == before { Err(Error::Unknown { id: id.to_owned() }) } else { Ok(()) }
        })
    }

    /// All that are kept, the expired ones too.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn list(&self) -> Result<Vec<Token>, Error> {
        let text = match fs::read_to_string(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(self.failed(source)),
        };
        let damaged = |reason: serde_json::Error| Error::Damaged {
            path: self.path.clone(),
            reason: reason.to_string(),
        };
        serde_json::from_str(&text).map_err(damaged)
    }

    /// The identity of a caller that shows `token`.
    ///
    /// # Errors
    /// It is unknown, revoked or expired; or the file cannot be read, in which case nobody comes in.
    pub fn identify(&self, token: &str, now: SystemTime) -> Result<Identity, Refused> {
        let sha256 = hash(token);
        let mut read = self.read.lock();
        let stamp = stamp(&self.path);
        if read.0 != stamp || stamp.is_none() {
            let list = self.list().map_err(|error| {
                tracing::error!(%error, "no caller over TCP is let in");
                Refused("the host cannot read its tokens; see its log".into())
            })?;
            *read = (stamp, list);
        }
        let found = read.1.iter().find(|token| token.sha256 == sha256);
        let found = found.ok_or_else(|| Refused(NO_TOKEN.into()))?;
        if found.expires.is_some_and(|expires| seconds(now) >= expires) {
            return Err(Refused(format!(
                "token {} has expired; make a new one with `kvasir token new`",
                found.id
            )));
        }
        let roles = found.roles.iter().filter_map(|role| role.parse::<Role>().ok()).collect();
        Ok(Identity {
            name: format!("token {}", found.id),
            roles,
            tenant: Some(found.tenant),
            shared: found.namespaces.clone(),
            in_place: false,
        })
    }

    /// Rewrites the file: another process that does the same waits, and a reader sees the old or the new one.
    fn change(&self, change: impl FnOnce(&mut Vec<Token>) -> Result<(), Error>) -> Result<(), Error> {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(|source| self.failed(source))?;
        let lock = private(&folder.join("tokens.lock")).map_err(|source| self.failed(source))?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)
            .map_err(|error| self.failed(error.into()))?;
        let mut tokens = self.list()?;
        change(&mut tokens)?;
        let text = serde_json::to_string_pretty(&tokens).expect("tokens are plain text and numbers");
        let new = self.path.with_extension("new");
        let write = || {
            let _ = fs::remove_file(&new);
            let mut file = private(&new)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, &self.path)
        };
        write().map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> Error {
        Error::File { path: self.path.clone(), source }
    }
}

/// Opened for writing, readable by the daemon's user alone.
fn private(path: &Path) -> io::Result<File> {
    let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(path)?;
    super::give_to_daemon(&file, path)?;
    Ok(file)
}

fn stamp(path: &Path) -> Option<Stamp> {
    fs::metadata(path).ok().map(|file| (file.ino(), file.mtime(), file.mtime_nsec(), file.len()))
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn hash(token: &str) -> String {
    hex(&Sha256::digest(token.as_bytes()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn tokens_are_made_known_revoked_and_expire() {
        let dir = tempfile::tempdir().unwrap();
        let (writer, daemon) = (Tokens::in_folder(dir.path()), Tokens::in_folder(dir.path()));
        let now = SystemTime::now();
        assert!(daemon.identify("kvasir_x_y", now).is_err(), "no file yet");
        let engine = writer.create(&[Role::Engine], 3, &[9], None).unwrap();
        let short =
            writer.create(&[Role::Router, Role::Observer], 0, &[], Some(Duration::from_secs(60))).unwrap();
        let known = daemon.identify(&engine, now).unwrap();
        assert_eq!((known.tenant, known.roles.to_string().as_str()), (Some(3), "engine"));
        assert_eq!(known.shared, [9]);
        assert!(daemon.identify(&short, now).is_ok());
        let late = daemon.identify(&short, now + Duration::from_secs(61)).unwrap_err().to_string();
        assert!(late.contains("has expired"), "{late}");
        // Its hash is no token, and neither is a part of one.
        let kept = writer.list().unwrap();
        assert!(
            daemon.identify(&kept[0].sha256, now).is_err() && daemon.identify(&engine[..20], now).is_err()
        );
        assert!(!fs::read_to_string(dir.path().join(FILE)).unwrap().contains(&engine));
        writer.revoke(&kept[0].id).unwrap();
        assert!(daemon.identify(&engine, now).is_err() && daemon.identify(&short, now).is_ok());
        assert!(matches!(writer.revoke("nobody"), Err(Error::Unknown { .. })));
        let mode = fs::metadata(dir.path().join(FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn what_root_changes_stays_the_daemons() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: only root can give files away");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(dir.path(), Some(65_431), Some(65_431)).unwrap();
        Tokens::in_folder(dir.path()).create(&[Role::Engine], 0, &[], None).unwrap();
        for name in [FILE, "tokens.lock"] {
            assert_eq!(fs::metadata(dir.path().join(name)).unwrap().uid(), 65_431, "{name}");
        }
    }

    #[test]
    fn a_damaged_file_lets_nobody_in() {
        let dir = tempfile::tempdir().unwrap();
        let tokens = Tokens::in_folder(dir.path());
        let token = tokens.create(&[Role::Engine], 0, &[], None).unwrap();
        fs::write(dir.path().join(FILE), "{").unwrap();
        assert!(tokens.identify(&token, SystemTime::now()).is_err());
        assert!(matches!(tokens.create(&[Role::Engine], 0, &[], None), Err(Error::Damaged { .. })));
    }
}
