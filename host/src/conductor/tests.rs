//! Instances that die, come back, miss messages or say goodbye late.

use super::blocks::Found;
use super::state::State;
use super::{Error, Registration, Report};
use crate::config;
use crate::fleet::{self, DecodeCost, DecodeSpec, PrefillCost, PrefillSpec, TransferCost};
use crate::policy::Outcomes;
use crate::prefix_index::Tier;
use kvasir_policy::scheduler::{Column, Question};

fn registration() -> Registration {
    let prefill = PrefillSpec {
        cost: PrefillCost { fixed_ms: 10.0, ms_per_token: 1.0, ms_per_pair: 0.0 },
        transfer: TransferCost { fixed_ms: 2.0, ms_per_block: 1.0 },
        capacity_blocks: 100,
    };
    let cost = DecodeCost { fixed_ms: 20.0, ms_per_sequence: 1.0, ms_per_context_token: 0.0 };
    let decode = DecodeSpec { cost, handover: prefill.transfer, capacity_blocks: 100 };
    Registration { prefill: Some(prefill), decode: Some(decode), ..Registration::default() }
}

fn free(free_blocks: u32) -> Report {
    Report { free_blocks, ..Report::default() }
}

fn state(instances_max: u32) -> State {
    let config = config::Conductor { instances_max, ..config::Conductor::default() };
    State::new(&config, Outcomes::default(), 0, 0)
}

/// As [`super::Conductor::stored`].
fn stored(
    state: &mut State,
    name: &str,
    epoch: u64,
    sequence: u64,
    tier: Option<Tier>,
    parent: Option<u64>,
    blocks: &[u64],
) -> Result<(), Error> {
    let holder = state.next_message(name, epoch, sequence)?;
    state.blocks.store(holder, tier, parent, blocks);
    Ok(())
}

fn removed(
    state: &mut State,
    name: &str,
    epoch: u64,
    sequence: u64,
    tier: Option<Tier>,
    blocks: &[u64],
) -> Result<(), Error> {
    let holder = state.next_message(name, epoch, sequence)?;
    state.blocks.remove(holder, tier, blocks);
    Ok(())
}

fn found(state: &State, chain: &[u64]) -> Found {
    let mut found = Found::default();
    state.blocks.look(chain, &mut found);
    found
}

fn lookup(state: &State, chain: &[u64]) -> Vec<(String, u32)> {
    state.by_name(&found(state, chain))
}

const TTL_MS: u64 = 10_000;

#[test]
fn an_instance_that_stays_silent_is_forgotten_with_its_blocks() {
    let mut state = state(2);
    for n in 0..10 {
        let now_ms = n * 40 * TTL_MS;
        let name = format!("pod-{n}");
        let epoch = state.register(&name, registration(), now_ms).expect("room, for the dead make it");
        stored(&mut state, &name, epoch, 1, None, None, &[n + 1, 100]).unwrap();
        state.tick(now_ms + 20 * TTL_MS);
        assert_eq!(lookup(&state, &[n + 1]).len(), 1, "silent, not forgotten yet");
        state.tick(now_ms + 31 * TTL_MS);
        assert_eq!((state.counts().prefill, state.counts().decode), (0, 0));
        assert!(lookup(&state, &[n + 1]).is_empty());
    }
    while state.blocks.sweep() {}
    assert_eq!((state.counts().forgotten, state.blocks.stats().entries), (10, 0));
}

#[test]
fn many_dead_at_once_are_forgotten_in_one_tick() {
    let mut state = state(64);
    for n in 0..20 {
        let name = format!("pod-{n}");
        let epoch = state.register(&name, registration(), 0).unwrap();
        stored(&mut state, &name, epoch, 1, None, None, &[1, 2]).unwrap();
    }
    assert_eq!(lookup(&state, &[1, 2]).len(), 20);
    state.tick(31 * TTL_MS);
    assert_eq!((state.counts().prefill, lookup(&state, &[1, 2]).len()), (0, 0));
    while state.blocks.sweep() {}
    assert_eq!(state.blocks.stats().covers, 0);
}

#[test]
fn after_a_gap_the_blocks_are_told_anew_and_the_load_stays() {
    let mut state = state(8);
    let epoch = state.register("a", registration(), 0).unwrap();
    state.report("a", epoch, &free(7), 5).unwrap();
    stored(&mut state, "a", epoch, 1, None, None, &[1, 2]).unwrap();
    for sequence in [3, 4, 2] {
        let gap = stored(&mut state, "a", epoch, sequence, None, None, &[3]).unwrap_err();
        assert!(matches!(gap, Error::Gap { expected: 2, .. }), "{gap}");
        assert!(
            lookup(&state, &[1]).is_empty(),
            "message {sequence}: also what came in order does not count now"
        );
    }
    state.reset_blocks("a", epoch).unwrap();
    stored(&mut state, "a", epoch, 1, None, None, &[1, 2]).unwrap();
    assert_eq!(lookup(&state, &[1, 2]), [("a".to_owned(), 2)]);
    assert_eq!(state.fleet.rows().0[0].free_blocks, 7);
    state.reset_blocks("a", epoch).unwrap();
    assert!(lookup(&state, &[1]).is_empty(), "a reset without a gap forgets too");
    assert!(matches!(state.reset_blocks("a", epoch + 1), Err(Error::Epoch { .. })));
}

