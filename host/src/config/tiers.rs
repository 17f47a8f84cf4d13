//! Settings of the tier that many hosts may share.

use super::{Error, Size, Span, invalid};
use kvasir_dataplane::config::{at_least_one, positive};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A tier that many hosts may share: a folder, or a bucket of an S3-compatible store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Remote {
    /// `s3://bucket/prefix`, or the path of a folder, local or mounted. If empty, there is no such tier. Credentials
    /// come from the environment (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`) or the machine.
    pub url: String,
    /// Address of the S3-compatible store, such as `http://10.0.0.7:9000`. Empty means AWS.
    pub endpoint: String,
    pub region: String,
    /// The most bytes this host stores there or learns of. `0B`: no limit.
    pub capacity_bytes: Size,
    /// The most blocks of which this host keeps track. 40 B each.
    pub blocks_max: u64,
    /// The most requests at once; each keeps a copy of its block.
    pub requests_max: u32,
    /// How often a request is made before it fails.
    pub attempts_max: u32,
    /// How long one attempt may take.
    pub attempt_timeout: Span,
    /// Tenants whose blocks are sealed before they leave this host, one `[[remote.keys]]` each.
    pub keys: Vec<TenantKey>,
    /// Other hosts store there too: a lookup that finds a block nowhere else asks for it there, one small request per key at
    /// most every 10 s.
    pub shared: bool,
    /// With keys: also store blocks of tenants without one in clear, and read blocks in clear. Anybody who can write there can
    /// then put a block of their own in the place of a sealed one.
    pub allow_plain: bool,
}

/// The key that seals a tenant's blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantKey {
    pub tenant: u16,
    /// File of 64 hexadecimal digits. If it is lost, so are the blocks. A tenant may have several: all of them open
    /// blocks, and the last one seals.
    pub file: PathBuf,
}

/// What [`Remote::url`] names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteUrl {
    Folder(PathBuf),
    S3 { bucket: String, prefix: String },
}

impl Default for Remote {
    fn default() -> Self {
        Self {
            url: String::new(),
            endpoint: String::new(),
            region: "us-east-1".to_owned(),
            capacity_bytes: Size(0),
            blocks_max: 1 << 24,
            requests_max: 32,
            attempts_max: 5,
            attempt_timeout: Span::secs(30),
            keys: Vec::new(),
            shared: true,
            allow_plain: false,
        }
    }
}

impl Remote {
    /// Returns `None` if there is no such tier.
    ///
    /// # Errors
    /// It is neither a folder nor a bucket.
    pub fn place(&self) -> Result<Option<RemoteUrl>, Error> {
        let wrong = || invalid("remote.url", &self.url, "must be s3://bucket/prefix or the path of a folder");
        match self.url.split_once("://") {
            None if self.url.is_empty() => Ok(None),
            None => Ok(Some(RemoteUrl::Folder(self.url.clone().into()))),
            Some(("s3", rest)) => match rest.split_once('/').unwrap_or((rest, "")) {
                ("", _) => Err(wrong()),
                (bucket, prefix) => Ok(Some(RemoteUrl::S3 { bucket: bucket.into(), prefix: prefix.into() })),
            },
            Some(_) => Err(wrong()),
        }
    }

    pub(super) fn validate(&self) -> Result<(), Error> {
        let place = self.place()?;
        if !self.endpoint.is_empty() && !matches!(place, Some(RemoteUrl::S3 { .. })) {
            return Err(invalid("remote.endpoint", &self.endpoint, "needs remote.url = s3://bucket/prefix"));
        }
        at_least_one(&[
            ("remote.blocks_max", self.blocks_max),
            ("remote.requests_max", self.requests_max.into()),
            ("remote.attempts_max", self.attempts_max.into()),
        ])?;
        Ok(positive(&[("remote.attempt_timeout", self.attempt_timeout.0)])?)
    }
}
