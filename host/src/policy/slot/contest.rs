//! A policy on watch looks worse than the one before it did. That may be the policy, or the requests, which are others now. So the one before it
//! decides half of the requests again, and both are held against each other over the same time.

use super::{Hook, Slot, Trial, Version};
use crate::policy::guard::{Breach, GuardConfig, Sample, Window, WindowValues, compare, is_comparable};
use crate::policy::{Action, Cause, Share, Stage};
use std::sync::Arc;
use std::time::Duration;

/// The most windows of a contest.
const WINDOWS_MAX: u32 = 4;
/// Standard deviations by which the newcomer must be worse: within the first window, for the looks at every second after that, and for
/// the one in the end.
const CERTAIN: f64 = 6.0;
pub(super) const SURE: f64 = 3.0;
const LIKELY: f64 = 2.0;
const HALF: Stage = Stage::Canary(Share::PerMille(500));

/// Two policies, half of the requests each.
pub(super) struct Contest {
    /// Generation of the policy before the one on watch, which has the seat of trials.
    pub(super) generation: u64,
    since_ms: u64,
    /// What made the newcomer look worse.
    doubt: Breach,
    newcomer: Window,
    before: Window,
}

/// What came of a contest.
pub(super) enum Settled {
    /// The newcomer is as good on the same requests.
    Holds(String),
    Worse(Breach),
}

impl Contest {
    fn new(config: &GuardConfig, generation: u64, doubt: Breach, newcomer: Sample, now_ms: u64) -> Self {
        let window = |counted| Window::since(config.window * WINDOWS_MAX, now_ms, counted);
        let (newcomer, before) = (window(newcomer), window(Sample::default()));
        Self { generation, since_ms: now_ms, doubt, newcomer, before }
    }

    /// Takes in what both counted. It is over when the newcomer is worse for sure, or it has lasted long enough to tell: then the
    /// newcomer stays, unless it is worse still, or so few requests came that the doubt stands.
    pub(super) fn look(
        &mut self,
        config: &GuardConfig,
        newcomer: Sample,
        before: Sample,
        now_ms: u64,
    ) -> Option<Settled> {
        self.newcomer.push(now_ms, newcomer);
        self.before.push(now_ms, before);
        let lasted = Duration::from_millis(now_ms.saturating_sub(self.since_ms));
        let is_over = lasted >= config.window * WINDOWS_MAX;
        let (newcomer, before) = (self.newcomer.values(), self.before.values());
        let deviations = match lasted {
            _ if is_over => LIKELY,
            lasted if lasted < config.window => CERTAIN,
            _ => SURE,
        };
        let mut broken = compare(config, &self.newcomer, &self.before);
        if let Some(breach) = broken.find(|breach| stands_out(breach, &newcomer, &before, deviations)) {
            return Some(Settled::Worse(Breach { window: lasted, ..breach }));
        }
        if !is_over {
            return None;
        }
        if !is_comparable(config, self.doubt.guard, &self.newcomer, &self.before) {
            return Some(Settled::Worse(self.doubt));
        }
        let percent = |share: Option<f64>| format!("{:.1}%", 100.0 * share.unwrap_or(0.0));
        Some(Settled::Holds(format!(
            "over {lasted:?} it hit {} of the blocks and the one before it {}, with {} and {} of the requests rejected",
            percent(newcomer.hit_rate),
            percent(before.hit_rate),
            percent(newcomer.rejected_share),
            percent(before.rejected_share),
        )))
    }

    /// What the policy before it did last, for comparison with the newcomer from now on.
    pub(super) fn into_before(self) -> Window {
        self.before
    }

    pub(super) fn cause(&self) -> Cause {
        Cause::Guard(self.doubt.guard)
    }
}

/// Whether the difference is more than chance makes of so few requests. The blocks of one request are found together or not at all, so that
/// requests count, and not blocks.
pub(super) fn stands_out(
    breach: &Breach,
    newcomer: &WindowValues,
    before: &WindowValues,
    deviations: f64,
) -> bool {
    let was = breach.compared.unwrap_or(breach.value);
    let share = f64::midpoint(breach.value, was);
    let of = |window: &WindowValues| 1.0 / window.requests.max(1) as f64;
    let deviation = (share * (1.0 - share) * (of(newcomer) + of(before))).sqrt();
    (breach.value - was).abs() > deviations * deviation
}

impl<H: Hook> Slot<H> {
    /// Has the policy before `current` decide half of the requests. Returns `None` if it cannot. Blocking, as a rollback is.
    pub(super) fn start_contest(
        self: &Arc<Self>,
        current: &Version<H>,
        doubt: Breach,
        newcomer: Sample,
        now_ms: u64,
    ) -> Option<Contest> {
        let _change = self.change.lock();
        let replaced = self.current().generation != current.generation;
        if H::NO_CANARY.is_some() || replaced || self.trial().is_some() || self.is_paused() {
            return None;
        }
        let mut version = self.prepare_previous().ok()?;
        version.generation = self.next_generation();
        let trial = Trial::start_by_guard(self, version, HALF).ok()?;
        let generation = trial.version.generation;
        let (newcomer_name, name) = (&current.description.name, &trial.version.description.name);
        let reason = format!(
            "`{newcomer_name}` looks worse than `{name}` did: {doubt}; `{name}` decides half of the requests, so that both have the same"
        );
        self.log.add_host(2, &reason);
        self.trial.store(Some(Arc::clone(&trial)));
        self.stock(&trial.version);
        self.tell(Action::Tried(HALF), Cause::Guard(doubt.guard), None, Some(&trial.version), Some(reason));
        Some(Contest::new(&self.config.guard, generation, doubt, newcomer, now_ms))
    }

    /// The newcomer stays, and decides everything again.
    pub(super) fn end_contest(self: &Arc<Self>, contest: &Contest, held: &str) {
        let _change = self.change.lock();
        let Some(trial) = self.trial.load_full() else { return };
        if trial.version.generation != contest.generation {
            return;
        }
        let reason = format!("`{}` stays: {held}", self.current().description.name);
        self.log.add_host(2, &reason);
        self.drop_contest();
        self.tell(Action::TrialEnded, contest.cause(), Some(&trial.version), None, Some(reason));
    }

    /// Frees the seat of trials, if a contest has it. Under the lock of changes.
    pub(super) fn drop_contest(&self) {
        let Some(trial) = self.trial.load_full().filter(|trial| trial.by_guard) else { return };
        self.trial.store(None);
        trial.end();
    }
}
