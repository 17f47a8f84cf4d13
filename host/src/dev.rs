//! `kvasir dev`: three hosts in one process, simulated engines, a trace, and a policy swapped live.
//!
//! Everything but the engines is the real thing: decisions go over gRPC to the first host's
//! conductor, blocks go through each host's Unix socket and data port, every byte read is compared.
//! An engine is a cost model ([`instance::Instance`]): it takes as long as the model says, divided by
//! the speed, and its blocks are bytes that follow from their keys.

mod cluster;
mod instance;
mod request;
mod screen;
mod stats;

pub use cluster::Cluster;
pub use stats::{Phase, Summary};

use crate::replay::chains::Chains;
use crate::replay::classes::Classes;
use crate::replay::generate::{Generator, Plan as Workload};
use crate::replay::trace::{Reader, Request};
use anyhow::{Context, Result};
use screen::Screen;
use stats::Stats;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// Requests in flight at once; more wait before they are sent.
const IN_FLIGHT: usize = 512;

/// What to run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub trace: Trace,
    /// Trace seconds per second.
    pub speed: f64,
    pub hosts: usize,
    pub pool_bytes: u64,
    pub block_bytes: u32,
    /// Evictor and scheduler in service between half and three quarters of the trace.
    pub swap: Option<Swap>,
}

/// Where requests come from.
#[derive(Clone, Debug)]
pub enum Trace {
    Generated(Workload),
    File(PathBuf),
}

/// Names of built-in policies.
#[derive(Clone, Debug)]
pub struct Swap {
    pub scheduler: String,
    pub evictor: String,
}

/// One request as it is sent: identities of its whole prefixes, first block first.
struct Prompt {
    request: Request,
    chain: Vec<u64>,
    class: u16,
}

/// Runs the trace through the cluster and returns what happened.
///
/// # Errors
/// The trace cannot be read, or a host stops answering. A single failed request is counted instead.
pub async fn run(cluster: &Arc<Cluster>, plan: &Plan) -> Result<Summary> {
    let prompts = prompts(&plan.trace)?;
    let stats = Arc::new(Stats::default());
    let screen = Screen::start(cluster.clone(), stats.clone(), prompts.len() as u64);
    let permits = Arc::new(Semaphore::new(IN_FLIGHT));
    let start = Instant::now();
    let first_us = prompts.first().map_or(0, |p| p.request.time_us);
    let mut tasks = tokio::task::JoinSet::new();
    let (half, three_quarters) = (prompts.len() / 2, prompts.len() * 3 / 4);
    let first = cluster.policies();
    let (mut serving, mut swapped) = (first.clone(), None);
    for (i, prompt) in prompts.into_iter().enumerate() {
        // What somebody else has brought into service is theirs.
        match &plan.swap {
            Some(swap) if i == half && cluster.policies() == first => {
                swapped = Some(cluster.load(swap).await?)
            }
            _ if i == three_quarters && swapped.take_if(|mine| *mine == cluster.policies()).is_some() => {
                cluster.rollback().await?;
            }
            _ => {}
        }
        let now = cluster.policies();
        if now != serving {
            stats.next_phase(now.clone());
            serving = now;
        }
        let due = Duration::from_secs_f64((prompt.request.time_us - first_us) as f64 / 1e6 / plan.speed);
        tokio::time::sleep_until(start + due).await;
        let permit = permits.clone().acquire_owned().await.context("semaphore closed")?;
        let (cluster, stats, speed) = (cluster.clone(), stats.clone(), plan.speed);
        tasks.spawn(async move {
            let _permit = permit;
            request::run(&cluster, &stats, prompt, speed).await;
        });
        while tasks.try_join_next().is_some() {}
    }
    while tasks.join_next().await.is_some() {}
    screen.finish().await;
    stats.summary(cluster, start.elapsed()).await
}

/// The trace, in order of time, with the class of each request.
fn prompts(trace: &Trace) -> Result<Vec<Prompt>> {
    let requests: Vec<Request> = match trace {
        Trace::Generated(plan) => Generator::new(plan)?.collect(),
        Trace::File(path) => {
            let file =
                std::fs::File::open(path).with_context(|| format!("cannot open trace {}", path.display()))?;
            Reader::new(path, file)?.collect::<Result<_, _>>()?
        }
    };
    let (mut chains, mut classes, mut path) = (Chains::default(), <Classes>::default(), Vec::new());
    let prompt = |request: Request| {
        chains.walk_of(request.tenant, &request.blocks, &mut path)?;
        let class = classes.assign(&request, &path);
        // 0 means "no parent" to the conductor.
        let chain = path.iter().map(|&node| chains.identity(node).max(1)).collect();
        Ok(Prompt { request, chain, class })
    };
    requests.into_iter().map(prompt).collect()
}
