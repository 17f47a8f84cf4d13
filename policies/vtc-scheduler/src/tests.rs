use super::*;
use kvasir_policy::scheduler::{DecodeRow, Kept, Layout, PrefillRow, Question};
use kvasir_policy_testing::{asked, chooses_what_is_there};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// One pair, its prefill queue that long.
fn cluster(queue_ms: f32) -> Kept<Vtc> {
    let mut kept = Kept::new(Box::<Vtc>::default());
    kept.open(&Layout::of(1, 1, 16).encode());
    let prefill = PrefillRow { available: true, busy_until: queue_ms, ..PrefillRow::default() };
    kept.update_prefill(&prefill.encode());
    let decode = DecodeRow { available: true, free_blocks: 1 << 20, ..DecodeRow::default() };
    kept.update_decode(&decode.encode());
    kept
}

/// A host that books what is not rejected.
#[derive(Default)]
struct Host {
    memos: BTreeMap<u32, u64>,
}

impl Host {
    /// Whether a request of 1,000 and 500 tokens was served.
    fn ask(&mut self, kept: &mut Kept<Vtc>, tenant: u32) -> bool {
        let memo = self.memos.entry(tenant).or_default();
        let request = Request {
            prompt_tokens: 1_000,
            output_tokens: 500,
            tenant,
            tenant_memo: *memo,
            ..Request::default()
        };
        match kept.schedule(0.0, Question::new(0.0, &request, 1, 1).words()) {
            Decision::Run(placement) => {
                *memo = memo.wrapping_add(placement.tenant_charge);
                true
            }
            Decision::Reject { reason, .. } => {
                assert_eq!(reason, Reason::Policy as u32);
                false
            }
        }
    }
}

#[test]
fn a_greedy_tenant_gets_no_more_than_its_lead_while_instances_are_busy() {
    let (mut kept, mut host) = (cluster(5_000.0), Host::default());
    let mut served = [0u64; 2];
    for _ in 0..100 {
        for _ in 0..9 {
            served[0] += u64::from(host.ask(&mut kept, 0));
        }
        served[1] += u64::from(host.ask(&mut kept, 1));
    }
    assert_eq!(served[1], 100, "the modest one is never turned away");
    assert!(served[0].abs_diff(served[1]) <= 20_000 / 2_000 + 9, "{served:?}");
    assert_eq!(host.memos[&1], 100 * 2_000 + 8 * 2_000, "what it used, and what it was lifted by");
}

#[test]
fn idle_instances_serve_everybody_and_what_must_run_runs() {
    let (mut kept, mut host) = (cluster(10.0), Host::default());
    host.ask(&mut kept, 1);
    assert!((0..100).all(|_| host.ask(&mut kept, 0)));
    let mut busy = cluster(5_000.0);
    let request = Request { tenant: 0, tenant_memo: 1 << 40, ..Request::default() };
    let asked = |kept: &mut Kept<Vtc>, request: &Request| {
        kept.schedule(0.0, Question::new(0.0, request, 1, 1).words())
    };
    asked(&mut busy, &Request { tenant: 1, tenant_memo: 1, ..request });
    assert_eq!(asked(&mut busy, &request), Decision::reject(Reason::Policy, 5_000));
    let must_run = Request { hints: Request::MUST_RUN, ..request };
    assert!(matches!(asked(&mut busy, &must_run), Decision::Run(_)));
}

#[test]
fn who_comes_back_has_saved_nothing_up() {
    let (mut kept, mut host) = (cluster(10.0), Host::default());
    for _ in 0..50 {
        host.ask(&mut kept, 0);
    }
    host.ask(&mut kept, 1);
    assert_eq!(host.memos[&1], 49 * 2_000 + 2_000, "lifted to what the other had when it was heard of last");
}

proptest! {
    /// An answer that is not booked leaves nothing: asked again, the policy says the same.
    #[test]
    fn asking_twice_is_asking_once(tenants in prop::collection::vec(0..4u32, 1..60)) {
        let (mut once, mut twice) = (cluster(5_000.0), cluster(5_000.0));
        let (mut host, mut other) = (Host::default(), Host::default());
        for tenant in tenants {
            let memo = other.memos.get(&tenant).copied().unwrap_or(0);
            let request =
                Request { prompt_tokens: 1_000, output_tokens: 500, tenant, tenant_memo: memo, ..Request::default() };
            twice.schedule(0.0, Question::new(0.0, &request, 1, 1).words());
            prop_assert_eq!(host.ask(&mut once, tenant), other.ask(&mut twice, tenant));
        }
    }

    #[test]
    fn no_input_panics_and_what_is_chosen_is_there(asked in asked()) {
        chooses_what_is_there(Vtc::default(), &asked);
    }
}
