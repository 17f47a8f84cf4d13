use super::*;
use crate::policy::{SlotKind, Source};
use crate::replay::cluster::{Choice, Choices, Setup};
use crate::replay::generate::{Generator, Plan, Workload};

fn contender(slot: SlotKind, name: &str) -> Contender {
    Contender::find(name, Some(slot), Vec::new()).unwrap().native()
}

fn bad(slot: SlotKind, mode: &str) -> Contender {
    let bytes = kvasir_tests::guest(slot.as_str()).to_vec();
    let settings = [("mode", mode), ("after", "5")].map(|(n, v)| (n.to_owned(), v.to_owned()));
    let choice = Choice { source: Source::Bytes { name: "bad".into(), bytes }, settings: settings.into() };
    Contender { slot, name: "bad".into(), choice }
}

fn trace() -> impl Iterator<Item = Requested> {
    let plan = Plan { workload: Workload::Chat, requests: 1_200, rate_rps: 12.0, seed: 9 };
    Generator::new(&plan).unwrap().map(Ok)
}

fn evictors(candidate: &Contender, baseline: &Contender) -> Evictors {
    let of = Match { trace: "<t>", candidate, baseline, block_size_tokens: 512 };
    Evictors::compare(&of, &[64, 1_024], trace()).unwrap()
}

fn requests(candidate: &Contender, baseline: &Contender) -> Requests {
    let setup = Setup { prefill: 3, decode: 2, pool_blocks: 400, ..Setup::default() };
    let of = Match { trace: "<t>", candidate, baseline, block_size_tokens: 512 };
    Requests::compare(&of, &setup, &Choices::default(), trace()).unwrap()
}

/// What must hold of any report that people are given.
fn check_told(comparison: &Comparison, expected: &[&str]) {
    let (text, html) = (comparison.text(), comparison.page().html());
    for expected in expected {
        assert!(text.contains(expected) && html.contains(expected), "{expected}: {text}\n{html}");
    }
    assert!(html.contains("<polyline") && html.contains("&lt;t&gt;") && !html.contains("<t>"), "{html}");
    for outside in ["<script", "<link", "http:", "https:", "@import", "url(", "NaN"] {
        assert!(!html.contains(outside), "{outside}");
    }
}

#[test]
fn evictors_beside_each_other_and_lru() {
    let (lru, fifo) = (contender(SlotKind::Evictor, "lru"), contender(SlotKind::Evictor, "fifo"));
    let same = evictors(&lru, &lru);
    for capacity in &same.capacities {
        assert_eq!((capacity.differ, capacity.first, capacity.candidate.above_lru), (0, None, 0.0));
        assert_eq!(capacity.candidate.prefix_hits, capacity.lru.prefix_hits);
    }
    let other = evictors(&fifo, &lru);
    let first = &other.capacities[1];
    let (gained, lost) = (first.blocks_gained, first.blocks_lost);
    assert_eq!(first.candidate.prefix_hits + lost, first.baseline.prefix_hits + gained);
    assert!(first.differ > 0 && first.first.is_some() && lost > 0, "{first:?}");
    assert!(first.costliest.is_sorted_by_key(|d| std::cmp::Reverse(d.baseline_hits - d.candidate_hits)));
    let other = Comparison::Evictors(other);
    assert!(other.candidate_faults().is_empty() && other.baseline_faults().is_empty());
    check_told(&other, &["fifo", "lru", "above baseline"]);
}

#[test]
fn schedulers_beside_each_other() {
    let (mooncake, random) =
        (contender(SlotKind::Scheduler, "mooncake"), contender(SlotKind::Scheduler, "random"));
    let same = requests(&mooncake, &mooncake);
    assert_eq!((same.diff.requests, same.diff.differ, &same.diff.first), (1_200, 0, &None));
    assert_eq!(same.candidate, same.baseline);
    let other = requests(&random, &mooncake);
    let diff = &other.diff;
    assert!(diff.differ > 300 && diff.first.is_some() && diff.costliest.len() == TOLD, "{diff:?}");
    let lost = |d: &Difference| d.candidate.ttft_s.unwrap() - d.baseline.ttft_s.unwrap();
    assert!(diff.costliest.is_sorted_by(|a, b| lost(a) >= lost(b)) && lost(&diff.costliest[0]) > 0.0);
    assert!(diff.first.as_ref().is_some_and(|first| first.candidate != first.baseline), "{diff:?}");
    assert!(other.candidate.hit_rate_percent < other.baseline.hit_rate_percent, "{:?}", other.candidate);
    let again = serde_json::to_string(&requests(&random, &mooncake)).unwrap();
    assert_eq!(serde_json::to_string(&other).unwrap(), again, "the same again");
    check_told(&Comparison::Requests(Box::new(other)), &["random", "mooncake", "of 1200 decisions differ"]);
}

#[test]
fn a_policy_that_fails_is_named_on_its_side() {
    let lru = contender(SlotKind::Evictor, "lru");
    let failed = Comparison::Evictors(evictors(&bad(SlotKind::Evictor, "trap"), &lru));
    assert!(failed.candidate_faults()[0].contains("trapped"), "{:?}", failed.candidate_faults());
    assert!(failed.baseline_faults().is_empty());
    assert!(failed.page().html().contains("bad failed: "));
    for slot in [SlotKind::Scheduler, SlotKind::Admitter, SlotKind::Balancer] {
        let failed =
            Comparison::Requests(Box::new(requests(&Contender::default_of(slot), &bad(slot, "trap"))));
        let faults = failed.baseline_faults();
        assert!(
            faults.len() == 1 && faults[0].contains(slot.as_str()) && faults[0].contains("traps"),
            "{faults:?}"
        );
        assert!(failed.candidate_faults().is_empty(), "{slot}");
    }
}

#[test]
fn what_cannot_be_compared_says_why() {
    let lru = contender(SlotKind::Evictor, "lru");
    let of = Match { trace: "t", candidate: &lru, baseline: &lru, block_size_tokens: 512 };
    let compare = |capacity| Evictors::compare(&of, &[capacity], std::iter::empty()).unwrap_err().to_string();
    assert!(compare(5).contains("trace t holds no requests"));
    assert!(compare(0).contains("capacity of 0 blocks"));
    let mooncake = contender(SlotKind::Scheduler, "mooncake");
    let of = Match { trace: "t", candidate: &mooncake, baseline: &mooncake, block_size_tokens: 512 };
    let compare = |setup| {
        let choices = Choices::default();
        Requests::compare(&of, &setup, &choices, std::iter::empty()).unwrap_err().to_string()
    };
    assert!(compare(Setup::default()).contains("trace t holds no requests"));
    assert!(compare(Setup { decode: 0, ..Setup::default() }).contains("4 prefill, 0 decode"));
    assert_eq!(capacities(182_790), [3_656, 9_140, 18_279, 36_558]);
    assert_eq!(capacities(3), [16]);
}
