//! What is reported of a simulated cluster when it is done.

use super::{
    Cluster, Faults, Latency, Learned, LoadMap, Policies, Replicas, Seconds, Setup, Spread, Swapped,
};
use crate::policy::SlotKind;
use crate::replay::tally::rounded;
use crate::replay::timeline::Timeline;
use serde::Serialize;

/// The JSON of `kvasir replay --mode cluster`. Nothing in it goes by the clock of a machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub mode: &'static str,
    pub trace: String,
    pub scheduler: String,
    pub admitter: String,
    pub balancer: String,
    pub evictor: String,
    /// What serves: a model on a machine.
    pub instance: String,
    pub prefill: u32,
    pub decode: u32,
    pub both: u32,
    /// Of a step, with prompts computed in parts; 0: in one go.
    pub chunk_tokens: u32,
    pub layer_wise: bool,
    pub racks: u32,
    /// What the instances of a rack send together, beside what it can send.
    pub oversubscription: f64,
    pub seed: u64,
    pub requests: u64,
    pub finished: u64,
    pub rejected: u64,
    /// How many of these by the instance that was to decode them, when their prompts were computed.
    pub turned_away: u64,
    /// From the first request to the end of the last.
    pub span_s: f64,
    pub ttft_s: Seconds,
    /// Over the requests, each by its mean.
    pub tbt_s: Seconds,
    /// Where the time of a request went, mean over those that finished.
    pub latency_s: Latency,
    /// Time that instances were at work, for each request that finished.
    pub instance_s_per_request: f64,
    /// Blocks found, as a share of the blocks of prompts that were computed.
    pub hit_rate_percent: f64,
    /// Share of these blocks that another instance sent.
    pub fetched_percent: f64,
    /// Blocks that went from one instance to another, to be found there, and to be decoded there.
    pub blocks_fetched: u64,
    pub blocks_handed_over: u64,
    /// What both came to.
    pub gb_moved: f64,
    /// How much of that from one rack to another.
    pub gb_between_racks: f64,
    pub replicas: Vec<Replicas>,
    /// Requests per second that kept their SLOs.
    pub goodput_rps: f64,
    /// Share of all requests; one that was rejected has not kept them.
    pub slo_attainment_percent: f64,
    /// How busy instances were, by role.
    pub load: Vec<RoleLoad>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub swaps: Vec<Swapped>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub learned: Vec<Learned>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Faults>,
    #[serde(skip)]
    pub curves: Curves,
}

/// What can be drawn of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct Curves {
    pub ttft: Spread,
    pub tbt: Spread,
    pub hits: Timeline,
    pub load: LoadMap,
    /// Name of each instance, in the order of the rows of `load`.
    pub instances: Vec<String>,
}

/// The instances of one role.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RoleLoad {
    pub role: &'static str,
    /// Part of the time at work, mean over the instances.
    pub busy_percent: f64,
    /// The busiest one beside that mean; 1 = all alike.
    pub imbalance: f64,
    /// Each instance, busiest first, per cent.
    #[serde(rename = "busy_percent_by_instance")]
    pub instances: Vec<f64>,
}

/// The names of the policies in each slot, for a [`Report`].
#[derive(Clone, Debug)]
pub struct Names {
    scheduler: String,
    admitter: String,
    balancer: String,
    evictor: String,
}

impl Names {
    pub fn of(policies: &Policies) -> Self {
        Self {
            scheduler: policies.name(SlotKind::Scheduler),
            admitter: policies.name(SlotKind::Admitter),
            balancer: policies.name(SlotKind::Balancer),
            evictor: policies.name(SlotKind::Evictor),
        }
    }
}

impl Report {
    /// The report of a cluster that has finished.
    pub fn new(trace: &str, names: &Names, cluster: &Cluster<'_>) -> Self {
        let (tally, setup) = (cluster.tally(), cluster.setup());
        let Setup { prefill, decode, both, chunk_tokens, layer_wise, racks, oversubscription, seed, .. } =
            *setup;
        let Names { scheduler, admitter, balancer, evictor } = names.clone();
        let span_s = cluster.now_us() as f64 / 1e6;
        let goodput = tally.within_slo as f64 / span_s.max(1e-6);
        let load = ["prefill", "decode", "both"].into_iter().filter_map(|role| role_load(role, cluster));
        Self {
            mode: "cluster",
            trace: trace.to_owned(),
            scheduler,
            admitter,
            balancer,
            evictor,
            instance: setup.instance.clone(),
            prefill,
            decode,
            both,
            chunk_tokens,
            layer_wise,
            racks,
            oversubscription,
            seed,
            requests: tally.offered,
            finished: tally.finished,
            rejected: tally.rejected,
            turned_away: tally.turned_away,
            span_s,
            ttft_s: tally.ttft.seconds(),
            tbt_s: tally.tbt.seconds(),
            latency_s: tally.parts.mean(tally.finished),
            instance_s_per_request: instance_s_per_request(cluster),
            hit_rate_percent: tally.hit_rate_percent(),
            fetched_percent: tally.fetched_percent(),
            blocks_fetched: tally.blocks_fetched,
            blocks_handed_over: tally.blocks_handed_over,
            gb_moved: gb(tally.blocks_fetched + tally.blocks_handed_over, setup),
            gb_between_racks: gb(tally.blocks_between_racks, setup),
            replicas: cluster.replicas(),
            goodput_rps: rounded(goodput),
            slo_attainment_percent: tally.slo_attainment_percent(),
            load: load.collect(),
            swaps: cluster.swapped().to_vec(),
            learned: cluster.learned(),
            faults: cluster.faults(),
            curves: Curves {
                ttft: tally.ttft.clone(),
                tbt: tally.tbt.clone(),
                hits: tally.hits.clone(),
                load: cluster.load_map().clone(),
                instances: cluster.names().map(str::to_owned).collect(),
            },
        }
    }

