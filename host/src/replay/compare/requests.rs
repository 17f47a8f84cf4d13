//! Policies that decide about requests beside each other: two simulated clusters that differ in one policy.

use super::super::cluster::{Choices, Cluster, Decided, Ended, Names, Policies, Report, Setup};
use super::{Error, Match, Requested, TOLD};
use hashbrown::HashMap;
use serde::Serialize;

/// Both over one trace.
#[derive(Clone, Debug, Serialize)]
pub struct Requests {
    pub mode: &'static str,
    pub slot: &'static str,
    pub trace: String,
    pub candidate: Report,
    pub baseline: Report,
    pub diff: Diff,
}

/// What both made of the same requests. Each side goes on with what it decided, so that a decision may differ because
/// those before it did.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Diff {
    pub requests: u64,
    /// Requests that were placed elsewhere, fetched another number of blocks, or were rejected by one side only.
    pub differ: u64,
    pub rejected_by_candidate_only: u64,
    pub rejected_by_baseline_only: u64,
    pub first: Option<Difference>,
    /// The requests whose first token the candidate delayed most.
    pub costliest: Vec<Difference>,
}

/// A request that was decided otherwise.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Its place in the trace, from 0.
    pub request: u64,
    pub time_ms: u64,
    pub prompt_tokens: u32,
    pub candidate: Chose,
    pub baseline: Chose,
}

/// What one side made of a request.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Chose {
    /// Names of the instances. `None` means that it was rejected.
    pub prefill: Option<String>,
    pub decode: Option<String>,
    pub fetched_blocks: u32,
    pub ttft_s: Option<f64>,
}

impl Requests {
    /// Takes the trace through two clusters.
    ///
    /// # Errors
    /// A policy does not start, the cluster cannot be simulated, or the trace cannot be read.
    pub fn compare(
        of: &Match<'_>,
        setup: &Setup,
        choices: &Choices,
        trace: impl Iterator<Item = Requested>,
    ) -> Result<Self, Error> {
        let slot = of.candidate.slot;
        let open = |contender: &super::Contender| {
            setup.check().map_err(super::cluster::Error::from)?;
            let choices = choices.clone().with(slot, contender.choice.clone());
            Ok::<_, Error>(Policies::open(setup, &choices)?)
        };
        let (mut a, mut b) = (open(of.candidate)?, open(of.baseline)?);
        let names = [Names::of(&a), Names::of(&b)];
        let mut clusters = [Cluster::new(setup, &mut a)?, Cluster::new(setup, &mut b)?];
        let mut pairing = Pairing::default();
        for request in trace {
            let request = request?;
            let [a, b] = &mut clusters;
            let decided = [a.offer(&request)?, b.offer(&request)?];
            pairing.decided(request.time_ms(), request.input_tokens, decided);
            pairing.ended(&mut clusters);
        }
        if pairing.diff.requests == 0 {
            return Err(Error::Empty(of.trace.to_owned()));
        }
        for cluster in &mut clusters {
            cluster.finish()?;
        }
        pairing.ended(&mut clusters);
        assert!(pairing.open.is_empty(), "every request ends on both sides");
        let [candidate, baseline] = [0, 1].map(|n: usize| Report::new(of.trace, &names[n], &clusters[n]));
        let instances: Vec<&str> = clusters[0].names().collect();
        let diff = pairing.told(&instances);
        let (slot, trace) = (slot.as_str(), of.trace.to_owned());
        Ok(Self { mode: "compare", slot, trace, candidate, baseline, diff })
    }
}

/// A request that has not ended on both sides.
#[derive(Clone, Copy)]
struct Open {
    time_ms: u64,
    prompt_tokens: u32,
    decided: [Decided; 2],
    /// What each side made of it; the inner `None` means that it was rejected there.
    ttft_us: [Option<Option<u64>>; 2],
}

/// Holds what both sides did with a request against each other, while it is in flight on either.
#[derive(Default)]
struct Pairing {
    open: HashMap<u64, Open>,
    diff: Diff,
    first: Option<(u64, Open)>,
    /// Microseconds lost, request, and what it was.
    costliest: Vec<(u64, u64, Open)>,
}

impl Pairing {
    fn decided(&mut self, time_ms: u64, prompt_tokens: u32, decided: [Decided; 2]) {
        let request = self.diff.requests;
        self.diff.requests += 1;
        let rejected = decided.map(|decided| matches!(decided, Decided::Rejected { .. }));
        self.diff.rejected_by_candidate_only += u64::from(rejected == [true, false]);
        self.diff.rejected_by_baseline_only += u64::from(rejected == [false, true]);
        self.diff.differ += u64::from(differ(decided));
        self.open.insert(request, Open { time_ms, prompt_tokens, decided, ttft_us: [None; 2] });
    }

    fn ended(&mut self, clusters: &mut [Cluster<'_>; 2]) {
        for (side, cluster) in clusters.iter_mut().enumerate() {
            for Ended { request, ttft_us } in cluster.take_ended() {
                let open = self.open.get_mut(&request).expect("a request that ends has begun");
                open.ttft_us[side] = Some(ttft_us);
                if open.ttft_us.iter().all(Option::is_some) {
                    let open = *open;
                    self.open.remove(&request);
                    self.close(request, open);
                }
            }
        }
    }

    fn close(&mut self, request: u64, open: Open) {
        if !differ(open.decided) {
            return;
        }
        if self.first.is_none_or(|(first, _)| request < first) {
            self.first = Some((request, open));
        }
        let [Some(Some(candidate)), Some(Some(baseline))] = open.ttft_us else { return };
        let lost_us = candidate.saturating_sub(baseline);
        if lost_us > 0 {
            self.costliest.push((lost_us, request, open));
            self.costliest.sort_by_key(|&(lost_us, request, _)| (std::cmp::Reverse(lost_us), request));
            self.costliest.truncate(TOLD);
        }
    }

    fn told(self, names: &[&str]) -> Diff {
        let tell = |(request, open): (u64, Open)| {
            let [candidate, baseline] = [0, 1].map(|side: usize| {
                let ttft_s = open.ttft_us[side].flatten().map(|us| us as f64 / 1e6);
                chose(open.decided[side], ttft_s, names)
            });
            let Open { time_ms, prompt_tokens, .. } = open;
            Difference { request, time_ms, prompt_tokens, candidate, baseline }
        };
        let costliest = self.costliest.into_iter().map(|(_, request, open)| tell((request, open)));
        Diff { first: self.first.map(tell), costliest: costliest.collect(), ..self.diff }
    }
}

/// Two rejections for different reasons count as the same.
fn differ(decided: [Decided; 2]) -> bool {
    match decided {
        [Decided::Rejected { .. }, Decided::Rejected { .. }] => false,
        [candidate, baseline] => candidate != baseline,
    }
}

fn chose(decided: Decided, ttft_s: Option<f64>, names: &[&str]) -> Chose {
    let name = |at: u32| names.get(at as usize).map(|name| (*name).to_owned());
    match decided {
        Decided::Rejected { .. } => Chose::default(),
        Decided::Placed { prefill, decode, fetched_blocks } => {
            Chose { prefill: name(prefill), decode: name(decode), fetched_blocks, ttft_s }
        }
    }
}
