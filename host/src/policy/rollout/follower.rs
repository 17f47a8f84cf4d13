//! What a host does with the rollouts that it follows: says what serves here, and brings into service what it is told.

use super::keeper::{Keeper, Report, Told};
use super::{Order, Said};
use crate::policy::catalog::Assignment;
use crate::policy::history::acting_for;
use crate::policy::{PolicyHost, SlotKind};
use std::time::Instant;

/// The host that keeps the rollouts that another follows. Errors are for the log; the next round tries again.
pub trait Leader {
    /// # Errors
    /// It cannot be reached, or refuses.
    fn follow(&mut self, host: &str, reports: Vec<Report>) -> Result<Vec<Told>, String>;

    /// What is needed to bring the target of a rollout into service.
    ///
    /// # Errors
    /// As `follow`.
    fn fetch(&mut self, slot: SlotKind, id: u64) -> Result<Vec<u8>, String>;
}

/// A host that follows itself.
pub struct Own<'a> {
    pub keeper: &'a Keeper,
    pub now_ms: u64,
}

impl Leader for Own<'_> {
    fn follow(&mut self, host: &str, reports: Vec<Report>) -> Result<Vec<Told>, String> {
        self.keeper.hear(host, reports, self.now_ms).map_err(|e| e.to_string())
    }

    fn fetch(&mut self, slot: SlotKind, id: u64) -> Result<Vec<u8>, String> {
        self.keeper.request(slot, id).map_err(|e| e.to_string())
    }
}

/// One host's part in all rollouts. A restart forgets it, which does no harm: which policy serves is stored, and the rest follows
/// from that.
pub struct Follower {
    name: String,
    slots: [Option<Known>; 4],
    /// It has heard from the leader since it was started.
    heard: bool,
}

/// The rollout of one slot, as it was heard of last.
struct Known {
    id: u64,
    target: Assignment,
    tried: Tried,
    /// It served when this host was started, perhaps because it had ended it: until then it counts as watched again.
    again_until: Option<Instant>,
}

enum Tried {
    Not,
    Done,
    Failed(String),
}

impl Follower {
    /// `name` is the one by which the leader knows this host.
    pub fn new(name: String) -> Self {
        Self { name, slots: [const { None }; 4], heard: false }
    }

    /// One round. `load` brings into service what was fetched. Blocking: it may compile a policy.
    ///
    /// # Errors
    /// The leader's.
    pub fn round(
        &mut self,
        policies: &PolicyHost,
        leader: &mut impl Leader,
        load: impl Fn(&[u8]) -> Result<(), String>,
    ) -> Result<(), String> {
        let reports = SlotKind::ALL.into_iter().filter_map(|slot| self.report(policies, slot)).collect();
        for Told { slot, id, order, target } in leader.follow(&self.name, reports)? {
            let known = &mut self.slots[slot as usize];
            if known.as_ref().is_none_or(|known| known.id != id) {
                let again = !self.heard && policies.serves(slot, &target);
                let again_until = again.then(|| Instant::now() + policies.watch());
                *known = Some(Known { id, target, tried: Tried::Not, again_until });
            }
            let Some(known) = known else { continue };
            match (order, &known.tried) {
                // It was stored, and this host has started again since.
                (Order::Serve, Tried::Not) if policies.serves(slot, &known.target) => {
                    known.tried = Tried::Done
                }
                (Order::Serve, Tried::Not) if !policies.status(slot).paused => {
                    let request = leader.fetch(slot, id)?;
                    known.tried = load(&request).map_or_else(Tried::Failed, |()| Tried::Done);
                }
                (Order::Return, _) if policies.serves(slot, &known.target) => {
                    let back = acting_for("rollout", || policies.rollback(slot));
                    known.tried =
                        back.map_or_else(|e| Tried::Failed(format!("cannot go back: {e}")), |_| Tried::Not);
                }
                (Order::Keep | Order::Serve | Order::Return, _) => {}
            }
        }
        self.heard = true;
        Ok(())
    }

    fn report(&self, policies: &PolicyHost, slot: SlotKind) -> Option<Report> {
        let Known { id, target, tried, again_until } = self.slots[slot as usize].as_ref()?;
        let status = policies.status(slot);
        let is_again = again_until.is_some_and(|until| Instant::now() < until);
        let said = match tried {
            Tried::Failed(reason) => Said::Failed(reason.clone()),
            _ if policies.serves(slot, target) && (status.watched || is_again) => Said::Watched,
            _ if policies.serves(slot, target) => Said::Settled,
            Tried::Not if status.paused => Said::Paused,
            Tried::Not => Said::Other,
            Tried::Done => Said::Failed(
                status
                    .last_trip
                    .unwrap_or_else(|| format!("`{}` was brought into service there by hand", status.name)),
            ),
        };
        Some(Report { slot, id: *id, said })
    }
}
