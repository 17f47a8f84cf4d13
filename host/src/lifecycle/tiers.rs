//! The tiers below the pool: opened from the configuration, and who lets blocks into them.

use crate::calendar::unix_ms;
use crate::config::{self, Config, RemoteUrl};
use crate::explain::Explain;
use crate::policy::record::{Call, FORMAT, Record, bits};
use crate::policy::{AdmitterWorker, SlotKind};
use kvasir_dataplane::DramStore;
use kvasir_dataplane::tier::hbm::{self, HbmConfig, HbmStore};
use kvasir_dataplane::tier::nvme::{self, NvmeConfig, NvmeStore, OnFull};
use kvasir_dataplane::tier::remote::{self, Place, RemoteConfig, RemoteStore, S3, TenantKey};
use kvasir_dataplane::tier::store::{BlockStore, Tier};
use kvasir_dataplane::tier::tiering::{Admission, Admit, Candidate};
use kvasir_eviction::number_of;
use kvasir_policy::admitter::{Block, Store};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Why a tier does not open.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Config(#[from] config::Error),
    #[error("hbm.capacity_bytes asks for memory of a GPU: {0}")]
    Hbm(#[from] hbm::OpenError),
    #[error(transparent)]
    Nvme(#[from] nvme::OpenError),
    #[error(transparent)]
    Remote(#[from] remote::OpenError),
    #[error("key file {} of remote.keys cannot be used: {reason}; write 64 hexadecimal digits into it", path.display())]
    Key { path: PathBuf, reason: String },
}

/// Opens the tiers that are configured, nearest first; the pools of other hosts are nearer than a remote store.
///
/// # Errors
/// The first that does not open, and why.
pub fn open(
    config: &Config,
    dram: &DramStore,
    peers: Option<Arc<dyn BlockStore>>,
) -> Result<Vec<Arc<dyn BlockStore>>, OpenError> {
    let mut below: Vec<Arc<dyn BlockStore>> = Vec::new();
    if config.hbm.capacity_bytes > 0 {
        below.push(Arc::new(open_hbm(&config.hbm, dram)?));
    }
    if !config.nvme.dir.as_os_str().is_empty() {
        below.push(Arc::new(open_nvme(&config.nvme)?));
    }
    below.extend(peers);
    if let Some(place) = config.remote.place()? {
        below.push(Arc::new(open_remote(&config.remote, place)?));
    }
    Ok(below)
}

fn open_remote(settings: &config::Remote, place: RemoteUrl) -> Result<RemoteStore, OpenError> {
    let place = match place {
        RemoteUrl::Folder(folder) => Place::Directory(folder),
        RemoteUrl::S3 { bucket, prefix } => Place::S3(S3 {
            bucket,
            prefix,
            endpoint: Some(settings.endpoint.clone()).filter(|endpoint| !endpoint.is_empty()),
            region: settings.region.clone(),
            credentials: None,
        }),
    };
    let key = |key: &config::TenantKey| Ok(TenantKey { tenant: key.tenant, key: read_key(&key.file)? });
    let store = RemoteStore::open(&RemoteConfig {
        capacity_bytes: Some(settings.capacity_bytes.0).filter(|bytes| *bytes > 0),
        blocks_max: settings.blocks_max,
        requests_max: settings.requests_max as usize,
        attempts_max: settings.attempts_max,
        attempt_timeout: settings.attempt_timeout.0,
        shared: settings.shared,
        allow_plain: settings.allow_plain,
        keys: settings.keys.iter().map(key).collect::<Result<_, OpenError>>()?,
        ..RemoteConfig::new(place)
    })?;
    let report = store.report();
    let (blocks, block_bytes, foreign) = (report.blocks, report.block_bytes, report.foreign);
    tracing::info!(url = settings.url, blocks, block_bytes, foreign, "remote tier open");
    Ok(store)
}

/// 32 bytes as hexadecimal digits.
fn read_key(path: &Path) -> Result<[u8; 32], OpenError> {
    let fail = |reason: String| OpenError::Key { path: path.into(), reason };
    let text = std::fs::read_to_string(path).map_err(|error| fail(error.to_string()))?;
    let digits = text.trim();
    if digits.len() != 64 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(fail(format!("it holds {} characters that are not all digits of a key", digits.len())));
    }
    let mut key = [0; 32];
    for (byte, digits) in key.iter_mut().zip(digits.as_bytes().chunks_exact(2)) {
        let digit = |d: u8| (d as char).to_digit(16).map_or(0, |value| value as u8);
        *byte = digit(digits[0]) << 4 | digit(digits[1]);
    }
    Ok(key)
}

fn open_hbm(settings: &HbmConfig, dram: &DramStore) -> Result<HbmStore, hbm::OpenError> {
    let store = HbmStore::below(dram.pool(), settings)?;
    let (device, bytes) = (settings.device, store.pool().bytes());
    tracing::info!(device, bytes, "hbm tier open");
    Ok(store)
}

fn open_nvme(settings: &NvmeConfig) -> Result<NvmeStore, OpenError> {
    let store = NvmeStore::open(NvmeConfig { on_full: OnFull::Evict, ..settings.clone() })?;
    let report = store.report();
    report.warnings.iter().for_each(|warning| tracing::warn!(dir = %settings.dir.display(), "{warning}"));
    let (blocks, block_bytes, corrupt) = (report.blocks, report.block_bytes, report.corrupt);
    tracing::info!(dir = %settings.dir.display(), blocks, block_bytes, corrupt, took = ?report.took, "nvme tier open");
    Ok(store)
}

/// Asks the admitter policy, in batches, on the eviction thread.
pub struct PolicyAdmit {
    worker: AdmitterWorker,
    explain: Arc<Explain>,
    calls: u64,
}

impl PolicyAdmit {
    /// A sample of the answers goes to `explain`.
    pub fn new(worker: AdmitterWorker, explain: Arc<Explain>) -> Self {
        Self { worker, explain, calls: 0 }
    }

    fn record(&self, tier: Tier, blocks: &[Block], answers: &[Store], ns: u64) {
        let words = blocks.iter().flat_map(Block::encode).collect();
        let record = Record {
            record: FORMAT,
            slot: SlotKind::Admitter.to_string(),
            id: self.calls,
            at_ms: unix_ms(),
            policy: self.worker.policy_of(),
            pushed: vec![("update-load".to_owned(), bits(&self.worker.load().encode()))],
            asked: Call::admit_blocks(number_of(tier), words),
            answer: answers.iter().map(|answer| *answer as u64).collect(),
            scores: Vec::new(),
            fallback: self.worker.fallback().map(ToString::to_string),
            ns,
        };
        self.explain.write(move || Some(record));
    }
}

impl Admit for PolicyAdmit {
    fn admit(&mut self, tier: Tier, candidates: &[Candidate]) -> Vec<Admission> {
        let block = |c: &Candidate| Block {
            class: c.class,
            uses: c.uses.min(u16::MAX.into()) as u16,
            depth: c.depth,
            size_bytes: c.size,
            last_offer_ms: c.refused_ms_ago.map(|ms| ms.min(u64::from(u32::MAX) - 1) as u32),
            tenant: c.tenant.into(),
        };
        let blocks: Vec<Block> = candidates.iter().map(block).collect();
        self.calls += 1;
        let sampled = self.explain.takes(self.calls);
        let start = Instant::now();
        let answers = self.worker.admit_blocks(number_of(tier), &blocks);
        if sampled {
            self.record(tier, &blocks, &answers, start.elapsed().as_nanos() as u64);
        }
        let admission = |answer| match answer {
            Store::Skip => Admission::Skip,
            Store::Store => Admission::Store,
            Store::Colder => Admission::Colder,
        };
        answers.into_iter().map(admission).collect()
    }
}
