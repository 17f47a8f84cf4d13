//! Policies on their way between people and hosts: in files, in registries, in bundles, with their signatures.
//!
//! A [`Package`] is a component with what goes beside it, wherever it came from; digests have been checked, signatures have
//! not. Everything here runs in the command line: the daemon fetches nothing.

mod artifact;
pub mod bundle;
mod cosign;
pub mod reference;
pub mod registry;

pub use artifact::About;
pub use reference::Reference;
pub use registry::Registry;

use crate::policy::chain::is_chain;
use crate::policy::trust::{self, Claim, PublicKey, SecretKey, Signature};
use crate::policy::{self, Digest, PolicyConfig, SlotKind};
use artifact::Artifact;
use std::io;
use std::path::{Path, PathBuf};

/// Largest component that is moved. A host has a limit of its own, `policy.component_bytes_max`.
pub const COMPONENT_BYTES_MAX: u64 = 128 << 20;

/// Why a policy did not get where it should.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "`{text}` is no reference: {reason}; write REGISTRY/REPOSITORY:TAG or REGISTRY/REPOSITORY@sha256:DIGEST"
    )]
    Reference { text: String, reason: &'static str },
    #[error("{} cannot be {action}: {source}", path.display())]
    File { path: PathBuf, action: &'static str, source: io::Error },
    #[error("{} is a chain, which is no package: its parts are; keep the file beside them", path.display())]
    Chain { path: PathBuf },
    #[error("{what} has {bytes} bytes; at most {limit} are taken")]
    TooLarge { what: &'static str, bytes: u64, limit: u64 },
    #[error("{what} is not what it should be: {reason}")]
    Malformed { what: &'static str, reason: String },
    #[error(
        "{what} was changed: wanted sha256:{wanted}, got sha256:{found}; do not use it, and tell whoever runs the registry or made the bundle"
    )]
    Changed { what: &'static str, wanted: Digest, found: Digest },
    #[error("cannot reach the registry {registry}: {reason}")]
    Unreachable { registry: String, reason: String },
    #[error(
        "the registry {registry} answers only in plain HTTP or not at all: {reason}; if its network is trusted, give --plain-http"
    )]
    Plain { registry: String, reason: String },
    #[error(
        "the registry {registry} refuses {what}; log in with `docker login {registry}`, or give --username and --password-stdin"
    )]
    Denied { registry: String, what: String },
    #[error("the registry {registry} does not have {what}")]
    NotThere { registry: String, what: String },
    #[error("the registry {registry} answered {status} about {what}: {text}")]
    Answer { registry: String, what: String, status: u16, text: String },
    #[error("the credentials for {registry} cannot be used: {reason}")]
    Credentials { registry: String, reason: String },
    #[error("{} is no bundle: {reason}", path.display())]
    Bundle { path: PathBuf, reason: String },
    #[error(transparent)]
    Policy(#[from] policy::Error),
    #[error(transparent)]
    Signatures(#[from] trust::SignatureError),
}

/// A component, and what belongs to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Package {
    pub about: About,
    pub component: Vec<u8>,
    config: Vec<u8>,
    manifest: Vec<u8>,
    /// Unchecked.
    pub signatures: Vec<Signature>,
}

impl Package {
    /// Reads it from a file, with the signatures beside it.
    ///
    /// # Errors
    /// It cannot be read, or a host would refuse it.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::File { path: path.into(), action: "read", source };
        if is_chain(path) {
            return Err(Error::Chain { path: path.into() });
        }
        let bytes = std::fs::metadata(path).map_err(failed)?.len();
        if bytes > COMPONENT_BYTES_MAX {
            return Err(Error::TooLarge { what: "the component", bytes, limit: COMPONENT_BYTES_MAX });
        }
        let component = std::fs::read(path).map_err(failed)?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let Artifact { about, config, manifest } = Artifact::of(&name, &component)?;
        let signatures = trust::read_beside(path)?;
        Ok(Self { about, component, config, manifest, signatures })
    }

    /// Makes it from its parts, which are compared with their digests.
    fn checked(
        manifest: Vec<u8>,
        config: Vec<u8>,
        component: Vec<u8>,
        signatures: Vec<Signature>,
    ) -> Result<Self, Error> {
        let Artifact { about, config, manifest } = Artifact::checked(manifest, config, &component)?;
        Ok(Self { about, component, config, manifest, signatures })
    }

    /// Writes it to a file, and its signatures beside it if it has any. Neither is ever half there.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        write_signed(path, &self.component, &self.signatures)
    }

    /// SHA-256 of the component.
    pub fn component_digest(&self) -> Digest {
        Digest::of(&self.component)
    }

    /// SHA-256 of the manifest, which is the digest that a registry names it by.
    pub fn manifest_digest(&self) -> Digest {
        Digest::of(&self.manifest)
    }

    /// `NAME.wasm`.
    pub fn file_name(&self) -> String {
        format!("{}.wasm", self.about.name)
    }

    /// Signs it for its slot, and keeps the signature with the others. `reference` is where it is, for people.
    pub fn sign(&mut self, key: &SecretKey, reference: String) {
        let (component, manifest) = (self.component_digest(), self.manifest_digest());
        let claim = Claim { component, slot: self.about.slot, manifest, reference };
        trust::add(&mut self.signatures, claim.sign(key), &key.public());
    }

    /// Whether the owner of `key` signed this component for `slot`.
    pub fn is_signed_by(&self, key: &PublicKey, slot: SlotKind) -> bool {
        let component = self.component_digest();
        let mut claims = self.signatures.iter().filter_map(|signature| signature.claim(key));
        claims.any(|claim| claim.component == component && claim.slot == slot)
    }
}

/// Writes a component, and its signatures beside it if it has any. Neither is ever half there.
///
/// # Errors
/// A file cannot be written.
pub fn write_signed(path: &Path, component: &[u8], signatures: &[Signature]) -> Result<(), Error> {
    // The signatures first: a watched folder looks when the component comes.
    if !signatures.is_empty() {
        trust::write_beside(path, signatures)?;
    } else if let Err(source) = std::fs::remove_file(trust::beside(path)) {
        // Signatures of an older component must not stand beside this one.
        if source.kind() != io::ErrorKind::NotFound {
            return Err(Error::File { path: trust::beside(path), action: "removed", source });
        }
    }
    write_file(path, component)
}

/// Writes a file that is there in full or not at all.
///
/// # Errors
/// The folder takes no files.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let write = || {
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        io::Write::write_all(&mut file, bytes)?;
        let readable = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        file.as_file().set_permissions(readable)?;
        file.persist(path).map_err(io::Error::from).map(drop)
    };
    write().map_err(|source| Error::File { path: path.into(), action: "written", source })
}

/// As much as the settings of any host may give to a policy. A host may have less, which is not decided here.
fn inspection() -> PolicyConfig {
    PolicyConfig {
        memory_bytes: 1 << 30,
        core_instances: 1_000,
        // One is made; but an instance takes a memory for each of its core modules that has one.
        instances: 64,
        max_module_bytes: COMPONENT_BYTES_MAX,
        ..PolicyConfig::default()
    }
}

fn check_digest(what: &'static str, wanted: Digest, bytes: &[u8]) -> Result<(), Error> {
    let found = Digest::of(bytes);
    if found == wanted { Ok(()) } else { Err(Error::Changed { what, wanted, found }) }
}

#[cfg(test)]
mod tests;
