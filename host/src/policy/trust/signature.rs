//! What a signature says, and how it is kept.
//!
//! The text that is signed is in cosign's *simple signing* form, so that cosign verifies it in a registry. It names the manifest that the
//! component has there and, under `optional`, what a host goes by: the component's own digest and its slot. A host needs
//! neither registry nor manifest for it.

use super::super::{Digest, SlotKind};
use super::keys::{PublicKey, SecretKey};
use serde::{Deserialize, Serialize};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Signatures of one component.
pub const SIGNATURES_MAX: usize = 16;
/// The most bytes of what is signed.
pub const PAYLOAD_BYTES_MAX: usize = 4 << 10;
const FILE_BYTES_MAX: u64 = 256 << 10;
const COSIGN: &str = "cosign container image signature";

/// A text and its signature, as yet unchecked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    #[serde(with = "text_of_bytes")]
    pub payload: Vec<u8>,
    #[serde(with = "text_of_bytes")]
    pub signature: Vec<u8>,
}

/// What somebody puts their name to: this component may serve this slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    pub component: Digest,
    pub slot: SlotKind,
    /// Digest of the manifest under which the component is in a registry.
    pub manifest: Digest,
    /// Where it is kept, or what it is called. For people; nothing is decided by it.
    pub reference: String,
}

/// Why bytes are no signatures.
#[derive(Debug, thiserror::Error)]
pub enum SignatureError {
    #[error("signatures in {} cannot be {action}: {source}", path.display())]
    File { path: PathBuf, action: &'static str, source: io::Error },
    #[error("{} does not read as signatures: {reason}; remove it, or sign the component again", path.display())]
    Damaged { path: PathBuf, reason: String },
    #[error("the component has {SIGNATURES_MAX} signatures already; remove {} to begin anew", path.display())]
    TooMany { path: PathBuf },
}

/// The text that is signed, in the words of <https://github.com/sigstore/cosign>, `specs/SIGNATURE_SPEC.md`.
#[derive(Serialize, Deserialize)]
struct Payload {
    critical: Critical,
    optional: Optional,
}

#[derive(Serialize, Deserialize)]
struct Critical {
    identity: Identity,
    image: Image,
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Serialize, Deserialize)]
struct Identity {
    #[serde(rename = "docker-reference")]
    reference: String,
}

#[derive(Serialize, Deserialize)]
struct Image {
    #[serde(rename = "docker-manifest-digest")]
    manifest: String,
}

#[derive(Serialize, Deserialize)]
struct Optional {
    #[serde(rename = "kvasir.policy.component")]
    component: String,
    #[serde(rename = "kvasir.policy.slot")]
    slot: String,
}

impl Claim {
    pub fn sign(&self, key: &SecretKey) -> Signature {
        let payload = serde_json::to_vec(&self.payload()).expect("a payload is plain text");
        let signature = key.sign(&payload).to_vec();
        Signature { payload, signature }
    }

    fn payload(&self) -> Payload {
        let Self { component, slot, manifest, reference } = self;
        let identity = Identity { reference: reference.clone() };
        let image = Image { manifest: format!("sha256:{manifest}") };
        Payload {
            critical: Critical { identity, image, kind: COSIGN.to_owned() },
            optional: Optional { component: format!("sha256:{component}"), slot: slot.to_string() },
        }
    }

    fn parse(payload: &[u8]) -> Option<Self> {
        let Payload { critical, optional } = serde_json::from_slice(payload).ok()?;
        (critical.kind == COSIGN).then_some(())?;
        let digest = |text: &str| text.strip_prefix("sha256:")?.parse::<Digest>().ok();
        Some(Self {
            component: digest(&optional.component)?,
            slot: optional.slot.parse().ok()?,
            manifest: digest(&critical.image.manifest)?,
            reference: critical.identity.reference,
        })
    }
}

impl Signature {
    /// Whether it says that it is for this manifest. Who says so is not checked.
    pub fn is_of_manifest(&self, digest: &str) -> bool {
        let payload = serde_json::from_slice::<Payload>(&self.payload);
        payload.is_ok_and(|payload| payload.critical.image.manifest == digest)
    }