#[test]
fn what_decode_instances_hold_is_a_column_of_its_own() {
    let mut state = state(8);
    let only_decode = Registration { prefill: None, ..registration() };
    let both = state.register("both", registration(), 0).unwrap();
    let d = state.register("d", only_decode, 0).unwrap();
    let at_decode = |state: &mut State, chain: &[u64]| {
        let mut question = Question::default();
        state.question(&fleet::Ask::default(), &found(state, chain), 0, 0, &mut question);
        let candidates = question.candidates();
        (candidates.prefix().map(<[u32]>::to_vec), candidates.prefix_at_decode().map(<[u32]>::to_vec))
    };
    assert_eq!(at_decode(&mut state, &[1, 2, 3]), (None, None));
    stored(&mut state, "d", d, 1, None, None, &[1]).unwrap();
    assert_eq!(at_decode(&mut state, &[1, 2, 3]), (None, Some(vec![0, 1])));
    stored(&mut state, "both", both, 1, None, None, &[1, 2, 3]).unwrap();
    assert_eq!(at_decode(&mut state, &[1, 2, 3]), (Some(vec![3]), Some(vec![3, 1])));
    assert_eq!(lookup(&state, &[1, 2]), [("both".to_owned(), 2), ("d".to_owned(), 1)]);
    assert!(stored(&mut state, "d", d, 3, None, None, &[2]).is_err(), "a gap");
    assert_eq!(at_decode(&mut state, &[1, 2, 3]).1, Some(vec![3, 0]));
    state.reset_blocks("d", d).unwrap();
    stored(&mut state, "d", d, 1, None, None, &[1, 2]).unwrap();
    removed(&mut state, "d", d, 2, None, &[2]).unwrap();
    assert_eq!(at_decode(&mut state, &[1, 2, 3]).1, Some(vec![3, 1]));
    state.unregister("d", d).unwrap();
    state.unregister("both", both).unwrap();
    while state.blocks.sweep() {}
    assert_eq!((at_decode(&mut state, &[1]), state.blocks.stats().entries), ((None, None), 0));
}

/// An instance that does both is told by tier on both sides, beside one that names none and one that only decodes.
#[test]
fn what_is_near_is_a_column_while_an_instance_names_tiers() {
    let mut state = state(8);
    let both = state.register("both", registration(), 0).unwrap();
    let silent = state.register("silent", registration(), 0).unwrap();
    let only_decode = Registration { prefill: None, ..registration() };
    let d = state.register("d", only_decode, 0).unwrap();
    let columns = |state: &mut State| {
        let mut question = Question::default();
        state.question(&fleet::Ask::default(), &found(state, &[1, 2, 3, 4]), 0, 0, &mut question);
        [Column::PrefixInHbm, Column::PrefixInDram, Column::PrefixAtDecodeInHbm, Column::PrefixAtDecodeInDram]
            .map(|column| question.candidates().column(column).map(<[u32]>::to_vec))
    };
    stored(&mut state, "silent", silent, 1, None, None, &[1, 2]).unwrap();
    assert_eq!(columns(&mut state), [const { None }; 4]);
    stored(&mut state, "d", d, 1, Some(Tier::Dram), None, &[1]).unwrap();
    let at_decode = |values: [u32; 3]| Some(values.to_vec());
    assert_eq!(columns(&mut state), [None, None, at_decode([0, 2, 0]), at_decode([0, 2, 1])]);
    stored(&mut state, "both", both, 1, Some(Tier::Hbm), None, &[1, 2]).unwrap();
    stored(&mut state, "both", both, 2, Some(Tier::Dram), Some(1), &[2, 3]).unwrap();
    stored(&mut state, "both", both, 3, Some(Tier::Remote), Some(3), &[4]).unwrap();
    let near = |hbm: [u32; 2], dram: [u32; 2]| [Some(hbm.to_vec()), Some(dram.to_vec())];
    let [hbm, dram] = near([2, 2], [3, 2]);
    assert_eq!(columns(&mut state), [hbm, dram, at_decode([2, 2, 0]), at_decode([3, 2, 1])]);
    removed(&mut state, "both", both, 4, Some(Tier::Hbm), &[2]).unwrap();
    let [hbm, dram] = near([1, 2], [3, 2]);
    assert_eq!(columns(&mut state), [hbm, dram, at_decode([1, 2, 0]), at_decode([3, 2, 1])]);
    assert!(stored(&mut state, "both", both, 9, None, None, &[9]).is_err(), "a gap");
    state.unregister("d", d).unwrap();
    assert_eq!(columns(&mut state), [const { None }; 4], "nobody is left who names tiers");
}

