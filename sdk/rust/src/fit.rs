//! Recursive least squares with forgetting: what the prefill costs at one instance, out of measured times.
//!
//! For a learner that keeps one [`Fit`] for each instance, and publishes its costs once there are enough outcomes. A dozen
//! teach a cost, some hundred of them count, and single times that a wait made longer do little to it.

/// What a prefill consists of: the fixed part, thousands of tokens computed, and millions of token pairs.
pub type Terms = [f64; 3];

/// How much of the past each outcome keeps: some 100 of them count.
const KEEP: f64 = 0.99;
/// Variance of what is not known yet, in ms² for one of a term.
const UNKNOWN: f64 = 1e8;
/// No term costs more than this for one of it, ms: an hour.
const COST_MAX: f64 = 3.6e6;
/// Outcomes before the fit is used.
const ENOUGH: u32 = 12;
/// Errors beyond so many times the usual one count as that many.
const OUTLIER: f64 = 3.0;
/// Weight of times to first token that are longer than expected: a wait that nobody predicted makes a time longer, nothing makes it
/// shorter.
const WEIGHT_OF_LONGER: f64 = 0.25;
/// A time that is so many times longer than one without a wait should be had a wait in it.
const WAITED: f64 = 1.5;
/// How far one outcome moves what is held for usual.
const STEP: f64 = 0.05;
/// Times this much shorter or longer than predicted are none.
const REASON: f64 = 100.0;

/// What was learned of one instance.
#[derive(Clone, Debug)]
pub struct Fit {
    /// ms for one of each term.
    pub costs: Terms,
    covariance: [Terms; 3],
    /// The tenth part of times to first token are at most as many times longer than the prefill was predicted: those did
    /// not wait.
    times: f64,
    /// Usual error, ms.
    error: f64,
    /// Usual time of a prefill, ms, by this fit.
    pub mean_ms: f64,
    heard: u32,
    /// Number of the last outcome among those of all instances; kept for the learner, not read here.
    pub last: u64,
}

impl Default for Fit {
    fn default() -> Self {
        let covariance = std::array::from_fn(|i| std::array::from_fn(|j| if i == j { UNKNOWN } else { 0.0 }));
        Self { costs: [0.0; 3], covariance, times: 0.0, error: 0.0, mean_ms: 0.0, heard: 0, last: 0 }
    }
}

/// `computed` tokens behind `cached` ones.
pub fn terms(computed: f64, cached: f64) -> Terms {
    [1.0, computed / 1e3, computed * (cached + computed / 2.0) / 1e6]
}

fn dot(a: &Terms, b: &Terms) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Whether a time can be one of a prefill of that size.
fn is_reasonable(terms: &Terms, predicted_ms: f64, ms: f64) -> bool {
    let times = ms / predicted_ms;
    let reasonable = ms <= COST_MAX && (1.0 / REASON..=REASON).contains(&times);
    reasonable && terms.iter().all(|term| (0.0..=1e6).contains(term))
}

impl Fit {
    /// Whether it has heard enough to be believed.
    pub fn is_enough(&self) -> bool {
        self.heard >= ENOUGH
    }

    /// Learns from the time of a prefill as its instance measured it, if that is within reason. `predicted_ms`: what was expected
    /// of it.
    pub fn learn_measured(&mut self, terms: &Terms, predicted_ms: f64, prefill_ms: f64) {
        if is_reasonable(terms, predicted_ms, prefill_ms) {
            self.learn_prefill(terms, prefill_ms, 1.0);
        }
    }

    /// Learns from one time to first token, if that was spent on the prefill alone and is within reason.
    pub fn learn(&mut self, terms: &Terms, predicted_ms: f64, ttft_ms: f64) {
        if !is_reasonable(terms, predicted_ms, ttft_ms) {
            return;
        }
        let times = ttft_ms / predicted_ms;
        match self.times {
            0.0 => self.times = times,
            usual if times < usual => self.times = usual * (1.0 - STEP * 0.9),
            usual => self.times = usual * (1.0 + STEP * 0.1),
        }
        if times <= WAITED * self.times {
            self.learn_prefill(terms, ttft_ms, WEIGHT_OF_LONGER);
        }
    }

    /// `of_longer`: weight of a time that is longer than expected.
    fn learn_prefill(&mut self, terms: &Terms, prefill_ms: f64, of_longer: f64) {
        let mut error = prefill_ms - dot(&self.costs, terms);
        if self.is_enough() {
            let most = OUTLIER * self.error.max(1.0);
            self.error += 0.05 * (error.abs().min(2.0 * most) - self.error);
            error = error.clamp(-most, most);
        } else {
            self.error += (error.abs() - self.error) / f64::from(self.heard + 1);
        }
        let weight = if error > 0.0 && self.is_enough() { of_longer } else { 1.0 };
        let spread = self.covariance.map(|row| dot(&row, terms));
        let gain = spread.map(|spread_i| spread_i / (KEEP / weight + dot(&spread, terms)));
        for i in 0..terms.len() {
            self.costs[i] = (self.costs[i] + gain[i] * error).clamp(0.0, COST_MAX);
            for j in 0..terms.len() {
                self.covariance[i][j] -= (gain[i] * spread[j] + gain[j] * spread[i]) / 2.0;
            }
        }
        // What no outcome tells of is not forgotten without end.
        if (0..terms.len()).all(|i| self.covariance[i][i] < UNKNOWN * KEEP) {
            self.covariance.iter_mut().flatten().for_each(|variance| *variance /= KEEP);
        }
        self.heard = self.heard.saturating_add(1);
        self.mean_ms += (dot(&self.costs, terms) - self.mean_ms) / f64::from(self.heard.min(50));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 20 ms, 100 ms for a thousand tokens, 3 for a million pairs.
    const TRUE: Terms = [20.0, 100.0, 3.0];

    /// Prompts of many lengths, a third of them stored.
    fn prompts(count: u32) -> impl Iterator<Item = Terms> {
        (0..count).map(|n| {
            let tokens = f64::from(500 + n * 2_377 % 16_000);
            terms(tokens * 2.0 / 3.0, tokens / 3.0)
        })
    }

    fn is_close(fit: &Fit) -> bool {
        fit.costs.iter().zip(TRUE).all(|(cost, real)| (cost - real).abs() < 0.05 * real)
    }

    #[test]
    fn a_dozen_measured_prefills_teach_the_costs() {
        let mut fit = Fit::default();
        for (n, prompt) in prompts(40).enumerate() {
            assert_eq!(fit.is_enough(), n >= 12);
            let ms = dot(&TRUE, &prompt);
            fit.learn_measured(&prompt, ms, ms);
        }
        assert!(is_close(&fit), "{:?}", fit.costs);
        assert!(fit.mean_ms > 100.0);
    }

    #[test]
    fn waits_and_nonsense_do_little_to_them() {
        let mut fit = Fit::default();
        for (n, prompt) in prompts(600).enumerate() {
            let prefill = dot(&TRUE, &prompt);
            // Every fifth waited, and now and then a clock went wrong.
            let ttft = if n % 5 == 4 { 3.0 * prefill } else { prefill };
            fit.learn(&prompt, prefill, ttft);
            for wrong in [f64::NAN, f64::INFINITY, -1.0, 0.0, 1e9] {
                fit.learn(&prompt, prefill, wrong);
                fit.learn_measured(&prompt, prefill, wrong);
            }
        }
        assert!(is_close(&fit), "{:?}", fit.costs);
    }
}
