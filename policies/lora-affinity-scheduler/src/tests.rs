use super::*;
use kvasir_policy::scheduler::{Column, DecodeRow, Kept, Layout, PrefillRow, Question, eligibility};
use kvasir_policy_testing::{asked, chooses_what_is_there};
use proptest::prelude::*;

const INSTANCES: usize = 4;

/// Instances that do both, with queues of so many ms.
struct Fleet {
    kept: Kept<LoraAffinity>,
    queues: [f32; INSTANCES],
    /// Adapters loaded by each.
    loaded: [Vec<u32>; INSTANCES],
    adapters_max: [Option<u32>; INSTANCES],
}

impl Fleet {
    fn new() -> Self {
        let mut kept = Kept::new(Box::<LoraAffinity>::default());
        kept.open(&Layout::of(INSTANCES as u32, INSTANCES as u32, 16).encode());
        let mut fleet = Self {
            kept,
            queues: [0.0; INSTANCES],
            loaded: Default::default(),
            adapters_max: Default::default(),
        };
        (0..INSTANCES).for_each(|slot| fleet.push(slot));
        fleet
    }

    fn push(&mut self, slot: usize) {
        let (busy_until, peer, identity) = (self.queues[slot], Some(slot as u16), slot as u32 + 11);
        let (adapters, adapters_max) = (Some(self.loaded[slot].len() as u32), self.adapters_max[slot]);
        let slot = slot as u16;
        let prefill = PrefillRow {
            slot,
            available: true,
            busy_until,
            cost_per_token: 0.1,
            peer,
            identity,
            adapters,
            adapters_max,
            ..PrefillRow::default()
        };
        let decode = DecodeRow {
            slot,
            available: true,
            free_blocks: 1_000,
            peer,
            identity,
            adapters,
            adapters_max,
            ..DecodeRow::default()
        };
        self.kept.update_prefill(&prefill.encode());
        self.kept.update_decode(&decode.encode());
    }

    /// Where a request of 100 ms for this adapter goes. It waits there, and the adapter is loaded.
    fn ask(&mut self, adapter: u32) -> usize {
        let fit = |slot: usize| {
            if self.loaded[slot].contains(&adapter) { eligibility::HAS_ADAPTER } else { eligibility::CAN }
        };
        let fits = [0, 1, 2, 3].map(fit);
        let request = Request { prompt_tokens: 1_000, adapter, ..Request::default() };
        let question = Question::new(0.0, &request, INSTANCES, INSTANCES)
            .with(Column::EligiblePrefill, &fits)
            .with(Column::EligibleDecode, &fits);
        let Decision::Run(placement) = self.kept.schedule(0.0, question.words()) else {
            panic!("there is room")
        };
        assert_eq!(placement.prefill, placement.decode, "it stays there");
        let slot = placement.prefill as usize;
        self.queues[slot] += 100.0;
        self.loaded[slot].push(adapter);
        self.push(slot);
        slot
    }
}

#[test]
fn an_adapter_stays_where_it_is_until_the_queue_is_longer_than_loading_it_elsewhere() {
    let mut fleet = Fleet::new();
    let places: Vec<usize> = (0..30).map(|_| fleet.ask(5)).collect();
    let home = places[0];
    let first_elsewhere = places.iter().position(|&place| place != home).unwrap();
    assert!((5..=7).contains(&first_elsewhere), "{places:?}");
    let used = |places: &[usize]| (0..INSTANCES).filter(|slot| places.contains(slot)).count();
    assert_eq!((used(&places[..9]), used(&places)), (2, INSTANCES), "{places:?}");
    fleet.queues = [0.0; INSTANCES];
    (0..INSTANCES).for_each(|slot| fleet.push(slot));
    let other = (0..INSTANCES).find(|&slot| slot != home).unwrap();
    fleet
        .loaded
        .iter_mut()
        .enumerate()
        .filter(|(slot, _)| *slot != other)
        .for_each(|(_, loaded)| loaded.clear());
    assert_eq!(fleet.ask(5), other, "where it is loaded, not where it was at first");
}

#[test]
fn adapters_spread_over_instances_and_requests_without_one_go_where_it_is_shortest() {
    let mut homes = [0; INSTANCES];
    for adapter in 1..200 {
        homes[Fleet::new().ask(adapter)] += 1;
    }
    assert!(homes.iter().all(|&count| count > 25), "{homes:?}");
    let mut fleet = Fleet::new();
    fleet.queues = [50.0, 40.0, 0.0, 60.0];
    (0..INSTANCES).for_each(|slot| fleet.push(slot));
    assert_eq!(fleet.ask(0), 2);
}

#[test]
fn an_instance_that_is_full_of_adapters_is_spared_while_others_have_room() {
    let mut fleet = Fleet::new();
    let home = fleet.ask(5);
    fleet.loaded = [vec![1], vec![2], vec![3], vec![4]];
    fleet.queues = [0.0; INSTANCES];
    fleet.adapters_max = [None; INSTANCES];
    fleet.adapters_max[home] = Some(1);
    (0..INSTANCES).for_each(|slot| fleet.push(slot));
    assert_ne!(fleet.ask(5), home, "another adapter would have to go");
    assert_eq!(fleet.ask(home as u32 + 1), home, "it is there already");
    for full in [Some(1), None] {
        fleet.loaded = [vec![1], vec![2], vec![3], vec![4]];
        fleet.queues = [0.0; INSTANCES];
        fleet.adapters_max = [full; INSTANCES];
        (0..INSTANCES).for_each(|slot| fleet.push(slot));
        assert_eq!(fleet.ask(5), home, "full everywhere, or not known: {full:?}");
    }
}

#[test]
fn decode_elsewhere_is_where_the_adapter_is_too() {
    let mut kept = Kept::new(Box::<LoraAffinity>::default());
    kept.open(&Layout::of(1, 2, 16).encode());
    kept.update_prefill(&PrefillRow { available: true, ..PrefillRow::default() }.encode());
    let decode = |slot, sequences| DecodeRow {
        slot,
        available: true,
        free_blocks: 1_000,
        step_per_sequence: 1.0,
        sequences,
        ..DecodeRow::default()
    };
    let request = Request { prompt_tokens: 100, adapter: 3, ..Request::default() };
    for (sequences, expected) in [(400, 1), (700, 0)] {
        kept.update_decode(&[decode(0, 0).encode(), decode(1, sequences).encode()].concat());
        let fits = [eligibility::CAN, eligibility::HAS_ADAPTER];
        let question = Question::new(0.0, &request, 1, 2).with(Column::EligibleDecode, &fits);
        assert_eq!(kept.schedule(0.0, question.words()), Decision::run(0, expected));
    }
}

proptest! {
    #[test]
    fn no_input_panics_and_what_is_chosen_is_there(asked in asked()) {
        chooses_what_is_there(LoraAffinity::default(), &asked);
    }
}