#[test]
fn a_long_message_is_one_chain_until_there_is_no_room() {
    let chain: Vec<u64> = (1..=3_000).collect();
    for room in [3_000, 2_000] {
        let config = config::Conductor { index_entries_max: room, ..config::Conductor::default() };
        let mut state = State::new(&config, Outcomes::default(), 0, 0);
        let epoch = state.register("a", registration(), 0).unwrap();
        stored(&mut state, "a", epoch, 1, None, None, &chain).unwrap();
        assert_eq!(lookup(&state, &chain), [("a".to_owned(), room as u32)]);
        assert_eq!(state.blocks.stats().runs, 1);
        removed(&mut state, "a", epoch, 2, None, &chain[1_000..]).unwrap();
        assert_eq!(lookup(&state, &chain), [("a".to_owned(), 1_000)]);
    }
}

#[test]
fn what_was_found_before_another_got_the_slot_is_looked_up_again() {
    let mut state = state(1);
    let epoch = state.register("a", registration(), 0).unwrap();
    stored(&mut state, "a", epoch, 1, None, None, &[1, 2, 3]).unwrap();
    let mut before = found(&state, &[1, 2, 3]);
    state.unregister("a", epoch).unwrap();
    let epoch = state.register("b", registration(), 1).unwrap();
    stored(&mut state, "b", epoch, 1, None, None, &[1]).unwrap();
    state.bring_up_to_date(&[1, 2, 3], &mut before);
    assert_eq!(state.by_name(&before), [("b".to_owned(), 1)]);
}

#[test]
fn rows_tell_the_adapters_that_are_loaded_and_that_fit() {
    let mut state = state(8);
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    let given = Registration { adapters: names(&["a", "b", "a"]), adapters_max: Some(4), ..registration() };
    let epoch = state.register("a", given, 0).unwrap();
    state.register("b", registration(), 0).unwrap();
    let adapters = |state: &State| {
        let (prefill, decode) = state.fleet.rows();
        let prefill: Vec<_> = prefill.iter().map(|row| (row.adapters, row.adapters_max)).collect();
        assert_eq!(prefill, decode.iter().map(|row| (row.adapters, row.adapters_max)).collect::<Vec<_>>());
        prefill
    };
    assert_eq!(adapters(&state), [(Some(2), Some(4)), (Some(0), None)]);
    let report = Report { adapters: Some(names(&["c"])), ..free(1) };
    state.report("a", epoch, &report, 1).unwrap();
    assert_eq!(adapters(&state), [(Some(1), Some(4)), (Some(0), None)]);
}

#[test]
fn a_late_farewell_does_not_remove_the_successor() {
    let mut state = state(8);
    let old = state.register("a", registration(), 0).unwrap();
    let new = state.register("a", registration(), 1).unwrap();
    assert!(matches!(state.unregister("a", old), Err(Error::Epoch { .. })));
    assert_eq!(state.counts().prefill, 1);
    state.unregister("a", new).unwrap();
    assert_eq!(state.counts().prefill, 0);
}

#[test]
fn machines_and_domains_get_numbers_and_links_lie_between_them() {
    let link =
        config::Link { from: "east".into(), to: "west".into(), fixed_ms: 9.0, factor: 1.0, parallel: 0 };
    let config = config::Conductor { links: vec![link], ..config::Conductor::default() };
    let mut state = State::new(&config, Outcomes::default(), 0, 0);
    let at = |host: &str, domain: &str| Registration {
        host: host.into(),
        domain: domain.into(),
        ..registration()
    };
    for (name, site) in
        [("a", at("h1", "west")), ("b", at("h2", "north")), ("c", at("h1", "")), ("d", at("", "west"))]
    {
        state.register(name, site, 0).unwrap();
    }
    let rows = state.fleet.rows().0;
    let sites: Vec<_> = rows.iter().map(|row| (row.host, row.domain)).collect();
    assert_eq!(sites, [(Some(1), 2), (Some(2), 3), (Some(1), 0), (None, 2)]);
    for n in 0.. {
        match state.register("e", at("", &format!("domain-{n}")), 1) {
            Ok(_) => assert!(n < fleet::DOMAINS_MAX),
            Err(full) => {
                assert!(matches!(full, Error::TooManyNames { what: "domain", .. }), "{full}");
                break;
            }
        }
    }
    assert_eq!(state.counts().prefill, 5, "the one that was refused stays as it was");
}

#[test]
fn a_refused_registration_changes_nothing() {
    let mut state = state(1);
    let epoch = state.register("a", registration(), 0).unwrap();
    stored(&mut state, "a", epoch, 1, None, None, &[1]).unwrap();
    let mut bad = registration();
    bad.decode.as_mut().unwrap().cost.fixed_ms = f32::NAN;
    let refused = state.register("a", bad, 1);
    assert!(matches!(refused, Err(Error::Fleet(fleet::Error::Cost { table: "decode" }))));
    assert!(matches!(
        state.register("b", registration(), 1),
        Err(Error::Fleet(fleet::Error::TableFull { .. }))
    ));
    assert_eq!(lookup(&state, &[1]).len(), 1);
    state.report("a", epoch, &free(1), 2).unwrap();
    state.register("a", registration(), 3).expect("its own place is free for it");
}
