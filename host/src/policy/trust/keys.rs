//! Ed25519 keys of those who sign policies, in PEM: PKCS#8 and SPKI, as OpenSSL and cosign write them.

use super::super::engine::Digest;
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{
    DecodePrivateKey, DecodePublicKey, EncodePrivateKey, EncodePublicKey, KeypairBytes,
};
use ed25519_dalek::{Signer, SigningKey, VerifyingKey};
use rustix::rand::{GetRandomFlags, getrandom};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// More than a file with one key has.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Why a key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("key {} cannot be read: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("others may read the key {} (mode {mode:03o}); run chmod 600 on it", path.display())]
    Mode { path: PathBuf, mode: u32 },
    #[error("{} has {bytes} bytes, which is no file with a key", path.display())]
    TooLarge { path: PathBuf, bytes: u64 },
    #[error("{} cannot be used: {reason}", path.display())]
    In { path: PathBuf, reason: Box<KeyError> },
    #[error("it is a private key; give the public one, which `kvasir policy trust keygen` writes beside it")]
    Private,
    #[error("it is a public key; give the private one of the pair")]
    Public,
    #[error(
        "it is encrypted; write it in plain PKCS#8 (`openssl pkey -in KEY -out PLAIN`), readable by you alone"
    )]
    Encrypted,
    #[error("it is no Ed25519 {kind} key in PEM; `kvasir policy trust keygen` makes one")]
    NoKey { kind: &'static str },
    #[error("no randomness from the system: {0}")]
    Random(io::Error),
}

/// What a signature is checked with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicKey(VerifyingKey);

impl PublicKey {
    /// # Errors
    /// The text is no Ed25519 key in PEM (SPKI).
    pub fn from_pem(text: &str) -> Result<Self, KeyError> {
        if text.contains("PRIVATE KEY-----") {
            return Err(KeyError::Private);
        }
        let key = VerifyingKey::from_public_key_pem(text.trim());
        key.map(Self).map_err(|_| KeyError::NoKey { kind: "public" })
    }

    /// # Errors
    /// The file cannot be read, or has no such key.
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        let text = read(path)?;
        Self::from_pem(&text).map_err(|error| error.of(path))
    }

    pub fn to_pem(&self) -> String {
        self.0.to_public_key_pem(LineEnding::LF).expect("a key of 32 bytes has a PEM form")
    }

    /// SHA-256 of the key in DER (SPKI), by which lists name it.
    pub fn id(&self) -> Digest {
        let der = self.0.to_public_key_der().expect("a key of 32 bytes has a DER form");
        Digest::of(der.as_bytes())
    }

    /// Whether the owner of this key signed `message`. Keys and signatures with more than one meaning are refused.
    pub(super) fn verifies(&self, message: &[u8], signature: &[u8; 64]) -> bool {
        self.0.verify_strict(message, &ed25519_dalek::Signature::from_bytes(signature)).is_ok()
    }
}

/// What policies are signed with. Wiped from memory when it goes.
pub struct SecretKey(SigningKey);

impl SecretKey {
    /// # Errors
    /// The system has no randomness.
    pub fn generate() -> Result<Self, KeyError> {
        let mut secret = [0; 32];
        getrandom(&mut secret, GetRandomFlags::empty()).map_err(|error| KeyError::Random(error.into()))?;
        Ok(Self(SigningKey::from_bytes(&secret)))
    }

    /// # Errors
    /// The text is no Ed25519 key in PEM (PKCS#8, not encrypted).
    pub fn from_pem(text: &str) -> Result<Self, KeyError> {
        if text.contains("ENCRYPTED") {
            return Err(KeyError::Encrypted);
        }
        if text.contains("PUBLIC KEY-----") {
            return Err(KeyError::Public);
        }
        let key = SigningKey::from_pkcs8_pem(text.trim());
        key.map(Self).map_err(|_| KeyError::NoKey { kind: "private" })
    }

