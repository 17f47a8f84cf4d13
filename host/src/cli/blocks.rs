//! `kvasir put`, `get`, `exists`, `rm`, `pin`, `unpin`, `evict`, `stat`, `ls`: blocks of a running host.

use super::{HostFlags, there};
use crate::config::Span;
use anyhow::{Context, bail, ensure};
use clap::Args;
use kvasir_client::data::{Client, ClientError, Put};
use kvasir_dataplane::tier::store::Tier;
use kvasir_dataplane::{BATCH_MAX, BlockKey, BlockMeta, Pin};
use kvasir_proto as proto;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Largest block `put` reads; the host's own limit may be lower.
const BLOCK_BYTES_MAX: u64 = u32::MAX as u64;

/// Store a block.
#[derive(Args, Debug)]
pub(super) struct PutArgs {
    #[command(flatten)]
    host: HostFlags,
    /// Name of the block, or 0x and 32 hexadecimal digits.
    #[arg(value_parser = key)]
    key: BlockKey,
    /// File with its bytes; if absent or `-`, standard input.
    file: Option<PathBuf>,
    /// How many hosts must hold it in total; the others get their copies in the background.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64))]
    copies: u8,
}

/// Write the bytes of a block to standard output or a file; exit code 1 if it is not there.
#[derive(Args, Debug)]
pub(super) struct GetArgs {
    #[command(flatten)]
    host: HostFlags,
    /// Name of the block, or 0x and 32 hexadecimal digits.
    #[arg(value_parser = key)]
    key: BlockKey,
    /// File to write; if absent or `-`, standard output.
    file: Option<PathBuf>,
}

/// Tell whether blocks are stored; exit code 1 unless all are.
#[derive(Args, Debug)]
pub(super) struct ExistsArgs {
    #[command(flatten)]
    keys: KeysArgs,
}

/// Remove blocks; exit code 1 unless all were there.
#[derive(Args, Debug)]
pub(super) struct RmArgs {
    #[command(flatten)]
    keys: KeysArgs,
}

/// Keep blocks from being evicted; exit code 1 unless all were there.
#[derive(Args, Debug)]
pub(super) struct PinArgs {
    #[command(flatten)]
    keys: KeysArgs,
    #[command(flatten)]
    how: PinHow,
}

#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
struct PinHow {
    /// For this long, such as `90s`, whatever happens; the host has an upper limit.
    #[arg(long = "for", value_name = "SPAN")]
    span: Option<Span>,
    /// Until this weight, which halves every half-life of the host, has fallen to 1. `evict` overrides it.
    #[arg(long, value_name = "WEIGHT", value_parser = clap::value_parser!(u32).range(1..))]
    soft: Option<u32>,
}

/// End pins; exit code 1 unless all were pinned.
#[derive(Args, Debug)]
pub(super) struct UnpinArgs {
    #[command(flatten)]
    keys: KeysArgs,
}

/// Evict blocks from memory now, in spite of soft pins; exit code 1 unless all were there.
#[derive(Args, Debug)]
pub(super) struct EvictArgs {
    #[command(flatten)]
    keys: KeysArgs,
}

#[derive(Args, Debug)]
struct KeysArgs {
    #[command(flatten)]
    host: HostFlags,
    /// Names of blocks, or 0x and 32 hexadecimal digits each.
    #[arg(required = true, value_name = "KEY", num_args = 1..=BATCH_MAX)]
    names: Vec<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Show what is known about blocks, or about the whole store; exit code 1 unless all blocks are there.
#[derive(Args, Debug)]
pub(super) struct StatArgs {
    #[command(flatten)]
    host: HostFlags,
    /// Names of blocks, or 0x and 32 hexadecimal digits each; without any, the whole store.
    #[arg(value_name = "KEY", num_args = 0..=BATCH_MAX)]
    names: Vec<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// List resident blocks.
#[derive(Args, Debug)]
pub(super) struct LsArgs {
    #[command(flatten)]
    host: HostFlags,
    /// The most blocks to list.
    #[arg(long, default_value_t = 1000)]
    max: usize,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl PutArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let bytes = read(self.file.as_deref())?;
        if bytes.is_empty() {
            bail!("nothing to store: a block holds at least one byte");
        }
        let meta = BlockMeta::single(self.key, bytes.len() as u32);
        let (client, place) = self.host.data()?.primary(u64::from(meta.size), self.copies)?;
        match client.put(&meta, &bytes)? {
            Put::Stored if place.endpoint.is_some() => {
                println!("stored {} B as 0x{} on {}, which has more room", bytes.len(), self.key, place.node);
            }
            Put::Stored => println!("stored {} B as 0x{}", bytes.len(), self.key),
            Put::AlreadyStored => println!("0x{} is stored already; blocks are immutable", self.key),
            Put::InProgress => bail!("0x{} is being stored by another writer; try again", self.key),
        }
        if self.copies > 1 {
            client.replicate(&[self.key], self.copies)?.remove(0)?;
            println!("{} hosts will hold it", self.copies);
        }
        Ok(())
    }
}

impl GetArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let client = self.host.data()?;
        let Some(block) = client.get(&[self.key], 0)?.pop().flatten() else {
            eprintln!("kvasir: block 0x{} is not there", self.key);
            return Ok(there(false));
        };
        // Copied before it is written: a slow reader of our output must not outlast the lease.
        let mut bytes = vec![0; block.size() as usize];
        block.copy_to(&mut bytes)?;
        match self.file.as_deref().filter(|path| *path != Path::new("-")) {
            Some(path) => {
                std::fs::write(path, &bytes).with_context(|| format!("cannot write {}", path.display()))?
            }
            None => crate::print::bytes(&bytes),
        }
        Ok(there(true))
    }
}

