//! Policies in one file, for hosts without a network: an OCI image layout in a tar, signatures included
//! (<https://github.com/opencontainers/image-spec>, `image-layout.md`).
//!
//! A bundle is read into memory, never unpacked: the names in it reach no file system. Each blob is held against its name.

use super::artifact::{DOCUMENT_BYTES_MAX, Descriptor, MANIFEST, Manifest, digest};
use super::{COMPONENT_BYTES_MAX, Error, Package, cosign};
use crate::policy::Digest;
use crate::policy::trust::Signature;
use crate::text::printable;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use tar::{Archive, Builder, EntryType, Header};

const LAYOUT: &str = "oci-layout";
const INDEX: &str = "index.json";
const BLOBS: &str = "blobs/sha256/";
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// The most bytes of a whole bundle.
const BUNDLE_BYTES_MAX: u64 = 1 << 30;
const ENTRIES_MAX: usize = 1_024;
/// Policies in one bundle.
pub const POLICIES_MAX: usize = 64;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Index {
    schema_version: u32,
    manifests: Vec<Descriptor>,
}

/// A policy of a bundle, and what it was called when it was saved.
#[derive(Debug, PartialEq, Eq)]
pub struct Saved {
    pub name: String,
    pub package: Package,
}

/// Writes a bundle that is there in full or not at all. The same policies make the same bytes.
///
/// # Errors
/// There are too many, or the file cannot be written.
pub fn write(path: &Path, policies: &[Saved]) -> Result<(), Error> {
    if policies.len() > POLICIES_MAX {
        let reason = format!("{} policies; at most {POLICIES_MAX} go into one", policies.len());
        return Err(Error::Bundle { path: path.into(), reason });
    }
    let failed = |source| Error::File { path: path.into(), action: "written", source };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
    pack(io::BufWriter::new(file.as_file_mut()), policies).map_err(failed)?;
    let readable = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    file.as_file().set_permissions(readable).map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error)).map(drop)
}

/// Writes what a bundle has in it.
///
/// # Errors
/// The writer's.
pub fn pack(to: impl Write, policies: &[Saved]) -> io::Result<()> {
    let mut tar = Builder::new(to);
    let (index, blobs) = contents(policies);
    append(&mut tar, LAYOUT, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    append(&mut tar, INDEX, &index)?;
    for (digest, bytes) in blobs {
        append(&mut tar, &format!("{BLOBS}{digest}"), &bytes)?;
    }
    tar.into_inner()?.flush()
}

fn append(tar: &mut Builder<impl Write>, name: &str, bytes: &[u8]) -> io::Result<()> {
    let mut header = Header::new_ustar();
    header.set_entry_type(EntryType::Regular);
    header.set_mode(0o644);
    header.set_size(bytes.len() as u64);
    tar.append_data(&mut header, name, bytes)
}

/// The index, and each blob once.
fn contents(policies: &[Saved]) -> (Vec<u8>, Vec<(Digest, Vec<u8>)>) {
    let mut manifests = Vec::new();
    let mut blobs: Vec<(Digest, Vec<u8>)> = Vec::new();
    let mut keep = |bytes: &[u8]| {
        let digest = Digest::of(bytes);
        if !blobs.iter().any(|(known, _)| *known == digest) {
            blobs.push((digest, bytes.to_vec()));
        }
    };
    let mut list = |name: String, manifest: &[u8]| {
        let mut entry = Descriptor::of(MANIFEST, manifest);
        entry.annotations.insert(REF_NAME.to_owned(), name);
        manifests.push(entry);
    };
    for Saved { name, package } in policies {
        for part in [&package.component, &package.config, &package.manifest] {
            keep(part);
        }
        list(name.clone(), &package.manifest);
        if !package.signatures.is_empty() {
            let (config, manifest) = cosign::image(None, &package.signatures);
            package.signatures.iter().for_each(|signature| keep(&signature.payload));
            keep(&config);
            keep(&manifest);
            list(cosign::tag(package.manifest_digest()), &manifest);
        }
    }
    let index = Index { schema_version: 2, manifests };
    (serde_json::to_vec(&index).expect("an index is plain text and numbers"), blobs)
}

/// # Errors
/// The file is no bundle, is cut off, has more in it than a bundle has, or a part was changed.
pub fn read(path: &Path) -> Result<Vec<Saved>, Error> {
    let failed = |source| Error::File { path: path.into(), action: "read", source };
    let file = File::open(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    if bytes > BUNDLE_BYTES_MAX {
        return Err(Error::TooLarge { what: "the bundle", bytes, limit: BUNDLE_BYTES_MAX });
    }
    read_from(path, io::BufReader::new(file))
}

/// As [`read`], of what the file in `path` has in it.
///
/// # Errors
/// As [`read`].
pub fn read_from(path: &Path, from: impl Read) -> Result<Vec<Saved>, Error> {
    // A pipe has no length.
    let unpacked = Unpacked::read(from.take(BUNDLE_BYTES_MAX));
    let unpacked = unpacked.map_err(|reason| Error::Bundle { path: path.into(), reason })?;
    unpacked.policies().map_err(|error| match error {
        Refused::Bundle(reason) => Error::Bundle { path: path.into(), reason },
        Refused::Policy(error) => *error,
    })
}

enum Refused {
    Bundle(String),
    Policy(Box<Error>),
}

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Self::Policy(Box::new(error))
    }
}

