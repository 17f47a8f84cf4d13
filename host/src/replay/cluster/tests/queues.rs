//! Waits in the simulated cluster beside what queueing theory says of them. Confidence comes from the means of twenty parts, which
//! are far longer than the queue's memory.

use super::*;
use crate::replay::generate::{exponential, tokens};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const REQUESTS: usize = 20_000;
const PARTS: usize = 20;
/// Two-sided 99.9 % of Student's t with 19 degrees of freedom.
const STUDENT: f64 = 3.883;

/// A mean, and how far the true one may lie from it.
#[derive(Debug)]
struct Estimate {
    mean: f64,
    within: f64,
}

impl Estimate {
    fn of(samples: &[f64]) -> Self {
        let means: Vec<f64> = samples
            .chunks(samples.len() / PARTS)
            .map(|part| part.iter().sum::<f64>() / part.len() as f64)
            .collect();
        let mean = means.iter().sum::<f64>() / means.len() as f64;
        let squares: f64 = means.iter().map(|part| (part - mean).powi(2)).sum();
        let deviation = (squares / (means.len() - 1) as f64).sqrt();
        Self { mean, within: STUDENT * deviation / (means.len() as f64).sqrt() }
    }

    fn agrees_with(&self, theory: f64) {
        assert!((self.mean - theory).abs() <= self.within, "{self:?} beside {theory}");
        assert!(self.within < 0.35 * theory, "{self:?} says little about {theory}");
    }
}

/// How long prompts wait to be computed, ms, if they come at random every `gap_ms` on average and a token takes 1 ms.
fn waits_ms(
    instances: u32,
    scheduler: &str,
    gap_ms: f64,
    mut length: impl FnMut(&mut ChaCha8Rng) -> u32,
) -> Estimate {
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let (mut time_ms, mut blocks) = (0.0, 0);
    let requests: Vec<Request> = (0..REQUESTS)
        .map(|_| {
            time_ms += exponential(&mut random, gap_ms);
            let input_tokens = length(&mut random);
            let first = blocks;
            blocks += u64::from(input_tokens.div_ceil(BLOCK_SIZE_TOKENS));
            let blocks = (first..blocks).collect();
            Request {
                time_us: (time_ms * 1e3) as u64,
                input_tokens,
                output_tokens: 1,
                blocks,
                ..Request::default()
            }
        })
        .collect();
    let prefill_cost = PrefillCost { fixed_ms: 0.0, ms_per_token: 1.0, ms_per_pair: 0.0 };
    let setup = Setup { prefill_cost, ..setup(instances, 2, 0) };
    let choices = Choices { scheduler: native(scheduler), ..Choices::default() };
    let (ttft_ms, tally, _) = run(&setup, &choices, &requests);
    assert_eq!(tally.finished, REQUESTS as u64);
    let waits =
        ttft_ms.iter().zip(&requests).map(|(ttft, request)| ttft.unwrap() - f64::from(request.input_tokens));
    Estimate::of(&waits.collect::<Vec<_>>())
}

/// Pollaczek and Khinchin, of one server.
fn theory_of_one(gap_ms: f64, mean: f64, mean_square: f64) -> f64 {
    mean_square / gap_ms / (2.0 * (1.0 - mean / gap_ms))
}

/// Erlang's C, of several servers with one queue and exponential service.
fn theory_of_several(servers: u32, gap_ms: f64, mean: f64) -> f64 {
    let load = mean / gap_ms;
    let (mut term, mut sum) = (1.0, 0.0);
    for n in 0..servers {
        sum += term;
        term *= load / f64::from(n + 1);
    }
    let all_busy = term / (1.0 - load / f64::from(servers));
    let waits = all_busy / (sum + all_busy);
    waits * mean / (f64::from(servers) - load)
}

/// 1,000.5 on average, as they are rounded up.
fn exponential_tokens(random: &mut ChaCha8Rng) -> u32 {
    tokens(random, 1_000.0, u32::MAX)
}

#[test]
fn one_instance_is_m_g_1() {
    let constant = waits_ms(1, "mooncake", 1_600.0, |_| 1_000);
    constant.agrees_with(theory_of_one(1_600.0, 1_000.0, 1e6));
    let either =
        waits_ms(1, "mooncake", 2_000.0, |random| if random.random::<f64>() < 0.8 { 500 } else { 3_000 });
    either.agrees_with(theory_of_one(2_000.0, 1_000.0, 0.8 * 500.0 * 500.0 + 0.2 * 3_000.0 * 3_000.0));
}

#[test]
fn several_instances_with_the_least_work_first_are_m_m_c() {
    // Who always joins the queue that ends first waits as in one queue for all.
    waits_ms(2, "mooncake", 900.0, exponential_tokens).agrees_with(theory_of_several(2, 900.0, 1_000.5));
}

#[test]
fn instances_chosen_at_random_are_queues_of_their_own() {
    waits_ms(4, "random", 500.0, exponential_tokens).agrees_with(theory_of_one(2_000.0, 1_000.5, 2e6));
}