impl ExistsArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        self.keys.each(|client, keys| Ok(all_known(client.exists(keys)?)), ["resident", "missing"])
    }
}

impl RmArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        self.keys.each(|client, keys| Ok(all_known(client.remove(keys)?)), ["removed", "missing"])
    }
}

impl PinArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let pin = match self.how {
            PinHow { soft: Some(weight), .. } => Pin::Soft { weight },
            PinHow { span, .. } => {
                let ms = span.map_or(0, |span| span.0.as_millis());
                Pin::Hard { duration_ms: u32::try_from(ms).context("--for is over 49 days")? }
            }
        };
        self.keys.each(|client, keys| client.pin(keys, pin), ["pinned", "missing"])
    }
}

impl UnpinArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        self.keys.each(|client, keys| Ok(all_known(client.unpin(keys)?)), ["unpinned", "not pinned"])
    }
}

impl EvictArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        self.keys.each(|client, keys| client.evict(keys), ["evicted", "missing"])
    }
}

impl KeysArgs {
    /// One call for all keys, and one word for each.
    ///
    /// # Errors
    /// The first key that failed, after the results of all were printed.
    fn each(
        self,
        call: impl FnOnce(&Client, &[BlockKey]) -> Result<Vec<Known>, ClientError>,
        [yes, no]: [&str; 2],
    ) -> anyhow::Result<ExitCode> {
        let keys = keys(&self.names)?;
        let outcomes = call(&self.host.data()?, &keys)?;
        let word = |outcome: &Known| match outcome {
            Ok(true) => yes.to_owned(),
            Ok(false) => no.to_owned(),
            Err(error) => error.to_string(),
        };
        let told = self.names.iter().zip(outcomes.iter().map(word));
        if self.json {
            println!("{}", serde_json::to_string(&told.collect::<std::collections::BTreeMap<_, _>>())?);
        } else {
            told.for_each(|(name, word)| println!("{name} {word}"));
        }
        let all: Vec<bool> = outcomes.into_iter().collect::<Result<_, _>>()?;
        Ok(there(all.into_iter().all(|yes| yes)))
    }
}

/// Whether the block was there, or why that could not be found out.
type Known = Result<bool, ClientError>;

fn all_known(outcomes: Vec<bool>) -> Vec<Known> {
    outcomes.into_iter().map(Ok).collect()
}

impl StatArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        if self.names.is_empty() {
            return self.store().map(|()| there(true));
        }
        let stats = self.host.data()?.stat(&keys(&self.names)?)?;
        let row = |s: &kvasir_dataplane::wire::Stat| {
            serde_json::json!({
                "size_bytes": s.size, "tiers": tier_names(s.tiers), "checksum": format!("{:016x}", s.checksum), "depth": s.depth, "class": s.class,
                "uses": s.uses, "leases": s.leases, "age_ms": s.age_ms, "idle_ms": s.idle_ms,
            })
        };
        let rows: serde_json::Map<_, _> = self
            .names
            .iter()
            .cloned()
            .zip(stats.iter().map(|s| s.as_ref().map_or(serde_json::Value::Null, row)))
            .collect();
        if self.json {
            println!("{}", serde_json::Value::Object(rows));
        } else {
            rows.iter().for_each(|(name, row)| {
                println!("{name} {}", if row.is_null() { "missing".into() } else { row.to_string() })
            });
        }
        Ok(there(stats.iter().all(Option::is_some)))
    }

    fn store(&self) -> anyhow::Result<()> {
        let (usage, peers) = self.host.control(async |mut control| {
            let usage = control.store.usage(proto::UsageRequest {}).await?.into_inner();
            Ok((usage, control.node.peers(proto::PeersRequest {}).await?.into_inner().peers))
        })?;
        let rows = [
            ("pool_bytes", usage.pool_bytes),
            ("free_bytes", usage.free_bytes),
            ("blocks", usage.blocks),
            ("blocks_max", usage.blocks_max),
            ("leases", usage.leases),
            ("reservations", usage.reservations),
            ("hits", usage.hits),
            ("misses", usage.misses),
            ("stored_blocks", usage.stored_blocks),
            ("evicted_blocks", usage.evicted_blocks),
            ("evicted_bytes", usage.evicted_bytes),
            ("checksum_failures", usage.checksum_failures),
            ("pool_full", usage.pool_full),
        ];
        if self.json {
            let mut object: serde_json::Map<_, _> =
                rows.iter().map(|(name, value)| (name.to_string(), (*value).into())).collect();
            let tiers: serde_json::Map<_, _> =
                usage.tiers.iter().map(|t| (t.tier.clone(), tier_rows(t).into_iter().collect())).collect();
            object.insert("tiers".to_owned(), tiers.into());
            object.insert("peers".to_owned(), peers.iter().map(super::node::json).collect());
            println!("{}", serde_json::Value::Object(object));
        } else {
            rows.iter().for_each(|(name, value)| println!("{name:18}{value}"));
            for tier in &usage.tiers {
                println!("\ntier {}", tier.tier);
                tier_rows(tier).iter().for_each(|(name, value)| println!("{name:18}{value}"));
            }
            if !peers.is_empty() {
                println!("\n{}", super::node::table(&peers));
            }
        }
        Ok(())
    }
}

