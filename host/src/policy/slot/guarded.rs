//! The guards of a slot: they hold a newcomer against what it is compared with, and act.

use super::contest::{Contest, SURE, Settled, stands_out};
use super::{Hook, Slot, Trial, Version};
use crate::policy::guard::{Breach, GuardConfig, Sample, Window, compare, judge};
use crate::policy::{Beside, Cause, Guard, Share, Stage, WatchStatus};
use std::sync::Arc;

/// What the guards of one slot have seen.
#[derive(Default)]
pub(in crate::policy) struct Guarded {
    active: Option<(u64, Window)>,
    trial: Option<OnTrial>,
    watch: Option<Watch>,
    contest: Option<Contest>,
    /// Generation that came into service since the guards looked last, and must be watched.
    awaited: Option<u64>,
    rollbacks: [u64; Guard::ALL.len()],
    trips: u64,
    /// The time of the last look.
    now_ms: u64,
}

struct OnTrial {
    generation: u64,
    newcomer: Window,
    /// The active policy by the same forecast; a canary is held against what the active one counts itself.
    compared: Option<Window>,
}

/// The watch over a policy that came into service a short while ago.
struct Watch {
    until_ms: u64,
    /// The one before it, when it was last asked.
    compared: Option<Window>,
    /// A contest was broken off: another one would be too.
    is_uncontested: bool,
}

impl Guarded {
    /// Has `generation` watched from the next look on.
    pub(super) fn watch(&mut self, generation: u64) {
        self.awaited = Some(generation);
    }

    pub(super) fn count(&mut self, cause: Cause) {
        match cause {
            Cause::Guard(guard) => self.rollbacks[guard as usize] += 1,
            Cause::Breaker => self.trips += 1,
            Cause::Operator | Cause::Folder | Cause::Restart => {}
        }
    }

    /// Compares the policy in service with `before` from now on.
    fn hold_against(&mut self, before: Window) {
        if let Some(watch) = &mut self.watch {
            watch.compared = Some(before);
        }
    }

    pub(in crate::policy) fn rollbacks(&self) -> ([u64; Guard::ALL.len()], u64) {
        (self.rollbacks, self.trips)
    }

    /// Whether the policy in service is watched, or will be from the next look on.
    pub(in crate::policy) fn is_watched(&self, config: &GuardConfig) -> bool {
        self.watch.is_some() || (self.awaited.is_some() && !config.watch.is_zero())
    }

    /// Of the policy in service. `None` also until the guards have looked at it.
    pub(in crate::policy) fn watch_status(&self, generation: u64) -> Option<WatchStatus> {
        let (watch, (seen, window)) = (self.watch.as_ref()?, self.active.as_ref()?);
        if *seen != generation {
            return None;
        }
        Some(WatchStatus {
            seconds_left: watch.until_ms.saturating_sub(self.now_ms) / 1_000,
            window: Beside {
                newcomer: window.values(),
                compared: watch.compared.as_ref().map(Window::values),
            },
        })
    }

    pub(in crate::policy) fn trial_window(&self, generation: u64) -> Beside {
        let Some(trial) = self.trial.as_ref().filter(|trial| trial.generation == generation) else {
            return Beside::default();
        };
        let active = self.active.as_ref().map(|(_, window)| window);
        let compared = trial.compared.as_ref().or(active);
        Beside { newcomer: trial.newcomer.values(), compared: compared.map(Window::values) }
    }

    /// Takes in what the policy in service counted. Returns the guard that it broke, if it is watched.
    fn look_at_active(
        &mut self,
        config: &GuardConfig,
        generation: u64,
        sample: Sample,
        now_ms: u64,
    ) -> Option<Breach> {
        self.now_ms = now_ms;
        if self.active.as_ref().is_none_or(|(seen, _)| *seen != generation) {
            let before = self.active.replace((generation, Window::new(config.window, now_ms)));
            let awaited = self.awaited.take_if(|awaited| *awaited == generation).is_some();
            let watched = awaited && !config.watch.is_zero();
            let until_ms = now_ms.saturating_add(config.watch.as_millis() as u64);
            let compared = before.map(|(_, window)| window);
            self.watch = watched.then_some(Watch { until_ms, compared, is_uncontested: false });
            self.contest = None;
        }
        let (_, window) = self.active.as_mut()?;
        window.push(now_ms, sample);
        if self.watch.as_ref()?.until_ms <= now_ms && self.contest.is_none() {
            self.watch = None;
        }
        let compared = self.watch.as_ref()?.compared.as_ref().filter(|_| self.contest.is_none());
        judge(config, window, compared)
    }

    /// Takes in what both sides of the contest counted, of which the one before has the seat of `trial`.
    fn look_at_contest<H: Hook>(
        &mut self,
        config: &GuardConfig,
        trial: Option<&Trial<H>>,
        sample: Sample,
        now_ms: u64,
    ) -> Option<(Contest, Settled)> {
        let contest = self.contest.as_mut()?;
        let Some(trial) = trial.filter(|trial| trial.version.generation == contest.generation) else {
            self.contest = None;
            self.watch.as_mut()?.is_uncontested = true;
            return None;
        };
        let before = Sample::of(&trial.version.counters.values(), trial.version.counters.decided.values());
        let settled = contest.look(config, sample, before, now_ms)?;
        Some((self.contest.take()?, settled))
    }

