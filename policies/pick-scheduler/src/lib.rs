//! The end of a chain: takes the instances of which the chain's scorers said the least, or, with a temperature, draws
//! among them (softmax, as Dynamo's router draws). Alone, without scorers before it, it takes the least loaded.
//!
//! With `choices` it looks at so many only, drawn at random: with two at the power of two choices (Mitzenmacher, TPDS 2001), which does not
//! send everything to one where several hosts decide by what is known a little late.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::draw::split_mix;
use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Reason, Request};
use kvasir_policy::{Description, Scheduler, Settings};

/// See the module documentation.
#[derive(Default)]
pub struct Pick {
    /// In units of the score; 0 = always the best.
    temperature: f32,
    /// 0 = all.
    choices: u32,
}

/// One slot that can be chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    slot: usize,
    score: f32,
    /// Decides between equal scores.
    load: f32,
}

impl Scheduler for Pick {
    fn describe(&self) -> Description {
        let Self { temperature, choices } = Self::default();
        Description::scheduler("pick", env!("CARGO_PKG_VERSION"))
            .setting(
                "temperature",
                temperature,
                "0 takes the best score; above, others are drawn, the likelier the nearer they are to it",
            )
            .setting("choices", choices, "0 looks at all; else the best of so many that are drawn at random")
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        let temperature = settings.number("temperature", 0.0..=1_000.0)? as f32;
        let choices = settings.number("choices", 0.0..=64.0)? as u32;
        if temperature > 0.0 && choices > 0 {
            return Err("choices: leave it at 0, or the temperature".to_owned());
        }
        *self = Self { temperature, choices };
        Ok(())
    }

    fn schedule(&mut self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Decision {
        let (prefill, decode) = (&cluster.prefill, &cluster.decode);
        let prefill = (0..prefill.len())
            .filter(|&slot| prefill.available[slot] == 1.0 && candidates.can_prefill(slot))
            .map(|slot| Candidate { slot, score: candidates.score_of(slot), load: prefill.busy_until[slot] });
        let decode = (0..decode.len())
            .filter(|&slot| decode.available[slot] == 1.0 && candidates.can_decode(slot))
            .map(|slot| Candidate {
                slot,
                score: candidates.score_of_decode(slot),
                load: decode.sequences[slot],
            });
        // Two draws of one seed: its halves.
        let (low, high) = (request.seed as u32, (request.seed >> 32) as u32);
        match (self.pick(prefill, low), self.pick(decode, high)) {
            (Some(prefill), Some(decode)) => Decision::run(prefill, decode),
            _ => Decision::reject(Reason::NoInstance, 1_000),
        }
    }
}

impl Pick {
    fn pick(&self, candidates: impl Iterator<Item = Candidate> + Clone, seed: u32) -> Option<u32> {
        let considered = candidates.filter(|candidate| candidate.score.is_finite());
        if self.choices > 0 {
            let count = considered.clone().count() as u64;
            let drawn = (0..self.choices).filter_map(|draw| {
                let random = split_mix(u64::from(draw) << 32 | u64::from(seed)) >> 32;
                considered.clone().nth(((random * count) >> 32) as usize)
            });
            return best(drawn).map(|candidate| candidate.slot as u32);
        }
        let best = best(considered.clone())?;
        if self.temperature == 0.0 {
            return Some(best.slot as u32);
        }
        // Relative to the best, so that no weight overflows and at least one is 1.
        let weight = |candidate: Candidate| ((best.score - candidate.score) / self.temperature).exp();
        let sum: f32 = considered.clone().map(weight).sum();
        let mut left = seed as f32 / (u32::MAX as f32) * sum;
        let drawn = considered.clone().find(|&candidate| {
            left -= weight(candidate);
            left <= 0.0
        });
        Some(drawn.unwrap_or(best).slot as u32)
    }
}

fn best(candidates: impl Iterator<Item = Candidate>) -> Option<Candidate> {
    candidates.min_by(|a, b| a.score.total_cmp(&b.score).then(a.load.total_cmp(&b.load)))
}

kvasir_policy::export_scheduler!(Pick);

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_policy::scheduler::{Column, DecodeRow, Kept, Layout, PrefillRow, Question};

    fn kept(temperature: &str) -> Kept<Pick> {
        kept_with("temperature", temperature)
    }