    /// What is claimed here, by whomever: nobody's key was asked.
    pub fn says(&self) -> Option<Claim> {
        Claim::parse(&self.payload)
    }

    /// What the owner of `key` claims here. `None` means that it is not theirs, or says something else.
    pub fn claim(&self, key: &PublicKey) -> Option<Claim> {
        let signature = self.signature.as_slice().try_into().ok()?;
        if self.payload.len() > PAYLOAD_BYTES_MAX || !key.verifies(&self.payload, signature) {
            return None;
        }
        Claim::parse(&self.payload)
    }
}

/// The file of signatures beside a component: `lru.wasm.sig` of `lru.wasm`.
pub fn beside(component: &Path) -> PathBuf {
    let mut name = component.as_os_str().to_owned();
    name.push(".sig");
    name.into()
}

#[derive(Default, Serialize, Deserialize)]
struct Signatures {
    signatures: Vec<Signature>,
}

/// The signatures beside a component; empty if there is no such file.
///
/// # Errors
/// The file cannot be read, or is something else.
pub fn read_beside(component: &Path) -> Result<Vec<Signature>, SignatureError> {
    let path = beside(component);
    let failed = |source| SignatureError::File { path: path.clone(), action: "read", source };
    let damaged = |reason: String| SignatureError::Damaged { path: path.clone(), reason };
    match std::fs::metadata(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
        Ok(file) if file.len() > FILE_BYTES_MAX => {
            return Err(damaged(format!("it has {} bytes, more than {FILE_BYTES_MAX}", file.len())));
        }
        Ok(_) => {}
    }
    parse_signatures(&std::fs::read(&path).map_err(failed)?).map_err(damaged)
}

/// What a file of signatures has in it.
///
/// # Errors
/// What is wrong with it, as part of a sentence.
pub fn parse_signatures(text: &[u8]) -> Result<Vec<Signature>, String> {
    let Signatures { signatures } = serde_json::from_slice(text).map_err(|e| e.to_string())?;
    check_amount(&signatures)?;
    Ok(signatures)
}

/// A file that reads back as these signatures.
pub fn print_signatures(signatures: &[Signature]) -> Vec<u8> {
    let signatures = Signatures { signatures: signatures.to_vec() };
    let mut text = serde_json::to_vec_pretty(&signatures).expect("signatures are plain text");
    text.push(b'\n');
    text
}

/// Refuses more than a component can have, before anything is computed with it.
///
/// # Errors
/// Names what there is too much of.
pub fn check_amount(signatures: &[Signature]) -> Result<(), String> {
    if signatures.len() > SIGNATURES_MAX {
        return Err(format!("{} signatures; at most {SIGNATURES_MAX}", signatures.len()));
    }
    for Signature { payload, signature } in signatures {
        if payload.len() > PAYLOAD_BYTES_MAX {
            return Err(format!("a signed text of {} bytes; at most {PAYLOAD_BYTES_MAX}", payload.len()));
        }
        if signature.len() != 64 {
            return Err(format!("a signature of {} bytes; those of Ed25519 have 64", signature.len()));
        }
    }
    Ok(())
}

/// Replaces the file of signatures beside a component, at once.
///
/// # Errors
/// There are too many, or the file cannot be written.
pub fn write_beside(component: &Path, signatures: &[Signature]) -> Result<PathBuf, SignatureError> {
    let path = beside(component);
    if signatures.len() > SIGNATURES_MAX {
        return Err(SignatureError::TooMany { path });
    }
    let text = print_signatures(signatures);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let write = || {
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(&text)?;
        // It is no secret: anybody who may read the component may read who signed it.
        let readable = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        file.as_file().set_permissions(readable)?;
        file.persist(&path).map_err(io::Error::from).map(drop)
    };
    write().map_err(|source| SignatureError::File { path: path.clone(), action: "written", source })?;
    Ok(path)
}