    /// "4 prefill, 4 decode, in 4 racks of 2:1: llama3-70b on 8 × a800"
    fn instances(&self) -> String {
        let roles = [(self.prefill, "prefill"), (self.decode, "decode"), (self.both, "both")];
        let there = roles.iter().filter(|(count, _)| *count > 0);
        let counts: Vec<_> = there.map(|(count, role)| format!("{count} {role}")).collect();
        let racks = match self.racks {
            1 => String::new(),
            racks => format!(", in {racks} racks of {}:1", self.oversubscription),
        };
        let chunks = match self.chunk_tokens {
            0 => String::new(),
            tokens => format!(", prompts in chunks of {tokens} tokens a step"),
        };
        let layers = if self.layer_wise { ", handed over layer by layer" } else { "" };
        format!("{}{racks}{chunks}{layers}: {}", counts.join(", "), self.instance)
    }

    /// "12031 (512 rejected, 40 of them when their prompts were computed)"
    fn ends(&self) -> String {
        let late = match self.turned_away {
            0 => String::new(),
            turned_away => format!(", {turned_away} of them when their prompts were computed"),
        };
        format!("{} ({} rejected{late})", self.requests, self.rejected)
    }

    /// "3120 fetched, 120943 handed over; 20811.7 GB, 830.2 of them between racks"
    fn moved(&self) -> String {
        let racks = match self.racks {
            1 => String::new(),
            _ => format!(", {:.1} of them between racks", self.gb_between_racks),
        };
        let Self { blocks_fetched, blocks_handed_over, gb_moved, .. } = self;
        format!("{blocks_fetched} fetched, {blocks_handed_over} handed over; {gb_moved:.1} GB{racks}")
    }

    /// "7.90 of each of the 10 hottest blocks, 4.31 of 100, 1.80 of 1000"
    fn copies(&self) -> String {
        let told = self.replicas.iter().enumerate().map(|(n, Replicas { hottest, mean })| match n {
            0 => format!("{mean:.2} of each of the {hottest} hottest blocks"),
            _ => format!("{mean:.2} of {hottest}"),
        });
        told.collect::<Vec<_>>().join(", ")
    }

    /// "0.001 s fetch, 0.217 queue, 0.472 prefill, 0.015 hand-over, 4.154 decode; 1.729 s of instances"
    fn parts(&self) -> String {
        let of = &self.latency_s;
        format!(
            "{:.3} s fetch, {:.3} queue, {:.3} prefill, {:.3} hand-over, {:.3} decode; {:.3} s of instances",
            of.fetch, of.queue, of.prefill, of.hand_over, of.decode, self.instance_s_per_request
        )
    }

    /// Name and value of each row for people. Where nothing finished, no row tells how long it took.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let of_finished = |text: String| if self.finished == 0 { String::new() } else { text };
        let times = |s: &Seconds| {
            of_finished(format!("{:.3} s mean, {:.3} p50, {:.3} p90, {:.3} p99", s.mean, s.p50, s.p90, s.p99))
        };
        let mut rows = vec![
            ("scheduler", self.scheduler.clone()),
            ("admitter", self.admitter.clone()),
            ("balancer", self.balancer.clone()),
            ("evictor", self.evictor.clone()),
            ("instances", self.instances()),
            ("requests", self.ends()),
            ("TTFT", times(&self.ttft_s)),
            ("TBT", times(&self.tbt_s)),
            (
                "within SLO",
                format!("{:.2} % ({:.2} requests/s)", self.slo_attainment_percent, self.goodput_rps),
            ),
            ("hit rate", format!("{:.2} % ({:.2} % fetched)", self.hit_rate_percent, self.fetched_percent)),
            ("blocks moved", self.moved()),
            ("copies", self.copies()),
            ("a request", of_finished(self.parts())),
        ];
        rows.retain(|(_, text)| !text.is_empty());
        rows.extend(self.load.iter().map(|load| {
            let text =
                format!("busy {:.1} %, the busiest {:.2} × the mean", load.busy_percent, load.imbalance);
            (load.role, text)
        }));
        rows.extend(self.swaps.iter().map(|Swapped { at_s, slot, from, to }| {
            ("swap", format!("at {at_s:.3} s: {slot} {from} to {to}"))
        }));
        rows.extend(self.learned.iter().map(|learned| ("learned", learned.to_string())));
        rows.extend(self.faults.iter().map(|faults| ("policy failed", faults.to_string())));
        rows
    }
}

fn gb(blocks: u64, setup: &Setup) -> f64 {
    (blocks as f64 * setup.block_bytes as f64 / 1e9 * 1e3).round() / 1e3
}

fn instance_s_per_request(cluster: &Cluster<'_>) -> f64 {
    (cluster.busy_s() / cluster.tally().finished.max(1) as f64 * 1e6).round() / 1e6
}

fn role_load(role: &'static str, cluster: &Cluster<'_>) -> Option<RoleLoad> {
    let load = cluster.load().into_iter();
    let of_role = load.filter(|(name, _)| name.split_once('-').is_some_and(|(named, _)| named == role));
    let mut instances: Vec<f64> = of_role.map(|(_, percent)| percent).collect();
    instances.sort_unstable_by(|a, b| b.total_cmp(a));
    let most = *instances.first()?;
    let mean = instances.iter().sum::<f64>() / instances.len() as f64;
    let imbalance = if mean > 0.0 { rounded(most / mean) } else { 1.0 };
    Some(RoleLoad { role, busy_percent: rounded(mean), imbalance, instances })
}
