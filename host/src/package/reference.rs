//! Where a policy is in a registry: `REGISTRY/REPOSITORY:TAG` or `REGISTRY/REPOSITORY@sha256:DIGEST`.

use super::Error;
use crate::policy::Digest;
use crate::text::printable;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// Stands before a reference, where a file could be named as well.
pub const SCHEME: &str = "oci://";
const BYTES_MAX: usize = 512;

/// A place in a registry, named in full: no registry and no tag is taken for granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// A name or an address, and perhaps a port.
    pub registry: String,
    pub repository: String,
    pub version: Version,
}

/// Which manifest of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Version {
    /// A tag, which may name another manifest tomorrow.
    Tag(String),
    Digest(Digest),
}

impl Reference {
    /// Whether the registry is on this machine, so that nobody can read what is not encrypted.
    pub fn is_loopback(&self) -> bool {
        let host = self.registry.rsplit_once(':').map_or(self.registry.as_str(), |(host, _)| host);
        let host = host.trim_matches(['[', ']']);
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }

    /// The same repository, by another tag or digest.
    pub fn at(&self, version: Version) -> Self {
        Self { version, ..self.clone() }
    }

    /// Registry and repository, without tag or digest.
    pub fn place(&self) -> String {
        format!("{}/{}", self.registry, self.repository)
    }
}

impl Version {
    /// The version of a repository, as people write it.
    pub fn of(&self, repository: &str) -> String {
        let mark = if matches!(self, Self::Tag(_)) { ':' } else { '@' };
        format!("{repository}{mark}{self}")
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag(tag) => f.write_str(tag),
            Self::Digest(digest) => write!(f, "sha256:{digest}"),
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.version.of(&self.place()))
    }
}

impl FromStr for Reference {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = |reason| Error::Reference { text: printable(text, BYTES_MAX), reason };
        if text.len() > BYTES_MAX {
            return Err(wrong("it is too long"));
        }
        let rest = text.strip_prefix(SCHEME).unwrap_or(text);
        let (registry, rest) = rest.split_once('/').ok_or_else(|| wrong("it names no registry"))?;
        if !is_registry(registry) {
            return Err(wrong("its first part is no registry, which has a dot or a port or is `localhost`"));
        }
        let (repository, version) = match rest.split_once('@') {
            Some((name, digest)) => {
                let digest = digest.strip_prefix("sha256:").and_then(|digest| digest.parse().ok());
                let digest =
                    digest.ok_or_else(|| wrong("its digest is not sha256: and 64 digits of 0-9 a-f"))?;
                // A tag beside a digest is a comment.
                (name.split_once(':').map_or(name, |(name, _)| name), Version::Digest(digest))
            }
            None => {
                let (name, tag) =
                    rest.rsplit_once(':').ok_or_else(|| wrong("it has neither tag nor digest"))?;
                if !is_tag(tag) {
                    return Err(wrong("its tag is not 1 to 128 of A-Z a-z 0-9 _ . -"));
                }
                (name, Version::Tag(tag.to_owned()))
            }
        };
        if !repository.split('/').all(is_part) {
            return Err(wrong("its repository is not made of a-z 0-9 . _ - and /"));
        }
        Ok(Self { registry: registry.to_owned(), repository: repository.to_owned(), version })
    }
}

fn is_registry(text: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b".-:[]".contains(&b);
    let named = text.contains(['.', ':']) || text == "localhost";
    named && text.bytes().all(allowed) && text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '[')
}

fn is_part(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let ends = text.bytes().next().is_some_and(inner) && text.bytes().last().is_some_and(inner);
    ends && text.bytes().all(|b| inner(b) || b"._-".contains(&b)) && !text.contains("..")
}

pub(super) fn is_tag(text: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"_.-".contains(&b);
    (1..=128).contains(&text.len()) && text.bytes().all(allowed) && !text.starts_with(['.', '-'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_read_and_print_alike() {
        let digest = "0f".repeat(32);
        let by_digest = format!("ghcr.io/acme/lru@sha256:{digest}");
        for text in [
            "ghcr.io/acme/policies/lru:1.0",
            "localhost:5000/a:b",
            "127.0.0.1:5000/a/b:x_1.2-3",
            "[::1]:5000/a:1",
            &by_digest,
        ] {
            let read: Reference = text.parse().unwrap();
            assert_eq!(read.to_string(), text);
            assert_eq!(format!("{SCHEME}{text}").parse::<Reference>().unwrap(), read);
        }
        let both: Reference = format!("ghcr.io/acme/lru:1.0@sha256:{digest}").parse().unwrap();
        assert_eq!(both.to_string(), by_digest);
        let loopback = |text: &str| text.parse::<Reference>().unwrap().is_loopback();
        assert!(loopback("localhost/a:1") && loopback("127.8.0.1:5000/a:1") && loopback("[::1]:5000/a:1"));
        assert!(!loopback("localhost.example.com/a:1") && !loopback("10.0.0.1:5000/a:1"));
    }

    #[test]
    fn what_is_no_reference_says_why() {
        let wrong = [
            ("lru", "no registry"),
            ("acme/lru:1.0", "first part"),
            ("a.b/lru", "neither tag nor digest"),
            ("localhost:5000/lru", "neither tag nor digest"),
            ("a.b/LRU:1", "repository"),
            ("a.b/../../etc:1", "repository"),
            ("a.b//lru:1", "repository"),
            ("a.b/:1", "repository"),
            ("a.b/lru:", "tag"),
            ("a.b/lru:a b", "tag"),
            ("a.b/lru:.x", "tag"),
            ("a.b/lru@sha256:0", "digest"),
            ("a.b/lru@md5:0123", "digest"),
            ("user@a.b/lru:1", "first part"),
            (&format!("a.b/{}:1", "x".repeat(600)), "too long"),
        ];
        for (text, part) in wrong {
            let reason = text.parse::<Reference>().unwrap_err().to_string();
            assert!(reason.contains(part), "{text}: {reason}");
        }
    }
}
