//! The life of one request: decision, prefix, transfer, prefill, blocks stored, decode.

use super::Prompt;
use super::cluster::{Cluster, Host};
use super::stats::{Sample, Stats};
use crate::replay::cluster::TRANSFER;
use crate::replay::content;
use crate::replay::trace::BLOCK_SIZE_TOKENS;
use anyhow::{Context, Result};
use kvasir_client::data::{Client, ClientError};
use kvasir_dataplane::{BlockKey, BlockMeta};
use kvasir_proto as proto;
use proto::complete_request::Stage;
use proto::schedule_response::Decision;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The paper's SLOs (Mooncake, FAST '25, §5.1), in trace time.
const TTFT_SLO_MS: f64 = 30_000.0;
const TBT_SLO_MS: f64 = 300.0;
/// How often a put into a full pool is tried again.
const PUT_RETRIES: u32 = 5;

/// Runs one request to its end and counts what goes wrong.
pub(super) async fn run(cluster: &Arc<Cluster>, stats: &Arc<Stats>, prompt: Prompt, speed: f64) {
    let phase = stats.asked();
    match serve(cluster, stats, &prompt, speed).await {
        Ok(Some(sample)) => stats.served(phase, &sample),
        Ok(None) => stats.rejected(phase),
        Err(error) => stats.failed(phase, &error),
    }
}

/// Returns `None` if the request was rejected.
async fn serve(
    cluster: &Arc<Cluster>,
    stats: &Arc<Stats>,
    prompt: &Prompt,
    speed: f64,
) -> Result<Option<Sample>> {
    let arrival = Instant::now();
    let mut conductor = cluster.conductor().control.conductor.clone();
    let answer = conductor.schedule(ask(prompt, speed)).await?.into_inner();
    stats.answered(!answer.fallback.is_empty());
    let placement = match answer.decision.context("an answer without a decision")? {
        Decision::Placement(placement) => placement,
        Decision::Rejection(_) => return Ok(None),
    };
    let unknown = || format!("placed on unknown hosts `{}`, `{}`", placement.prefill, placement.decode);
    let prefill = cluster.host(&placement.prefill).with_context(unknown)?;
    let decode = cluster.host(&placement.decode).with_context(unknown)?;
    let keys: Arc<[BlockKey]> =
        prompt.chain.iter().map(|hash| prefill.local.key(&hash.to_le_bytes())).collect();
    let complete = |stage: Stage, prefill_ms: Option<f64>| {
        let request = proto::CompleteRequest {
            request_id: answer.request_id,
            stage: stage.into(),
            prefill_ms,
            tokens: 0,
        };
        let mut conductor = conductor.clone();
        async move { conductor.complete(request).await.map(drop) }
    };

    let mut held =
        read(stats, &prefill.local, &keys, 0..placement.prefix_blocks as usize, prompt.class, None).await?;
    if held < placement.prefix_blocks as usize {
        // The index did not know of an eviction yet: a miss, and a correction.
        stats.stale(placement.prefix_blocks as usize - held);
        forget(cluster, prefill, &prompt.chain[held..placement.prefix_blocks as usize]).await?;
    }
    let mut ready = Instant::now();
    if let Some(source) = cluster.host(&placement.transfer_from)
        && held == placement.prefix_blocks as usize
    {
        let wanted = held..held + placement.transfer_blocks as usize;
        held = read(stats, &source.remote, &keys, wanted, prompt.class, Some((prefill, cluster.block_bytes)))
            .await?;
        let transfer_ms = TRANSFER.transfer_ms(placement.transfer_blocks, 0);
        ready = ready.max(arrival + Duration::from_secs_f64(transfer_ms / 1_000.0 / speed));
        complete(Stage::Transfer, None).await?;
    }

    let input_tokens = u64::from(prompt.request.input_tokens);
    let cached_tokens = (held as u64 * u64::from(BLOCK_SIZE_TOKENS)).min(input_tokens);
    let (first_token, took) =
        prefill.instance.prefill(ready, cached_tokens, input_tokens - cached_tokens, speed);
    tokio::time::sleep_until(first_token).await;
    let stored =
        write(stats, &prefill.local, &keys, held..keys.len(), prompt.class, cluster.block_bytes).await?;
    announce(cluster, prefill, &prompt.chain, placement.prefix_blocks as usize..stored).await?;
    complete(Stage::Prefill, Some(took.as_secs_f64() * 1_000.0)).await?;

    let tokens = input_tokens + u64::from(prompt.request.output_tokens);
    tokio::time::sleep(decode.instance.join(tokens, prompt.request.output_tokens, speed)).await;
    decode.instance.leave(tokens);
    complete(Stage::Finished, None).await?;
    Ok(Some(Sample { ttft: (first_token - arrival).mul_f64(speed), blocks: keys.len(), hit_blocks: held }))
}

