use super::*;
use kvasir_policy::scheduler::{Column, DecodeRow, Kept, Layout, PREFILL_ROW, PrefillRow, Question};
use kvasir_policy_testing::{asked, chooses_what_is_there};
use proptest::prelude::*;

fn prefill(slot: u16, peer: Option<u16>, busy_until: f32) -> [f32; PREFILL_ROW] {
    PrefillRow { slot, available: true, busy_until, cost_per_token: 1.0, peer, ..PrefillRow::default() }
        .encode()
}

/// Prefill slot 0 does nothing else; 1 and 2 are the decode slots 0 and 1.
fn cluster(queues: [f32; 3]) -> Kept<LocalOrRemote> {
    let mut kept = Kept::new(Box::<LocalOrRemote>::default());
    kept.open(&Layout::of(3, 2, 16).encode());
    let peers = [None, Some(0), Some(1)];
    for (slot, (peer, queue)) in (0..).zip(peers.into_iter().zip(queues)) {
        kept.update_prefill(&prefill(slot, peer, queue));
    }
    for (slot, sequences) in [(0, 5), (1, 9)] {
        let decode = DecodeRow {
            slot,
            available: true,
            free_blocks: 1_000,
            step_per_sequence: 1.0,
            handover_per_block: 0.1,
            sequences,
            peer: Some(slot + 1),
            ..DecodeRow::default()
        };
        kept.update_decode(&decode.encode());
    }
    kept
}

/// A prompt of 1,600 tokens, of which so many blocks are stored in each slot.
fn ask(kept: &mut Kept<LocalOrRemote>, stored: [u32; 3]) -> Decision {
    let request = Request { prompt_tokens: 1_600, ..Request::default() };
    let question = Question::new(0.0, &request, 3, 2)
        .with(Column::Prefix, &stored)
        .with(Column::PrefixAtDecode, &stored[1..]);
    let decision = kept.schedule(0.0, question.words());
    if let Decision::Run(placement) = decision {
        let scores = kept.explain(0.0, question.words());
        assert_eq!(kvasir_policy::columns::argmin(&scores), Some(placement.prefill as usize));
    }
    decision
}

#[test]
fn what_is_short_stays_and_what_is_long_goes() {
    let mut kept = cluster([0.0; 3]);
    assert_eq!(ask(&mut kept, [0; 3]), Decision::run(0, 0), "1,600 tokens to compute");
    assert_eq!(ask(&mut kept, [0, 67, 0]), Decision::run(0, 0), "528");
    assert_eq!(ask(&mut kept, [0, 68, 0]), Decision::run(1, 0), "512");
    assert_eq!(ask(&mut kept, [0, 0, 100]), Decision::run(2, 1), "all of it is at the other one");
    assert_eq!(ask(&mut kept, [100, 0, 0]), Decision::run(0, 0));
}

#[test]
fn long_queues_elsewhere_keep_it_where_it_is() {
    assert_eq!(ask(&mut cluster([1_900.0, 0.0, 0.0]), [0; 3]), Decision::run(0, 0));
    assert_eq!(ask(&mut cluster([2_100.0, 0.0, 0.0]), [0; 3]), Decision::run(1, 0));
    assert_eq!(ask(&mut cluster([2_100.0, 2_200.0, 0.0]), [0; 3]), Decision::run(0, 0), "its own is longer");
}

#[test]
fn without_instances_for_prefill_alone_others_help_and_decode_alone_is_served() {
    let mut kept = cluster([0.0, 3_000.0, 0.0]);
    kept.update_prefill(&PrefillRow { slot: 0, ..PrefillRow::default() }.encode());
    assert_eq!(ask(&mut kept, [0; 3]), Decision::run(2, 0));
    kept.update_prefill(&PrefillRow { slot: 2, ..PrefillRow::default() }.encode());
    assert_eq!(ask(&mut kept, [0; 3]), Decision::run(1, 0), "nobody else is there");
    kept.update_prefill(&PrefillRow { slot: 1, ..PrefillRow::default() }.encode());
    assert_eq!(ask(&mut kept, [0; 3]), Decision::reject(Reason::NoInstance, 1_000));
}

proptest! {
    #[test]
    fn no_input_panics_and_what_is_chosen_is_there(asked in asked()) {
        chooses_what_is_there(LocalOrRemote::default(), &asked);
    }
}
