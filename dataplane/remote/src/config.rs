//! Where the remote tier is, and how many requests it gets.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use object_store::aws::AmazonS3Builder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStore, RetryConfig};

use super::leftovers;
use super::seal::TenantKey;

/// Settings of a remote tier.
#[derive(Clone, Debug, PartialEq)]
pub struct RemoteConfig {
    pub place: Place,
    /// Bytes of blocks this host stores there or learns of. The default `None` means no limit of ours.
    pub capacity_bytes: Option<u64>,
    /// The most blocks that this host keeps track of, about 40 B each. Default 16,777,216.
    pub blocks_max: u64,
    /// Largest block. Default 256 MiB. Each request under way keeps a copy of its block.
    pub block_bytes_max: u64,
    /// The most requests under way. Default 32.
    pub requests_max: usize,
    /// The most blocks waiting for their turn or under way; more are refused as busy. Default 16,384.
    pub queue_max: usize,
    /// The most times a request is made before it fails. Default 5.
    pub attempts_max: u32,
    /// Pause after the first failed attempt, doubled after each further one. Default 100 ms.
    pub backoff: Duration,
    /// Longest pause. Default 5 s.
    pub backoff_max: Duration,
    /// How long one attempt may take, from first to last byte. Default 30 s.
    pub attempt_timeout: Duration,
    /// Tenants whose blocks are sealed before they leave this host. Default none.
    pub keys: Vec<TenantKey>,
    /// Other hosts store there too: a lookup that finds a block nowhere else asks for it there, one small request per key at
    /// most every 10 s. Default true.
    pub shared: bool,
    /// With keys: also store blocks of tenants without one in clear, and read such. Anybody who can write there can then put a
    /// block of their own in the place of a sealed one. Default false.
    pub allow_plain: bool,
}

/// Where objects are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A directory, local or mounted; made if it is not there.
    Directory(PathBuf),
    S3(S3),
}

/// A bucket of an S3-compatible store.
#[derive(Clone, PartialEq, Eq)]
pub struct S3 {
    pub bucket: String,
    /// Objects are below this; may be empty.
    pub prefix: String,
    /// The address of the server, such as `http://10.0.0.7:9000`; `None` means AWS.
    pub endpoint: Option<String>,
    pub region: String,
    /// Access key id and secret; `None` takes them from the environment (`AWS_ACCESS_KEY_ID` and so on) or the machine.
    pub credentials: Option<(String, String)>,
}

impl std::fmt::Debug for S3 {
    /// Without the secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { bucket, prefix, endpoint, region, credentials } = self;
        let id = credentials.as_ref().map(|(id, _)| id);
        f.debug_struct("S3")
            .field("bucket", bucket)
            .field("prefix", prefix)
            .field("endpoint", endpoint)
            .field("region", region)
            .field("access_key_id", &id)
            .finish_non_exhaustive()
    }
}

/// Why the remote tier could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("{name} is 0; it must be at least 1")]
    Zero { name: &'static str },
    #[error("cannot use directory {path} for the remote tier: {source}")]
    Directory { path: PathBuf, source: std::io::Error },
    #[error("settings of the remote tier do not fit together: {0}")]
    Settings(object_store::Error),
    #[error("cannot list the remote tier at {place} after {attempts} attempts: {reason}")]
    List { place: String, attempts: u32, reason: String },
    #[error("cannot start threads for the remote tier: {0}")]
    Threads(std::io::Error),
}

impl RemoteConfig {
    pub fn new(place: Place) -> Self {
        Self {
            place,
            capacity_bytes: None,
            blocks_max: 1 << 24,
            block_bytes_max: 256 << 20,
            requests_max: 32,
            queue_max: 16_384,
            attempts_max: 5,
            backoff: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
            attempt_timeout: Duration::from_secs(30),
            keys: Vec::new(),
            shared: true,
            allow_plain: false,
        }
    }

    /// # Errors
    /// The first setting that makes no sense.
    pub fn validate(&self) -> Result<(), OpenError> {
        let zero = [
            ("remote.capacity_bytes", self.capacity_bytes == Some(0)),
            ("remote.blocks_max", self.blocks_max == 0),
            ("block_bytes_max of the remote tier", self.block_bytes_max == 0),
            ("remote.requests_max", self.requests_max == 0),
            ("queue_max of the remote tier", self.queue_max == 0),
            ("remote.attempts_max", self.attempts_max == 0),
            ("remote.attempt_timeout", self.attempt_timeout.is_zero()),
        ];
        zero.into_iter().find(|(_, bad)| *bad).map_or(Ok(()), |(name, _)| Err(OpenError::Zero { name }))
    }
}

impl Place {
    /// The name for messages.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Directory(path) => path.display().to_string(),
            Self::S3(S3 { bucket, prefix, endpoint, .. }) => {
                format!("s3://{bucket}/{prefix} of {}", endpoint.as_deref().unwrap_or("AWS"))
            }
        }
    }

    /// The store and the path below which objects go.
    pub(super) fn connect(&self, config: &RemoteConfig) -> Result<(Arc<dyn ObjectStore>, Path), OpenError> {
        match self {
            Self::Directory(path) => {
                let fail = |source| OpenError::Directory { path: path.clone(), source };
                std::fs::create_dir_all(path).map_err(fail)?;
                leftovers::clear(path, SystemTime::now() - leftovers::ABANDONED_AFTER).map_err(fail)?;
                let files = LocalFileSystem::new_with_prefix(path).map_err(OpenError::Settings)?;
                Ok((Arc::new(files), Path::default()))
            }
            Self::S3(s3) => s3.connect(config),
        }
    }
}

impl S3 {
    fn connect(&self, config: &RemoteConfig) -> Result<(Arc<dyn ObjectStore>, Path), OpenError> {
        // Someone else in this process may have chosen a provider before; that one is fine as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // Retries are ours, so that they are counted and bounded in one place.
        let no_retries = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let client = ClientOptions::new()
            .with_allow_http(true)
            .with_timeout(config.attempt_timeout)
            .with_connect_timeout(config.attempt_timeout)
            .with_pool_max_idle_per_host(config.requests_max);
        let mut builder = match &self.credentials {
            Some((id, secret)) => {
                AmazonS3Builder::new().with_access_key_id(id).with_secret_access_key(secret)
            }
            None => AmazonS3Builder::from_env(),
        }
        .with_bucket_name(&self.bucket)
        .with_region(&self.region)
        .with_retry(no_retries)
        // Blocks carry a checksum of their own; hashing them once more for the signature costs a pass.
        .with_unsigned_payload(true)
        .with_client_options(client);
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        let prefix =
            Path::parse(self.prefix.trim_matches('/')).map_err(|error| OpenError::Settings(error.into()))?;
        Ok((Arc::new(builder.build().map_err(OpenError::Settings)?), prefix))
    }
}