    fn kept_with(setting: &str, value: &str) -> Kept<Pick> {
        let mut pick = Pick::default();
        let given = [(setting.to_owned(), value.to_owned())];
        pick.configure(&Settings::new(&pick.describe(), &given).unwrap()).unwrap();
        let mut kept = Kept::new(Box::new(pick));
        kept.open(&Layout::of(3, 2, 16).encode());
        for (slot, busy_until) in [(0, 30.0), (1, 20.0), (2, 10.0)] {
            kept.update_prefill(
                &PrefillRow { slot, available: true, busy_until, ..PrefillRow::default() }.encode(),
            );
        }
        for slot in 0..2 {
            kept.update_decode(&DecodeRow { slot, available: true, ..DecodeRow::default() }.encode());
        }
        kept
    }

    fn question(seed: u64, prefill: [f32; 3], decode: [f32; 2]) -> Question {
        Question::new(0.0, &Request { seed, ..Request::default() }, 3, 2)
            .with(Column::ScorePrefill, &prefill.map(f32::to_bits))
            .with(Column::ScoreDecode, &decode.map(f32::to_bits))
    }

    fn schedule(kept: &mut Kept<Pick>, question: &Question) -> Decision {
        kept.schedule(question.now(), question.words())
    }

    #[test]
    fn takes_the_least_score_and_then_the_least_busy() {
        let mut kept = kept("0");
        assert_eq!(schedule(&mut kept, &question(1, [2.0, 0.5, 1.0], [1.0, 0.0])), Decision::run(1, 1));
        assert_eq!(schedule(&mut kept, &question(1, [0.5, 0.5, 1.0], [0.0, 0.0])), Decision::run(1, 0));
        let without = Question::new(0.0, &Request::default(), 3, 2);
        assert_eq!(schedule(&mut kept, &without), Decision::run(2, 0));
    }

    #[test]
    fn what_nobody_considers_is_not_taken() {
        let mut kept = kept("0");
        let infinite = f32::INFINITY;
        let one = question(1, [infinite, 9.0, infinite], [1.0, 1.0]);
        assert_eq!(schedule(&mut kept, &one), Decision::run(1, 0));
        let none = question(1, [infinite; 3], [1.0, 1.0]);
        assert_eq!(schedule(&mut kept, &none), Decision::reject(Reason::NoInstance, 1_000));
        let filtered = Question::new(0.0, &Request::default(), 3, 2)
            .with(Column::EligiblePrefill, &[1, 0, 0])
            .with(Column::ScorePrefill, &[2.0, 1.0, 0.0].map(f32::to_bits));
        assert_eq!(schedule(&mut kept, &filtered), Decision::run(0, 0));
    }

    #[test]
    fn draws_by_the_distance_from_the_best() {
        let mut kept = kept("1");
        let draws = 10_000u64;
        let mut taken = [0u32; 3];
        for i in 0..draws {
            let seed = i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7;
            let Decision::Run(placement) =
                schedule(&mut kept, &question(seed, [0.0, 1.0, f32::INFINITY], [0.0, 0.0]))
            else {
                panic!("two could serve it")
            };
            taken[placement.prefill as usize] += 1;
        }
        // e^0 to e^-1: 73 to 27 in a hundred.
        assert!((7_000..7_600).contains(&taken[0]) && taken[2] == 0, "{taken:?}");
    }

    #[test]
    fn of_two_that_are_drawn_the_better_is_taken() {
        let mut kept = kept_with("choices", "2");
        let mut taken = [0u32; 3];
        for i in 0..9_000u64 {
            let seed = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let Decision::Run(placement) = schedule(&mut kept, &question(seed, [2.0, 1.0, 0.0], [0.0, 0.0]))
            else {
                panic!("all could serve it")
            };
            taken[placement.prefill as usize] += 1;
        }
        // Of nine pairs one is twice the worst, three have the second at best, five the best.
        for (taken, ninths) in taken.into_iter().zip([1u32, 3, 5]) {
            assert!(taken.abs_diff(ninths * 1_000) < 150, "{taken} for {ninths} ninths");
        }
        let both =
            [("choices", "2"), ("temperature", "1")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        let mut pick = Pick::default();
        let settings = Settings::new(&pick.describe(), &both).unwrap();
        assert!(pick.configure(&settings).unwrap_err().contains("choices"));
        let infinite = f32::INFINITY;
        let none = question(1, [infinite; 3], [1.0, 1.0]);
        assert_eq!(schedule(&mut kept, &none), Decision::reject(Reason::NoInstance, 1_000));
    }
}
