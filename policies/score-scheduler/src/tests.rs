use super::*;
use kvasir_policy::scheduler::{Column, DecodeRow, Kept, Layout, PrefillRow, Question};
use kvasir_policy_testing::{asked, chooses_what_is_there};
use proptest::prelude::*;

/// Three instances that do both and then one of each kind, with so many sequences; identities from 10.
fn cluster(sequences: [u32; 4]) -> Kept<Score> {
    let mut kept = Kept::new(Box::<Score>::default());
    kept.open(&Layout::of(4, 4, 16).encode());
    for (slot, sequences) in sequences.into_iter().enumerate() {
        let peer = (slot < 3).then_some(slot as u16);
        let (slot, available, identity) = (slot as u16, true, slot as u32 + 10);
        let prefill = PrefillRow { slot, available, identity, peer, ..PrefillRow::default() };
        let free_blocks = 100;
        let decode =
            DecodeRow { slot, available, identity, peer, sequences, free_blocks, ..DecodeRow::default() };
        kept.update_prefill(&prefill.encode());
        kept.update_decode(&decode.encode());
    }
    kept
}

fn question(request: &Request) -> Question {
    Question::new(0.0, request, 4, 4)
}

fn placed(kept: &mut Kept<Score>, question: &Question) -> (u32, u32, u64) {
    match kept.schedule(0.0, question.words()) {
        Decision::Run(Placement { prefill, decode, session_memo, .. }) => (prefill, decode, session_memo),
        rejected => panic!("{rejected:?}"),
    }
}

#[test]
fn a_prompt_that_is_nearly_there_stays_with_its_decode_instance() {
    let mut kept = cluster([4, 3, 4, 3]);
    let long = Request { prompt_tokens: 640, ..Request::default() };
    let (prefix, decoded) = ([0, 0, 30, 40], [0, 0, 30, 0]);
    let asked = question(&long).with(Column::Prefix, &prefix).with(Column::PrefixAtDecode, &decoded);
    assert_eq!(placed(&mut kept, &asked), (2, 2, 12 << 32 | 12), "160 tokens are missing");
    let asked = question(&long).with(Column::Prefix, &prefix).with(Column::PrefixAtDecode, &[0, 0, 20, 0]);
    assert_eq!(placed(&mut kept, &asked).0, 3, "all of it is missing where it will decode");
    let cannot = Column::EligiblePrefill;
    let asked = question(&Request { prompt_tokens: 160, ..long }).with(cannot, &[1, 0, 1, 1]);
    assert_eq!(placed(&mut kept, &asked), (0, 1, 10 << 32 | 11), "its prefill half serves another model");
}

#[test]
fn a_session_goes_back_to_its_instance_and_not_to_its_successor() {
    let mut kept = cluster([0; 4]);
    let session = Request { prompt_tokens: 64, session: 5, ..Request::default() };
    let first = placed(&mut kept, &question(&session));
    assert_eq!((first.0, first.1), (0, 0));
    let elsewhere = Request { session_memo: 12 << 32 | 12, ..session };
    let second = placed(&mut kept, &question(&elsewhere));
    assert_eq!((second.0, second.1), (2, 2), "where the memo says");
    let restarted = DecodeRow {
        slot: 2,
        available: true,
        identity: 99,
        free_blocks: 100,
        peer: Some(2),
        ..DecodeRow::default()
    };
    kept.update_decode(&restarted.encode());
    assert_eq!(placed(&mut kept, &question(&elsewhere)).1, 0, "another instance has the slot");
}

#[test]
fn adapters_draw_and_load_drives_away() {
    let mut kept = cluster([0; 4]);
    let request = Request { prompt_tokens: 64, adapter: 1, ..Request::default() };
    let loaded = question(&request).with(Column::EligiblePrefill, &[1, 2, 1, 1]);
    let loaded = loaded.with(Column::EligibleDecode, &[1, 2, 1, 1]);
    assert_eq!(placed(&mut kept, &loaded).1, 1);
    let busy = DecodeRow {
        slot: 1,
        available: true,
        sequences: 9,
        free_blocks: 100,
        peer: Some(1),
        ..DecodeRow::default()
    };
    kept.update_decode(&busy.encode());
    assert_eq!(placed(&mut kept, &loaded).1, 0);
    let full = question(&Request { prompt_tokens: 16 * 101, ..request });
    assert_eq!(kept.schedule(0.0, full.words()), Decision::reject(Reason::NoMemory, 1_000));
    let none = question(&request).with(Column::EligibleDecode, &[0; 4]);
    assert_eq!(kept.schedule(0.0, none.words()), Decision::reject(Reason::NoInstance, 1_000));
}

proptest! {
    #[test]
    fn no_input_panics_and_what_is_chosen_is_there(asked in asked()) {
        chooses_what_is_there(Score::default(), &asked);
    }
}
