//! A scheduler in shadow: asked on the tables that the active policy decided on.

use super::worker::checked;
use super::{SchedulerHook, push};
use crate::fleet::Told;
use crate::policy::Fault;
use crate::policy::counters::Decided;
use crate::policy::slot::{Around, Shadow, Worker};
use kvasir_policy::scheduler::{Decision, Placement, Question};
use std::sync::Arc;

/// One decision, and everything that it was based on.
pub struct Heard {
    pub question: Question,
    pub told: Told,
    pub thresholds: Arc<Vec<f32>>,
    pub decision: Decision,
    /// Blocks of the prompt.
    pub blocks: u64,
}

#[derive(Default)]
pub struct SchedulerShadow {
    /// What its engine was told.
    told: Told,
    thresholds: Option<Arc<Vec<f32>>>,
}

impl SchedulerShadow {
    fn ask(&mut self, worker: &mut Worker<SchedulerHook>, heard: &Heard) -> Result<Decision, Fault> {
        let fresh = worker.refresh();
        let changes = if fresh { Some(heard.told.all()) } else { self.told.changes_to(&heard.told) };
        let same = self.thresholds.as_ref().is_some_and(|seen| Arc::ptr_eq(seen, &heard.thresholds));
        worker.tell(|engine| {
            if let Some(changes) = &changes {
                push(engine, changes)?;
            }
            if fresh || !same { engine.set_thresholds(&heard.thresholds) } else { Ok(()) }
        })?;
        worker.ask(|engine| checked(engine, &heard.told, &heard.question))
    }
}

impl Shadow<SchedulerHook> for SchedulerShadow {
    fn hear(&mut self, around: &Around<'_, SchedulerHook>, worker: &mut Worker<SchedulerHook>, heard: Heard) {
        let asked = self.ask(worker, &heard);
        // After a fault there is another engine, or none: it is given everything.
        if let Ok(decision) = asked {
            let tally = &around.trial.tally;
            tally.compare(is_same(&decision, &heard.decision));
            count(&tally.newcomer, &decision, &heard);
            count(&tally.active, &heard.decision, &heard);
        }
        (self.told, self.thresholds) = (heard.told, Some(heard.thresholds));
    }
}

/// The same placement, or both reject: memos do not matter.
pub fn is_same(a: &Decision, b: &Decision) -> bool {
    let placement = |decision: &Decision| match *decision {
        Decision::Run(Placement { prefill, decode, transfer, .. }) => Some((prefill, decode, transfer)),
        Decision::Reject { .. } => None,
    };
    placement(a) == placement(b)
}

/// What comes of a decision, by the host's forecast on the tables that it was based on.
fn count(decided: &Decided, decision: &Decision, heard: &Heard) {
    let Decision::Run(placement) = decision else { return decided.rejected() };
    decided.placed(heard.blocks, hit_blocks(placement, &heard.question).min(heard.blocks));
    if let Some(outlook) = heard.told.outlook(&heard.question, placement) {
        decided.forecast(&outlook);
    }
}

fn hit_blocks(placement: &Placement, question: &Question) -> u64 {
    let fetched = placement.transfer.map_or(0, |transfer| transfer.blocks);
    u64::from(question.candidates().prefix_of(placement.prefill as usize) + fetched)
}