/// Adds one, in the place of an older one by the same key for the same component and slot.
pub fn add(signatures: &mut Vec<Signature>, new: Signature, key: &PublicKey) {
    signatures.retain(|old| old.claim(key).is_none_or(|old| Some(old) != new.claim(key)));
    signatures.push(new);
}

mod text_of_bytes {
    use base64::Engine as _;
    use base64::prelude::BASE64_STANDARD;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&BASE64_STANDARD.encode(bytes))
    }

    pub(super) fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<Vec<u8>, D::Error> {
        BASE64_STANDARD.decode(String::deserialize(from)?).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(slot: SlotKind) -> Claim {
        let (component, manifest) = (Digest::of(b"component"), Digest::of(b"manifest"));
        Claim { component, slot, manifest, reference: "lru".into() }
    }

    #[test]
    fn a_claim_is_read_by_the_right_key_alone() {
        let (mine, other) = (SecretKey::generate().unwrap(), SecretKey::generate().unwrap());
        let signed = claim(SlotKind::Evictor).sign(&mine);
        assert_eq!(signed.claim(&mine.public()), Some(claim(SlotKind::Evictor)));
        assert_eq!(signed.claim(&other.public()), None);
        for place in 0..signed.payload.len() {
            let mut bent = signed.clone();
            bent.payload[place] ^= 1;
            assert_eq!(bent.claim(&mine.public()), None, "byte {place}");
        }
        let short = Signature { signature: signed.signature[..63].to_vec(), ..signed };
        assert_eq!(short.claim(&mine.public()), None);
    }

    /// Signed by the right key, but not what a host could go by.
    #[test]
    fn other_texts_claim_nothing() {
        let key = SecretKey::generate().unwrap();
        let good = String::from_utf8(claim(SlotKind::Evictor).sign(&key).payload).unwrap();
        let twice = good.replace("\"optional\":{", "\"optional\":{\"kvasir.policy.slot\":\"scheduler\",");
        let texts = [
            String::new(),
            "{}".into(),
            good.replace("evictor", "bouncer"),
            good.replace("container image", "other"),
            good.replace("kvasir.policy.slot", "slot"),
            good.replace("sha256:", "md5:"),
            twice,
        ];
        for text in texts {
            let signed =
                Signature { payload: text.clone().into_bytes(), signature: key.sign(text.as_bytes()).into() };
            assert_eq!(signed.claim(&key.public()), None, "{text}");
        }
        // What cosign adds is no obstacle.
        let more = good.replace("\"optional\":{", "\"optional\":{\"creator\":\"somebody\",");
        let signed =
            Signature { payload: more.clone().into_bytes(), signature: key.sign(more.as_bytes()).into() };
        assert_eq!(signed.claim(&key.public()), Some(claim(SlotKind::Evictor)));
    }

    #[test]
    fn signatures_are_kept_beside_their_component() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lru.wasm");
        assert!(read_beside(&path).unwrap().is_empty());
        let (mine, other) = (SecretKey::generate().unwrap(), SecretKey::generate().unwrap());
        let mut all = Vec::new();
        for key in [&mine, &other, &mine] {
            add(&mut all, claim(SlotKind::Evictor).sign(key), &key.public());
        }
        assert_eq!(all.len(), 2, "the same claim of the same key counts once");
        write_beside(&path, &all).unwrap();
        assert_eq!(read_beside(&path).unwrap(), all);
        let file = beside(&path);
        let text = std::fs::read_to_string(&file).unwrap();
        for bad in
            [&text[..text.len() / 2], "garbage", "{\"signatures\":[{\"payload\":\"!\",\"signature\":\"\"}]}"]
        {
            std::fs::write(&file, bad).unwrap();
            assert!(matches!(read_beside(&path), Err(SignatureError::Damaged { .. })), "{bad}");
        }
        std::fs::write(&file, vec![b' '; 1 << 20]).unwrap();
        assert!(matches!(read_beside(&path), Err(SignatureError::Damaged { .. })));
        assert!(matches!(
            write_beside(&path, &vec![all[0].clone(); 17]),
            Err(SignatureError::TooMany { .. })
        ));
    }
}