    /// # Errors
    /// The file cannot be read, may be read by others, or has no such key.
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        let metadata = std::fs::metadata(path).map_err(|source| failed(path, source))?;
        let mode = metadata.permissions().mode() & 0o777;
        let key = read(path).map(|text| Self::from_pem(&text));
        // That everybody may read a public key is as it should be.
        if mode & 0o077 != 0 && !matches!(key, Ok(Err(KeyError::Public))) {
            return Err(KeyError::Mode { path: path.into(), mode });
        }
        key?.map_err(|error| error.of(path))
    }

    /// In the older form of PKCS#8, without the public key, which every OpenSSL reads.
    pub fn to_pem(&self) -> String {
        let pair = KeypairBytes { secret_key: self.0.to_bytes(), public_key: None };
        let pem = pair.to_pkcs8_pem(LineEnding::LF).expect("a key of 32 bytes has a PEM form");
        pem.to_string()
    }

    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.verifying_key())
    }

    /// The signature of any text.
    pub fn sign(&self, message: &[u8]) -> [u8; 64] {
        self.0.sign(message).to_bytes()
    }
}

impl KeyError {
    fn of(self, path: &Path) -> Self {
        Self::In { path: path.into(), reason: Box::new(self) }
    }
}

fn failed(path: &Path, source: io::Error) -> KeyError {
    KeyError::File { path: path.into(), source }
}

fn read(path: &Path) -> Result<String, KeyError> {
    let bytes = std::fs::metadata(path).map_err(|source| failed(path, source))?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(KeyError::TooLarge { path: path.into(), bytes });
    }
    std::fs::read_to_string(path).map_err(|source| failed(path, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_survives_its_pem() {
        let secret = SecretKey::generate().unwrap();
        let public = PublicKey::from_pem(&secret.public().to_pem()).unwrap();
        let again = SecretKey::from_pem(&secret.to_pem()).unwrap();
        let signature = again.sign(b"text");
        assert!(public.verifies(b"text", &signature) && !public.verifies(b"other", &signature));
        assert_eq!(public.id(), again.public().id());
        assert_ne!(public.id(), SecretKey::generate().unwrap().public().id());
    }

    /// RFC 8410, appendix A.
    #[test]
    fn keys_of_other_tools_read() {
        let private = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n-----END PRIVATE KEY-----\n";
        let public = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n-----END PUBLIC KEY-----";
        let secret = SecretKey::from_pem(private).unwrap();
        assert_eq!(secret.public(), PublicKey::from_pem(public).unwrap());
        assert_eq!(secret.to_pem(), private);
        assert_eq!(secret.public().to_pem().trim(), public);
    }

    #[test]
    fn what_is_no_key_says_what_it_is() {
        let public = |text: &str| PublicKey::from_pem(text).unwrap_err().to_string();
        let secret = |text: &str| SecretKey::from_pem(text).err().unwrap().to_string();
        let pair = SecretKey::generate().unwrap();
        assert!(public(&pair.to_pem()).contains("is a private key"));
        assert!(secret(&pair.public().to_pem()).contains("is a public key"));
        let locked = "-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED SIGSTORE PRIVATE KEY-----";
        assert!(secret(locked).contains("openssl pkey"));
        let pem = pair.public().to_pem();
        for garbage in ["", "garbage", &pem[..40], &pem.replace("MCow", "MCox"), &pem.replace('-', "")] {
            assert!(public(garbage).contains("keygen"), "{garbage}");
        }
    }

    #[test]
    fn a_private_key_that_others_may_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.key");
        std::fs::write(&path, SecretKey::generate().unwrap().to_pem()).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(SecretKey::read(&path), Err(KeyError::Mode { mode: 0o644, .. })));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(SecretKey::read(&path).is_ok());
        std::fs::write(&path, vec![b'x'; 100 << 10]).unwrap();
        assert!(matches!(SecretKey::read(&path), Err(KeyError::TooLarge { .. })));
        assert!(matches!(PublicKey::read(&dir.path().join("none")), Err(KeyError::File { .. })));
    }
}
