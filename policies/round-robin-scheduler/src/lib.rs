//! Takes prefill and decode instances in turn, skipping those that are unavailable or serve another model.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Reason, Request};
use kvasir_policy::{Description, Scheduler};

/// Next slot of each table.
#[derive(Default)]
pub struct RoundRobin {
    prefill: usize,
    decode: usize,
}

impl Scheduler for RoundRobin {
    fn describe(&self) -> Description {
        Description::scheduler("round-robin", env!("CARGO_PKG_VERSION"))
    }

    fn schedule(&mut self, cluster: &Cluster, _: &Request, candidates: Candidates<'_>) -> Decision {
        let (prefill, decode) = (&cluster.prefill.available, &cluster.decode.available);
        let prefill = next(&mut self.prefill, prefill, |slot| candidates.can_prefill(slot));
        let decode = next(&mut self.decode, decode, |slot| candidates.can_decode(slot));
        match (prefill, decode) {
            (Some(prefill), Some(decode)) => Decision::run(prefill, decode),
            _ => Decision::reject(Reason::NoInstance, 1_000),
        }
    }
}

/// First available slot at or after the cursor that can serve the request; the cursor moves behind it.
fn next(cursor: &mut usize, available: &[f32], can_serve: impl Fn(usize) -> bool) -> Option<u32> {
    let slots = available.len();
    let mut from_cursor = (0..slots).map(|i| (*cursor + i) % slots);
    let slot = from_cursor.find(|&slot| available[slot] == 1.0 && can_serve(slot))?;
    *cursor = slot + 1;
    Some(slot as u32)
}

kvasir_policy::export_scheduler!(RoundRobin);

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_policy::scheduler::{Column, DecodeRow, Kept, Layout, PrefillRow, Question};
    use proptest::prelude::*;

    fn update(kept: &mut Kept<RoundRobin>, prefill: &[bool], decode: &[bool]) {
        for (slot, &available) in prefill.iter().enumerate() {
            let row = PrefillRow { slot: slot as u16, available, ..PrefillRow::default() };
            kept.update_prefill(&row.encode());
        }
        for (slot, &available) in decode.iter().enumerate() {
            let row = DecodeRow { slot: slot as u16, available, ..DecodeRow::default() };
            kept.update_decode(&row.encode());
        }
    }

    proptest! {
        /// Each available slot comes once per turn, in order; the others never.
        #[test]
        fn takes_the_available_in_turn(
            prefill in prop::collection::vec(any::<bool>(), 0..10),
            decode in prop::collection::vec(any::<bool>(), 0..10),
        ) {
            let slots = |available: &[bool]| -> Vec<u32> {
                (0..available.len()).filter(|&slot| available[slot]).map(|slot| slot as u32).collect()
            };
            let (p, d) = (slots(&prefill), slots(&decode));
            let mut kept = Kept::new(Box::<RoundRobin>::default());
            kept.open(&Layout::of(prefill.len() as u32, decode.len() as u32, 16).encode());
            update(&mut kept, &prefill, &decode);
            for turn in 0..25 {
                let expected = if p.is_empty() || d.is_empty() {
                    Decision::reject(Reason::NoInstance, 1_000)
                } else {
                    Decision::run(p[turn % p.len()], d[turn % d.len()])
                };
                prop_assert_eq!(kept.schedule(f32::NAN, &[]), expected);
            }
        }
    }

    #[test]
    fn skips_those_that_serve_another_model() {
        let mut kept = Kept::new(Box::<RoundRobin>::default());
        kept.open(&Layout::of(3, 2, 16).encode());
        update(&mut kept, &[true; 3], &[true; 2]);
        let question = Question::new(0.0, &Request::default(), 3, 2)
            .with(Column::EligiblePrefill, &[1, 0, 2])
            .with(Column::EligibleDecode, &[0, 1]);
        let mut turn = || kept.schedule(0.0, question.words());
        let turns = [turn(), turn(), turn()];
        assert_eq!(turns, [Decision::run(0, 1), Decision::run(2, 1), Decision::run(0, 1)]);
        let none = Question::new(0.0, &Request::default(), 3, 2).with(Column::EligibleDecode, &[0, 0]);
        assert_eq!(kept.schedule(0.0, none.words()), Decision::reject(Reason::NoInstance, 1_000));
    }

    #[test]
    fn goes_on_when_instances_leave_and_the_table_shrinks() {
        let mut kept = Kept::new(Box::<RoundRobin>::default());
        kept.open(&Layout::of(3, 1, 16).encode());
        update(&mut kept, &[true; 3], &[true]);
        let next = |kept: &mut Kept<RoundRobin>| kept.schedule(0.0, &[]);
        assert_eq!([next(&mut kept), next(&mut kept)], [Decision::run(0, 0), Decision::run(1, 0)]);
        update(&mut kept, &[true, true, false], &[]);
        assert_eq!(next(&mut kept), Decision::run(0, 0));
        kept.open(&Layout::of(1, 1, 16).encode());
        update(&mut kept, &[true], &[true]);
        assert_eq!(next(&mut kept), Decision::run(0, 0));
    }
}
