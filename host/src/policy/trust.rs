//! Whose policies may serve which slot.
//!
//! A trust file lists public keys. Where one is configured, a component is brought into service only with a signature of
//! a listed key for this component and this slot; built-in policies need none. The file is read again at every load, so
//! that a removed key counts at once for loads, rollbacks and restarts. What serves already goes on until one of these. A
//! file that cannot be read trusts nobody.

mod keys;
mod signature;

pub use keys::{KeyError, PublicKey, SecretKey};
pub use signature::{
    Claim, PAYLOAD_BYTES_MAX, SIGNATURES_MAX, Signature, SignatureError, add, beside, check_amount,
    parse_signatures, print_signatures, read_beside, write_beside,
};

use super::engine::Digest;
use super::{Error, Origin, SlotKind};
use crate::text::printable;
use serde::Deserialize;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const FILE_BYTES_MAX: u64 = 1 << 20;
const KEYS_MAX: usize = 256;
const NAME_BYTES_MAX: usize = 64;
/// The most of a policy's name that goes into an error.
const NAME_SHOWN: usize = 256;

/// A key of a trust file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustedKey {
    pub name: String,
    /// The slots that it may sign for.
    pub slots: Vec<SlotKind>,
    pub key: PublicKey,
}

impl TrustedKey {
    /// As it stands in a trust file.
    pub fn to_toml(&self) -> String {
        let Self { name, slots, key } = self;
        let slots: Vec<_> = slots.iter().map(|slot| format!("\"{slot}\"")).collect();
        format!(
            "[[keys]]\nname = \"{name}\"\nslots = [{}]\npublic_key = \"\"\"\n{}\"\"\"\n",
            slots.join(", "),
            key.to_pem()
        )
    }
}

/// The keys of a trust file, in its order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedKeys(pub Vec<TrustedKey>);

/// Why a trust file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    #[error("trust file {} cannot be used: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("others may write to the trust file {} (mode {mode:03o}); run chmod go-w on it", path.display())]
    Mode { path: PathBuf, mode: u32 },
    #[error("trust file {} has {bytes} bytes; at most {FILE_BYTES_MAX} are read", path.display())]
    TooLarge { path: PathBuf, bytes: u64 },
    #[error("trust file {} has a key called `{name}` already; give this one another name", path.display())]
    NameTaken { path: PathBuf, name: String },
    #[error("trust file {} does not read: {reason}", path.display())]
    Damaged { path: PathBuf, reason: String },
}

/// Why a component is not trusted.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    #[error(
        "it is not signed; sign it with a trusted key (`kvasir policy sign FILE --key KEY`), or have the host's operator change its trust file"
    )]
    Unsigned,
    #[error(
        "none of its signatures is by a key trusted for {slot}; sign it with one of those (`kvasir policy trust list` shows them), or add its signer's key to the trust file"
    )]
    OtherKey { slot: SlotKind },
    #[error("`{key}` signed it as {signed}; sign it for {slot}, or load it there")]
    OtherSlot { key: String, signed: SlotKind, slot: SlotKind },
    #[error("`{key}` signed another component, sha256:{signed}; sign this one")]
    OtherComponent { key: String, signed: Digest },
    #[error("its signatures are refused: {0}")]
    Signatures(String),
    #[error("{0}; until that is mended only built-in policies are loaded")]
    File(#[from] TrustError),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    keys: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    /// Absent means all.
    slots: Option<Vec<String>>,
    public_key: String,
}

impl TrustedKeys {
    /// # Errors
    /// The file cannot be read, others may write to it, or any part of it is wrong.
    pub fn read(path: &Path) -> Result<Self, TrustError> {
        let failed = |source| TrustError::File { path: path.into(), source };
        let metadata = std::fs::metadata(path).map_err(failed)?;
        let (mode, bytes) = (metadata.permissions().mode() & 0o777, metadata.len());
        if mode & 0o022 != 0 {
            return Err(TrustError::Mode { path: path.into(), mode });
        }
        if bytes > FILE_BYTES_MAX {
            return Err(TrustError::TooLarge { path: path.into(), bytes });
        }
        let text = std::fs::read_to_string(path).map_err(failed)?;
        Self::parse(&text).map_err(|reason| TrustError::Damaged { path: path.into(), reason })
    }

    /// One key, for whatever slot.
    pub fn only(key: PublicKey) -> Self {
        let name = key.id().to_string();
        Self(vec![TrustedKey { name, slots: SlotKind::ALL.into(), key }])
    }