impl LsArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let max = self.max;
        let blocks = self.host.control(async |mut control| {
            let (mut blocks, mut from) = (Vec::new(), Some(0));
            while let Some(start) = from.filter(|_| blocks.len() < max) {
                let request =
                    proto::ListRequest { from: start, max: (max - blocks.len()).min(BATCH_MAX) as u32 };
                let page = control.store.list(request).await?.into_inner();
                blocks.extend(page.blocks);
                from = page.next;
            }
            Ok((blocks, from.is_some()))
        })?;
        let (blocks, are_more) = blocks;
        if are_more {
            eprintln!("kvasir: the first {max} blocks; there are more (--max)");
        }
        let hex = |key: &[u8]| key.iter().fold("0x".to_owned(), |text, byte| format!("{text}{byte:02x}"));
        if self.json {
            let row = |b: &proto::Block| serde_json::json!({ "key": hex(&b.key), "size_bytes": b.size_bytes, "uses": b.uses, "depth": b.depth, "class": b.class });
            let rows: Vec<_> = blocks.iter().map(row).collect();
            println!("{}", serde_json::json!({ "blocks": rows }));
        } else {
            blocks.iter().for_each(|b| println!("{} {:>12} B {:>6} uses", hex(&b.key), b.size_bytes, b.uses));
        }
        Ok(())
    }
}

/// Names of the tiers whose bits are set.
pub(super) fn tier_names(bits: u8) -> Vec<&'static str> {
    Tier::ALL.into_iter().filter(|&tier| bits & 1 << tier as u8 != 0).map(Tier::name).collect()
}

fn tier_rows(tier: &proto::TierUsage) -> [(String, serde_json::Value); 13] {
    [
        ("durable", tier.durable.into()),
        ("capacity_bytes", tier.capacity_bytes.into()),
        ("blocks", tier.blocks.into()),
        ("block_bytes", tier.block_bytes.into()),
        ("used_bytes", tier.used_bytes.into()),
        ("offloaded_blocks", tier.offloaded_blocks.into()),
        ("offload_refused", tier.offload_refused.into()),
        ("offload_skipped", tier.offload_skipped.into()),
        ("offload_failed", tier.offload_failed.into()),
        ("onboarded_blocks", tier.onboarded_blocks.into()),
        ("corrupt", tier.corrupt.into()),
        ("io_errors", tier.io_errors.into()),
        ("evicted_blocks", tier.evicted_blocks.into()),
    ]
    .map(|(name, value): (&str, serde_json::Value)| (name.to_owned(), value))
}

pub(super) fn keys(names: &[String]) -> anyhow::Result<Vec<BlockKey>> {
    names.iter().map(|name| key(name)).collect()
}

fn key(text: &str) -> anyhow::Result<BlockKey> {
    ensure!(!text.is_empty(), "a block needs a name");
    let Some(digits) = text.strip_prefix("0x") else { return Ok(BlockKey::from_name(text)) };
    let known = digits.len() == 32 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    ensure!(known, "`{text}` is not 0x and 32 hexadecimal digits; a name must not start with 0x");
    Ok(BlockKey(u128::from_str_radix(digits, 16)?))
}

/// Reads at most one block, so that an endless input ends in an error and does not fill the memory.
fn read(file: Option<&Path>) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let (name, read) = match file.filter(|path| *path != Path::new("-")) {
        Some(path) => {
            let file =
                std::fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
            (path.display().to_string(), file.take(BLOCK_BYTES_MAX + 1).read_to_end(&mut bytes))
        }
        None => {
            let input = std::io::stdin().lock();
            ("standard input".to_owned(), input.take(BLOCK_BYTES_MAX + 1).read_to_end(&mut bytes))
        }
    };
    read.with_context(|| format!("cannot read {name}"))?;
    if bytes.len() as u64 > BLOCK_BYTES_MAX {
        bail!("{name} has over {BLOCK_BYTES_MAX} B, the most one block can hold; split it");
    }
    Ok(bytes)
}