fn ask(prompt: &Prompt, speed: f64) -> proto::ScheduleRequest {
    proto::ScheduleRequest {
        prompt_tokens: prompt.request.input_tokens,
        output_tokens: prompt.request.output_tokens,
        blocks: prompt.chain.clone(),
        class: prompt.class.into(),
        ttft_slo_ms: TTFT_SLO_MS / speed,
        tbt_slo_ms: TBT_SLO_MS / speed,
        ..Default::default()
    }
}

/// Reads blocks until the first that is gone, comparing every byte, and stores them on another host if
/// one is given. Returns the end of what was read.
async fn read(
    stats: &Arc<Stats>,
    client: &Arc<Client>,
    keys: &Arc<[BlockKey]>,
    range: std::ops::Range<usize>,
    class: u16,
    copy_to: Option<(&Host, u32)>,
) -> Result<usize> {
    if range.is_empty() {
        return Ok(range.start);
    }
    let (stats2, client, keys2) = (stats.clone(), client.clone(), keys.clone());
    let first = range.start;
    let end = tokio::task::spawn_blocking(move || -> Result<usize, ClientError> {
        let found = client.get(&keys2[range], class)?;
        let mut end = first;
        for (block, &key) in found.iter().zip(&keys2[first..]) {
            let Some(block) = block else { break };
            let bytes = block.bytes()?.to_vec();
            if !content::matches(key, &bytes) {
                stats2.wrong_bytes();
                break;
            }
            stats2.read(bytes.len());
            end += 1;
        }
        Ok(end)
    })
    .await??;
    match copy_to {
        Some((host, block_bytes)) => write(stats, &host.local, keys, first..end, class, block_bytes).await,
        None => Ok(end),
    }
}

/// Stores blocks in order and returns the end of what is stored. A pool that stays full ends the chain.
async fn write(
    stats: &Arc<Stats>,
    client: &Arc<Client>,
    keys: &Arc<[BlockKey]>,
    range: std::ops::Range<usize>,
    class: u16,
    block_bytes: u32,
) -> Result<usize> {
    let (stats, client, keys) = (stats.clone(), client.clone(), keys.clone());
    let stored = tokio::task::spawn_blocking(move || -> Result<usize, ClientError> {
        let mut bytes = vec![0; block_bytes as usize];
        for depth in range.clone() {
            let parent = depth.checked_sub(1).map(|above| keys[above]);
            let meta = BlockMeta {
                parent,
                depth: depth as u32,
                class,
                ..BlockMeta::single(keys[depth], block_bytes)
            };
            content::fill(keys[depth], &mut bytes);
            if !put(&client, &meta, &bytes)? {
                stats.not_stored(range.end - depth);
                return Ok(depth);
            }
            stats.written(bytes.len());
        }
        Ok(range.end)
    });
    Ok(stored.await??)
}

/// Returns false if the pool stays full.
fn put(client: &Client, meta: &BlockMeta, bytes: &[u8]) -> Result<bool, ClientError> {
    for retry in 0..PUT_RETRIES {
        match client.put(meta, bytes) {
            Ok(_) => return Ok(true),
            Err(error) if error.retryable() => std::thread::sleep(Duration::from_millis(1 << retry)),
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// Tells the conductor which blocks of the chain an instance holds now.
async fn announce(
    cluster: &Cluster,
    host: &Host,
    chain: &[u64],
    range: std::ops::Range<usize>,
) -> Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let mut sequence = host.sequence.lock().await;
    let request = proto::BlocksStoredRequest {
        name: host.name.clone(),
        epoch: host.epoch,
        sequence: *sequence + 1,
        parent: range.start.checked_sub(1).map_or(0, |above| chain[above]),
        blocks: chain[range].to_vec(),
        tier: proto::BlockTier::Dram.into(),
    };
    cluster.conductor().control.conductor.clone().blocks_stored(request).await?;
    *sequence += 1;
    Ok(())
}

/// Tells the conductor that an instance lost blocks.
async fn forget(cluster: &Cluster, host: &Host, blocks: &[u64]) -> Result<()> {
    let mut sequence = host.sequence.lock().await;
    let request = proto::BlocksRemovedRequest {
        name: host.name.clone(),
        epoch: host.epoch,
        sequence: *sequence + 1,
        blocks: blocks.to_vec(),
        tier: proto::BlockTier::Unspecified.into(),
    };
    cluster.conductor().control.conductor.clone().blocks_removed(request).await?;
    *sequence += 1;
    Ok(())
}
