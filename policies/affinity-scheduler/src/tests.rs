use super::*;
use kvasir_policy::scheduler::{Column, DecodeRow, Kept, Layout, PrefillRow, Question};
use kvasir_policy_testing::{asked, chooses_what_is_there};
use proptest::prelude::*;

const OUT: f32 = f32::INFINITY;

/// Three prefill and three decode instances, one of each on a machine; the queue of the third ends after 5 s.
fn kept() -> Kept<Affinity> {
    let mut kept = Kept::new(Box::<Affinity>::default());
    kept.open(&Layout::of(3, 3, 16).encode());
    for (slot, busy_until) in [(0, 0.0), (1, 0.0), (2, 5_000.0)] {
        let host = Some(u32::from(slot));
        let row = PrefillRow { slot, available: true, busy_until, host, ..PrefillRow::default() };
        kept.update_prefill(&row.encode());
        let sequences = 2 - u32::from(slot);
        let row =
            DecodeRow { slot, available: true, sequences, free_blocks: 100, host, ..DecodeRow::default() };
        kept.update_decode(&row.encode());
    }
    kept
}

fn question(prefix: [u32; 3], at_decode: [u32; 3]) -> Question {
    let request = Request { prompt_tokens: 160, ..Request::default() };
    Question::new(0.0, &request, 3, 3).with(Column::Prefix, &prefix).with(Column::PrefixAtDecode, &at_decode)
}

#[test]
fn a_request_stays_where_its_prefix_is() {
    let mut kept = kept();
    let mut explained = |prefix, at_decode| kept.explain(0.0, question(prefix, at_decode).words());
    let (none, all) = ([0, 0, 0], [0.0; 6]);
    for (prefix, at_decode, expected) in [
        (none, none, all),
        ([10, 3, 0], none, [0.0, OUT, OUT, 0.0, OUT, OUT]),
        ([10, 8, 0], none, [0.0, 0.0, OUT, 0.0, 0.0, OUT]),
        // The queue there is too long.
        ([0, 3, 10], none, all),
        ([10, 3, 0], [0, 0, 4], [0.0, OUT, OUT, OUT, OUT, 0.0]),
        (none, [5, 4, 3], [0.0, 0.0, 0.0, 0.0, 0.0, OUT]),
    ] {
        assert_eq!(explained(prefix, at_decode), expected, "{prefix:?} {at_decode:?}");
    }
    let mut schedule = |prefix| kept.schedule(0.0, question(prefix, none).words());
    assert_eq!(schedule([10, 3, 0]), Decision::run(0, 0), "although others have fewer sequences");
    assert_eq!(schedule(none), Decision::run(0, 2));
}

#[test]
fn who_cannot_serve_it_does_not_stay() {
    let mut kept = kept();
    let request = Request { prompt_tokens: 160, ..Request::default() };
    let held = Question::new(0.0, &request, 3, 3).with(Column::Prefix, &[10, 3, 0]);
    let elsewhere = held.with(Column::EligiblePrefill, &[0, 1, 1]);
    assert_eq!(kept.explain(0.0, elsewhere.words()), [OUT, 0.0, OUT, OUT, 0.0, OUT]);
    let full = DecodeRow { slot: 0, available: true, free_blocks: 9, host: Some(0), ..DecodeRow::default() };
    kept.update_decode(&full.encode());
    let held = question([10, 3, 0], [0, 0, 0]);
    assert_eq!(kept.explain(0.0, held.words()), [0.0, OUT, OUT, OUT, 0.0, 0.0]);
}

proptest! {
    #[test]
    fn no_input_panics_and_what_is_chosen_is_there(asked in asked()) {
        chooses_what_is_there(Affinity::default(), &asked);
    }
}
