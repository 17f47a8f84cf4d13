//! The rollouts that a host keeps, one a slot, over restarts.

use super::{Order, Rollout, Said, TooManyHosts};
use crate::policy::SlotKind;
use crate::policy::catalog::Assignment;
use crate::text::printable;
use parking_lot::Mutex;

/// What a host should do in one slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    pub slot: SlotKind,
    /// Number of the rollout.
    pub id: u64,
    pub order: Order,
    pub target: Assignment,
}

/// What a host says of one slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub slot: SlotKind,
    /// Number of the rollout that it speaks of.
    pub id: u64,
    pub said: Said,
}

/// Why a rollout was not started or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no rollout in {0}; start one with `kvasir policy rollout start`")]
    None(SlotKind),
    #[error("the rollout in {slot} was stopped ({reason}); start another one")]
    Stopped { slot: SlotKind, reason: String },
    #[error(
        "the rollout {id} of `{name}` in {slot} is on its way; wait until all hosts have it or, once stopped, have gone back \
         (`kvasir policy rollout status`), or stop it"
    )]
    OnItsWay { slot: SlotKind, id: u64, name: String },
    #[error("the rollout {id} in {slot} is no longer there; {now} is")]
    Gone { slot: SlotKind, id: u64, now: u64 },
    #[error(transparent)]
    TooManyHosts(#[from] TooManyHosts),
    #[error("rollouts cannot be {action}: {reason}")]
    State { action: &'static str, reason: String },
}

/// What an operator does to a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Pause,
    Resume,
    /// The hosts that have it go back.
    Stop,
}

/// The rollouts of one host, for those that follow it. All calls may write to the state database.
pub struct Keeper {
    db: kvasir_state_db::Db,
    tree: sled::Tree,
    slots: Mutex<[Option<Rollout>; 4]>,
}

impl Keeper {
    /// Opens the keeper. Rollouts stored by an earlier run go on.
    ///
    /// # Errors
    /// The database cannot be read, or holds something else.
    pub fn open(db: &kvasir_state_db::Db, now_ms: u64) -> Result<Self, Error> {
        let tree = db.open_tree("policy-rollouts").map_err(|e| state("opened", &e))?;
        let mut slots = [const { None }; 4];
        for slot in SlotKind::ALL {
            let Some(bytes) = tree.get(slot.as_str()).map_err(|e| state("read", &e))? else { continue };
            let mut rollout: Rollout = serde_json::from_slice(&bytes).map_err(|e| state("read", &e))?;
            rollout.woken(now_ms);
            slots[slot as usize] = Some(rollout);
        }
        Ok(Self { db: db.clone(), tree, slots: Mutex::new(slots) })
    }

    /// Starts a rollout, in place of the slot's last one, which must be over: what a host should go back to is what served before
    /// that one. `request` is what a host needs to bring the target into service.
    ///
    /// # Errors
    /// [`Error::OnItsWay`], [`Error::State`].
    pub fn start(
        &self,
        slot: SlotKind,
        target: Assignment,
        request: &[u8],
        by: String,
        pause_ms: u64,
        now_ms: u64,
    ) -> Result<Rollout, Error> {
        let mut slots = self.slots.lock();
        if let Some(last) = slots[slot as usize].as_ref().filter(|last| last.is_on_its_way(now_ms)) {
            let (id, name) = (last.id, last.target.origin.name().to_owned());
            return Err(Error::OnItsWay { slot, id, name });
        }
        let id = slots[slot as usize].as_ref().map_or(Some(1), |last| last.id.checked_add(1));
        let id = id.ok_or_else(|| state("started", &"the last one has the last number there is"))?;
        let rollout = Rollout::new(id, target, by, pause_ms, now_ms);
        self.tree.insert(request_key(slot), request).map_err(|e| state("written", &e))?;
        self.write(slot, &rollout)?;
        slots[slot as usize] = Some(rollout.clone());
        Ok(rollout)
    }

    pub fn list(&self) -> Vec<(SlotKind, Rollout)> {
        let slots = self.slots.lock();
        SlotKind::ALL.into_iter().filter_map(|slot| Some((slot, slots[slot as usize].clone()?))).collect()
    }

    /// # Errors
    /// There is no rollout, it was stopped before, or [`Error::State`].
    pub fn change(&self, slot: SlotKind, step: Step, by: &str) -> Result<Rollout, Error> {
        let mut slots = self.slots.lock();
        let rollout = slots[slot as usize].as_mut().ok_or(Error::None(slot))?;
        let changed = match step {
            Step::Pause => rollout.pause(),
            Step::Resume => rollout.resume(),
            Step::Stop => rollout.stop(format!("by {by}")),
        };
        if let (false, super::Phase::Stopped { reason }) = (changed, &rollout.phase) {
            return Err(Error::Stopped { slot, reason: reason.clone() });
        }
        self.write(slot, rollout)?;
        Ok(rollout.clone())
    }

    /// Takes in what a host says, and answers what it should do in the slots that have a rollout.
    ///
    /// # Errors
    /// [`Error::TooManyHosts`], [`Error::State`].
    pub fn hear(&self, host: &str, reports: Vec<Report>, now_ms: u64) -> Result<Vec<Told>, Error> {
        let mut slots = self.slots.lock();
        let mut told = Vec::new();
        for slot in SlotKind::ALL {
            let Some(rollout) = &mut slots[slot as usize] else { continue };
            let of_this = reports.iter().find(|report| (report.slot, report.id) == (slot, rollout.id));
            let said = of_this.map(|report| report.said.clone());
            let before = rollout.steps();
            let order = rollout.hear(host, said, now_ms)?;
            if rollout.steps() != before {
                self.write(slot, rollout)?;
            }
            told.push(Told { slot, id: rollout.id, order, target: rollout.target.clone() });
        }
        Ok(told)
    }

    /// What a host needs to bring the target into service, as it was given to [`Keeper::start`].
    ///
    /// # Errors
    /// The rollout is not there (any more), or [`Error::State`].
    pub fn request(&self, slot: SlotKind, id: u64) -> Result<Vec<u8>, Error> {
        let slots = self.slots.lock();
        let now = slots[slot as usize].as_ref().ok_or(Error::None(slot))?.id;
        if id != now {
            return Err(Error::Gone { slot, id, now });
        }
        let bytes = self.tree.get(request_key(slot)).map_err(|e| state("read", &e))?;
        Ok(bytes.ok_or_else(|| state("read", &"its policy is missing"))?.to_vec())
    }

    fn write(&self, slot: SlotKind, rollout: &Rollout) -> Result<(), Error> {
        let bytes = serde_json::to_vec(rollout).map_err(|e| state("written", &e))?;
        self.tree.insert(slot.as_str(), bytes).map_err(|e| state("written", &e))?;
        self.db.flush().map_err(|e| state("written", &e))
    }
}

fn request_key(slot: SlotKind) -> String {
    format!("{slot}/request")
}

fn state(action: &'static str, reason: &impl std::fmt::Display) -> Error {
    Error::State { action, reason: printable(&reason.to_string(), 1 << 10) }
}