/// What a tar has in it, blobs held against their names.
#[derive(Default)]
struct Unpacked {
    layout: bool,
    index: Option<Vec<u8>>,
    blobs: HashMap<Digest, Vec<u8>>,
}

impl Unpacked {
    fn read(from: impl Read) -> Result<Self, String> {
        let mut unpacked = Self::default();
        let mut archive = Archive::new(from);
        let cut_off =
            |error: io::Error| format!("it is damaged or cut off: {}", printable(&error.to_string(), 200));
        // Raw: no name may be so long that it needs an entry of its own, which would be read without a bound.
        for (count, entry) in archive.entries().map_err(cut_off)?.raw(true).enumerate() {
            let mut entry = entry.map_err(cut_off)?;
            if count >= ENTRIES_MAX {
                return Err(format!("it has more than {ENTRIES_MAX} entries"));
            }
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            let kind = entry.header().entry_type();
            if kind.is_dir() {
                continue;
            }
            if !kind.is_file() {
                return Err(format!("`{}` in it is no plain file", printable(&name, 200)));
            }
            let size = entry.size();
            if size > COMPONENT_BYTES_MAX {
                return Err(format!(
                    "`{}` in it has {size} bytes; at most {COMPONENT_BYTES_MAX}",
                    printable(&name, 200)
                ));
            }
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).map_err(cut_off)?;
            if bytes.len() as u64 != size {
                return Err("it is cut off".to_owned());
            }
            unpacked.take(&name, bytes)?;
        }
        Ok(unpacked)
    }

    fn take(&mut self, name: &str, bytes: Vec<u8>) -> Result<(), String> {
        let twice = || format!("`{}` is in it twice", printable(name, 200));
        match name.strip_prefix("./").unwrap_or(name) {
            LAYOUT => {
                if std::mem::replace(&mut self.layout, true) {
                    return Err(twice());
                }
            }
            INDEX => {
                if self.index.replace(bytes).is_some() {
                    return Err(twice());
                }
            }
            name => {
                let digest = name.strip_prefix(BLOBS).and_then(|digest| digest.parse::<Digest>().ok());
                let digest = digest
                    .ok_or_else(|| format!("`{}` does not belong into a bundle", printable(name, 200)))?;
                if Digest::of(&bytes) != digest {
                    return Err(format!("blob sha256:{digest} in it was changed"));
                }
                if self.blobs.insert(digest, bytes).is_some() {
                    return Err(twice());
                }
            }
        }
        Ok(())
    }

    fn policies(&self) -> Result<Vec<Saved>, Refused> {
        let refused = |reason: String| Refused::Bundle(reason);
        let index = self.index.as_ref().filter(|_| self.layout);
        let index =
            index.ok_or_else(|| refused(format!("it has no {LAYOUT} and {INDEX}; is it cut off?")))?;
        if index.len() as u64 > DOCUMENT_BYTES_MAX {
            return Err(refused(format!("its index has {} bytes", index.len())));
        }
        let index: Index = serde_json::from_slice(index)
            .map_err(|e| refused(format!("its index does not read: {}", printable(&e.to_string(), 200))))?;
        let named = |entry: &Descriptor| entry.annotations.get(REF_NAME).cloned().unwrap_or_default();
        let (signatures, policies): (Vec<_>, Vec<_>) =
            index.manifests.iter().partition(|entry| named(entry).ends_with(".sig"));
        if policies.is_empty() {
            return Err(refused("it has no policies in it".to_owned()));
        }
        if policies.len() > POLICIES_MAX {
            return Err(refused(format!("{} policies are in it; at most {POLICIES_MAX}", policies.len())));
        }
        let mut saved = Vec::new();
        for entry in policies {
            let manifest = self.blob(entry)?;
            let tag = cosign::tag(Digest::of(manifest));
            let signed = match signatures.iter().find(|entry| named(entry) == tag) {
                Some(entry) => self.signatures(entry)?,
                None => Vec::new(),
            };
            let parsed = Manifest::parse(manifest)?;
            let (config, component) = parsed.of_policy()?;
            let (config, component) = (self.blob(config)?.to_vec(), self.blob(component)?.to_vec());
            let package = Package::checked(manifest.to_vec(), config, component, signed)?;
            saved.push(Saved { name: printable(&named(entry), 256), package });
        }
        Ok(saved)
    }

    fn signatures(&self, entry: &Descriptor) -> Result<Vec<Signature>, Refused> {
        let manifest = Manifest::parse(self.blob(entry)?)?;
        let mut signatures = Vec::new();
        for layer in cosign::layers(&manifest)? {
            let payload = self.find(layer.payload)?.to_vec();
            signatures.push(layer.with(payload));
        }
        Ok(signatures)
    }

    fn blob(&self, of: &Descriptor) -> Result<&[u8], Refused> {
        let named = digest(&of.digest);
        self.find(
            named.ok_or_else(|| {
                Refused::Bundle(format!("`{}` in it is no digest", printable(&of.digest, 100)))
            })?,
        )
    }

    fn find(&self, digest: Digest) -> Result<&[u8], Refused> {
        let found = self.blobs.get(&digest).map(Vec::as_slice);
        found.ok_or_else(|| Refused::Bundle(format!("blob sha256:{digest} is not in it; it is cut off")))
    }
}

#[cfg(test)]
mod tests;
