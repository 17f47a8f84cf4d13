//! In place of `sled`, which has threads, locks and a clock of its own: as much of it as the data plane uses. What was flushed
//! outlives the process and a power cut, as with `kvasir-state-db`; of what was only applied a crash keeps it or not, by chance.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub type Error = std::io::Error;
pub type Result<T> = std::result::Result<T, Error>;
type Records = BTreeMap<IVec, IVec>;

/// Bytes of a key or a value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IVec(Vec<u8>);

impl Deref for IVec {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl AsRef<[u8]> for IVec {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl From<Vec<u8>> for IVec {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }
}

impl From<&[u8]> for IVec {
    fn from(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }
}

impl<const N: usize> From<&[u8; N]> for IVec {
    fn from(bytes: &[u8; N]) -> Self {
        Self(bytes.to_vec())
    }
}

/// Changes that are made together.
#[derive(Default)]
pub struct Batch(Vec<(IVec, Option<IVec>)>);

impl Batch {
    pub fn insert(&mut self, key: impl Into<IVec>, value: impl Into<IVec>) {
        self.0.push((key.into(), Some(value.into())));
    }

    pub fn remove(&mut self, key: impl Into<IVec>) {
        self.0.push((key.into(), None));
    }
}

/// A database in the folder of a host's disk.
pub struct Db {
    file: PathBuf,
    records: Mutex<Records>,
}

impl Db {
    /// # Errors
    /// The folder cannot be made.
    pub fn open(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let file = folder.join("records");
        let records = fs::read(&file).ok().and_then(|bytes| decode(&bytes)).unwrap_or_default();
        Ok(Self { file, records: Mutex::new(records) })
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn apply_batch(&self, Batch(changes): Batch) -> Result<()> {
        {
            let mut records = self.records();
            for (key, value) in changes {
                match value {
                    Some(value) => drop(records.insert(key, value)),
                    None => drop(records.remove(&key)),
                }
            }
        }
        self.perhaps_written()
    }

    pub fn clear(&self) -> Result<()> {
        self.records().clear();
        self.perhaps_written()
    }

    pub fn insert(&self, key: impl Into<IVec>, value: impl Into<IVec>) -> Result<()> {
        let mut batch = Batch::default();
        batch.insert(key, value);
        self.apply_batch(batch)
    }

    pub fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<IVec>> {
        Ok(self.records().get(&IVec::from(key.as_ref())).cloned())
    }

    pub fn iter(&self) -> Iter {
        self.scan_prefix([])
    }

    pub fn scan_prefix(&self, prefix: impl AsRef<[u8]>) -> Iter {
        let records = self.records();
        let found = records.iter().filter(|(key, _)| key.starts_with(prefix.as_ref()));
        Iter(found.map(|(key, value)| (key.clone(), value.clone())).collect::<Vec<_>>().into_iter())
    }

    pub fn flush(&self) -> Result<()> {
        fs::write(&self.file, encode(&self.records()))
    }

    fn perhaps_written(&self) -> Result<()> {
        if kvasir_os::random::number().is_multiple_of(2) { self.flush() } else { Ok(()) }
    }
}

/// Records as they were at some moment.
pub struct Iter(std::vec::IntoIter<(IVec, IVec)>);

impl Iter {
    pub fn keys(self) -> impl Iterator<Item = Result<IVec>> {
        self.0.map(|(key, _)| Ok(key))
    }
}

impl Iterator for Iter {
    type Item = Result<(IVec, IVec)>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(Ok)
    }
}

/// Each key and value, with its length (4 B, little-endian) before it.
fn encode(records: &Records) -> Vec<u8> {
    let parts = records.iter().flat_map(|(key, value)| [key, value]);
    parts.flat_map(|part| [&(part.len() as u32).to_le_bytes()[..], &**part].concat()).collect()
}

fn decode(mut bytes: &[u8]) -> Option<Records> {
    let mut part = || {
        let (len, rest) = bytes.split_first_chunk()?;
        let (part, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        bytes = rest;
        Some(IVec::from(part))
    };
    let mut records = Records::new();
    while let Some(key) = part() {
        records.insert(key, part()?);
    }
    Some(records)
}