    fn look_at_trial<H: Hook>(
        &mut self,
        config: &GuardConfig,
        trial: &Trial<H>,
        now_ms: u64,
    ) -> Option<Breach> {
        let generation = trial.version.generation;
        if self.trial.as_ref().is_none_or(|seen| seen.generation != generation) {
            let window = || Window::new(config.window, now_ms);
            let compared = (trial.stage == Stage::Shadow).then(window);
            self.trial = Some(OnTrial { generation, newcomer: window(), compared });
        }
        let seen = self.trial.as_mut()?;
        let counters = &trial.version.counters;
        let decided = match trial.stage {
            Stage::Shadow => trial.tally.newcomer.values(),
            Stage::Active | Stage::Canary(_) => counters.decided.values(),
        };
        seen.newcomer.push(now_ms, Sample::of(&counters.values(), decided));
        if let Some(compared) = &mut seen.compared {
            compared.push(now_ms, Sample::of(&Default::default(), trial.tally.active.values()));
        }
        let active = self.active.as_ref().map(|(_, window)| window);
        let compared = seen.compared.as_ref().or(active).filter(|_| !trial.by_guard);
        judge(config, &seen.newcomer, None).or_else(|| {
            let (newcomer, compared) = (&seen.newcomer, compared?);
            // A shadow is asked of the same requests, but a second of them is unlike a minute, and it costs nobody anything. A canary
            // may have had the worse ones, while they are few, and has them in the same time only over a whole window. One of
            // all requests leaves none for that.
            let is_of_all = trial.stage == Stage::Canary(Share::PerMille(1_000));
            if !is_of_all && !newcomer.is_whole() {
                return None;
            }
            let is_sure = |breach: &Breach| {
                trial.stage == Stage::Shadow
                    || stands_out(breach, &newcomer.values(), &compared.values(), SURE)
            };
            compare(config, newcomer, compared).find(is_sure)
        })
    }
}

impl<H: Hook> Slot<H> {
    pub(in crate::policy) fn is_watched(&self) -> bool {
        self.guarded.lock().is_watched(&self.config.guard)
    }

    /// Has the guards look: a policy on watch that broke one goes, and so does a trial.
    pub fn judge(self: &Arc<Self>, now_ms: u64) {
        let config = &self.config.guard;
        let (current, trial) = (self.current(), self.trial());
        let sample = Sample::of(&current.counters.values(), current.counters.decided.values());
        let (broken, broken_on_trial, settled) = {
            let mut guarded = self.guarded.lock();
            let broken = guarded.look_at_active(config, current.generation, sample, now_ms);
            let asked = trial.as_ref().filter(|_| !self.is_paused());
            let on_trial = asked.and_then(|trial| guarded.look_at_trial(config, trial, now_ms));
            let settled = (!self.is_paused())
                .then(|| guarded.look_at_contest(config, trial.as_deref(), sample, now_ms))
                .flatten();
            (broken, on_trial, settled)
        };
        let take_out = |breach: Breach, more: &str| {
            self.take_out(current.generation, Cause::Guard(breach.guard), &format!("{breach}{more}"));
        };
        match (broken, settled) {
            (Some(breach), None) if breach.guard.compares() => self.doubt(&current, breach, sample, now_ms),
            (Some(breach), _) => take_out(breach, ""),
            (None, Some((_, Settled::Worse(breach)))) => take_out(breach, ", of half of the requests each"),
            (None, Some((contest, Settled::Holds(held)))) => {
                self.end_contest(&contest, &held);
                self.guarded.lock().hold_against(contest.into_before());
            }
            (None, None) => {}
        }
        if let (Some(trial), Some(breach)) = (trial, broken_on_trial) {
            self.take_out(trial.version.generation, Cause::Guard(breach.guard), &breach.to_string());
        }
    }

    /// What is in service looks worse than what was before it: it goes, unless both can be compared on the same requests first.
    fn doubt(self: &Arc<Self>, current: &Version<H>, breach: Breach, sample: Sample, now_ms: u64) {
        let (may, is_whole) = {
            let guarded = self.guarded.lock();
            let may = guarded.watch.as_ref().is_some_and(|watch| !watch.is_uncontested);
            (may, guarded.active.as_ref().is_some_and(|(_, window)| window.is_whole()))
        };
        match may.then(|| self.start_contest(current, breach, sample, now_ms)).flatten() {
            Some(contest) => self.guarded.lock().contest = Some(contest),
            // A second of traffic is unlike a minute of it, whatever serves.
            None if !is_whole => {}
            None => self.take_out(current.generation, Cause::Guard(breach.guard), &breach.to_string()),
        }
    }
}
