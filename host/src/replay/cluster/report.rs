//! What is reported of a simulated cluster when it is done.

use super::{Cluster, Faults, Learned, Policies, Seconds, Setup};
use crate::policy::SlotKind;
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
    pub prefill: u32,
    pub decode: u32,
    pub both: u32,
    pub seed: u64,
    pub requests: u64,
    pub finished: u64,
    pub rejected: u64,
    /// From the first request to the end of the last.
    pub span_s: f64,
    pub ttft_s: Seconds,
    /// Over the requests, each by its mean.
    pub tbt_s: Seconds,
    /// Blocks found, as a share of the blocks of prompts that were computed.
    pub hit_rate_percent: f64,
    /// Share of these blocks that another instance sent.
    pub fetched_percent: f64,
    /// Requests per second that kept their SLOs.
    pub goodput_rps: f64,
    /// Share of all requests; one that was rejected has not kept them.
    pub slo_attainment_percent: f64,
    /// How busy instances were, by role.
    pub load: Vec<RoleLoad>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub learned: Vec<Learned>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Faults>,
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
    #[serde(skip)]
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
        let Setup { prefill, decode, both, seed, .. } = *setup;
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
            prefill,
            decode,
            both,
            seed,
            requests: tally.offered,
            finished: tally.finished,
            rejected: tally.rejected,
            span_s,
            ttft_s: tally.ttft.seconds(),
            tbt_s: tally.tbt.seconds(),
            hit_rate_percent: tally.hit_rate_percent(),
            fetched_percent: tally.fetched_percent(),
            goodput_rps: (goodput * 1e4).round() / 1e4,
            slo_attainment_percent: tally.slo_attainment_percent(),
            load: load.collect(),
            learned: cluster.learned(),
            faults: cluster.faults(),
        }
    }

    /// Name and value of each row for people.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let times = |s: &Seconds| {
            format!("{:.3} s mean, {:.3} p50, {:.3} p90, {:.3} p99", s.mean, s.p50, s.p90, s.p99)
        };
        let mut rows = vec![
            ("scheduler", self.scheduler.clone()),
            ("admitter", self.admitter.clone()),
            ("balancer", self.balancer.clone()),
            ("evictor", self.evictor.clone()),
            ("requests", format!("{} ({} rejected)", self.requests, self.rejected)),
            ("TTFT", times(&self.ttft_s)),
            ("TBT", times(&self.tbt_s)),
            (
                "within SLO",
                format!("{:.2} % ({:.2} requests/s)", self.slo_attainment_percent, self.goodput_rps),
            ),
            ("hit rate", format!("{:.2} % ({:.2} % fetched)", self.hit_rate_percent, self.fetched_percent)),
        ];
        rows.extend(self.load.iter().map(|load| {
            let text =
                format!("busy {:.1} %, the busiest {:.2} × the mean", load.busy_percent, load.imbalance);
            (load.role, text)
        }));
        rows.extend(self.learned.iter().map(|learned| ("learned", learned.to_string())));
        rows.extend(self.faults.iter().map(|faults| ("policy failed", faults.to_string())));
        rows
    }
}

fn role_load(role: &'static str, cluster: &Cluster<'_>) -> Option<RoleLoad> {
    let load = cluster.load().into_iter();
    let of_role = load.filter(|(name, _)| name.split_once('-').is_some_and(|(named, _)| named == role));
    let mut instances: Vec<f64> = of_role.map(|(_, percent)| percent).collect();
    instances.sort_unstable_by(|a, b| b.total_cmp(a));
    let most = *instances.first()?;
    let mean = instances.iter().sum::<f64>() / instances.len() as f64;
    let four = |value: f64| (value * 1e4).round() / 1e4;
    let imbalance = if mean > 0.0 { four(most / mean) } else { 1.0 };
    Some(RoleLoad { role, busy_percent: four(mean), imbalance, instances })
}