    /// Appends a key to a trust file, which is made if it is not there, and returns all that are in it then. What people
    /// wrote into the file stays as it is.
    ///
    /// # Errors
    /// The file cannot be used or written, or has a key of that name.
    pub fn add(path: &Path, key: TrustedKey) -> Result<Self, TrustError> {
        let failed = |source| TrustError::File { path: path.into(), source };
        let (known, mut text) = match Self::read(path) {
            Ok(known) => (known, std::fs::read_to_string(path).map_err(failed)?),
            Err(TrustError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                (Self(Vec::new()), String::new())
            }
            Err(error) => return Err(error),
        };
        if !text.is_empty() {
            text.push('\n');
        }
        text += &key.to_toml();
        if known.0.iter().any(|known| known.name == key.name) {
            return Err(TrustError::NameTaken { path: path.into(), name: key.name });
        }
        let keys = Self::parse(&text).map_err(|reason| TrustError::Damaged { path: path.into(), reason })?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let write = || {
            let mut file = tempfile::NamedTempFile::new_in(folder)?;
            io::Write::write_all(&mut file, text.as_bytes())?;
            file.as_file().set_permissions(PermissionsExt::from_mode(0o644))?;
            file.persist(path).map_err(io::Error::from).map(drop)
        };
        write().map_err(failed)?;
        Ok(keys)
    }

    /// What a trust file has in it.
    ///
    /// # Errors
    /// What is wrong with it, as part of a sentence.
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|e| printable(e.to_string().trim_end(), 1 << 10))?;
        if file.keys.len() > KEYS_MAX {
            return Err(format!("it has {} keys; at most {KEYS_MAX} are read", file.keys.len()));
        }
        let mut keys: Vec<TrustedKey> = Vec::new();
        for entry in file.keys {
            let key = entry.checked()?;
            if keys.iter().any(|other| other.name == key.name) {
                return Err(format!("two keys are called `{}`", key.name));
            }
            keys.push(key);
        }
        Ok(Self(keys))
    }

    /// The name of the key by which this component is trusted for this slot.
    ///
    /// # Errors
    /// It is not trusted; the error tells how close its signatures come.
    pub fn check(
        &self,
        slot: SlotKind,
        component: Digest,
        signatures: &[Signature],
    ) -> Result<&str, Refused> {
        check_amount(signatures).map_err(Refused::Signatures)?;
        let mut refused = if signatures.is_empty() { Refused::Unsigned } else { Refused::OtherKey { slot } };
        for TrustedKey { name, key, .. } in self.0.iter().filter(|key| key.slots.contains(&slot)) {
            for claim in signatures.iter().filter_map(|signature| signature.claim(key)) {
                if claim.component != component {
                    refused = Refused::OtherComponent { key: name.clone(), signed: claim.component };
                } else if claim.slot != slot {
                    refused = Refused::OtherSlot { key: name.clone(), signed: claim.slot, slot };
                } else {
                    return Ok(name);
                }
            }
        }
        Err(refused)
    }
}

impl Entry {
    fn checked(self) -> Result<TrustedKey, String> {
        let Self { name, slots, public_key } = self;
        if !is_name(&name) {
            let given = printable(&name, NAME_BYTES_MAX);
            return Err(format!("`{given}` names no key; names are {NAME_RULE}"));
        }
        let slots = match slots {
            None => SlotKind::ALL.into(),
            Some(slots) => {
                let slots: Result<Vec<_>, _> = slots.iter().map(|slot| slot.parse()).collect();
                slots.map_err(|error: super::UnknownSlot| format!("key `{name}`: {error}"))?
            }
        };
        let key = PublicKey::from_pem(&public_key).map_err(|error| format!("key `{name}`: {error}"))?;
        Ok(TrustedKey { name, slots, key })
    }
}

/// What a key may be called.
pub const NAME_RULE: &str = "1 to 64 of A-Z a-z 0-9 . _ -";

/// Whether a key may have this name: names reach files, logs and errors.
pub fn is_name(name: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(allowed)
}

/// The gate that every component passes on its way into a slot. Without a trust file it is open.
#[derive(Clone, Debug, Default)]
pub(super) struct Gate(Option<Arc<Path>>);

impl Gate {
    pub(super) fn new(file: Option<&Path>) -> Self {
        // Loads will be refused for it, one by one; the person who starts the host should hear of it once.
        if let Some(error) = file.and_then(|file| TrustedKeys::read(file).err()) {
            tracing::error!(%error, "only built-in policies are loaded");
        }
        Self(file.map(Arc::from))
    }

    pub(super) fn is_open(&self) -> bool {
        self.0.is_none()
    }

    /// # Errors
    /// [`Error::Untrusted`], of whichever part of a chain it is.
    pub(super) fn check(&self, slot: SlotKind, origin: &Origin) -> Result<(), Error> {
        let Some(file) = &self.0 else { return Ok(()) };
        match origin {
            Origin::Builtin { .. } | Origin::Native { .. } => Ok(()),
            Origin::Chain { parts, .. } => {
                parts.iter().try_for_each(|part| self.check(slot, &part.assignment.origin))
            }
            Origin::Module { name, digest, signatures } => {
                let refused = |reason| Error::Untrusted { name: printable(name, NAME_SHOWN), slot, reason };
                let keys = TrustedKeys::read(file).map_err(|error| refused(error.into()))?;
                // The catalogue has no other text there than the host wrote.
                let digest = digest.parse().map_err(|_| refused(Refused::Unsigned))?;
                keys.check(slot, digest, signatures).map(drop).map_err(refused)
            }
        }
    }
}

#[cfg(test)]
mod tests;
