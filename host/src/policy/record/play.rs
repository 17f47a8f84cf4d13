//! Asking an engine what a record asked.

use super::{BadRecord, Push, Record, bits, shape};
use crate::policy::admitter::AdmitterHook;
use crate::policy::balancer::BalancerHook;
use crate::policy::chain::PartSaid;
use crate::policy::evictor::EvictorHook;
use crate::policy::scheduler::SchedulerHook;
use crate::policy::slot::{Hook, Policy, Prepared};
use crate::policy::{Engine, Error, Fault, PolicyConfig, SlotKind, Source};
use kvasir_policy::Description;
use kvasir_policy::admitter::{Forecast, Load, Verdict};
use kvasir_policy::balancer::Snapshot;
use kvasir_policy::evictor::Victim;
use kvasir_policy::scheduler::{Answer, Decision, Layout, Question};

/// What an engine made of a record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Played {
    /// As [`Record::answer`]; what is not read of a decision is 0.
    pub answer: Vec<u64>,
    /// Bits, from a scheduler that gives scores and was asked for them.
    pub scores: Vec<u32>,
    /// What the filters and scorers of a chain said, likewise.
    pub parts: Vec<PartSaid>,
}

/// Why a record could not be played.
#[derive(Debug, thiserror::Error)]
pub enum PlayError {
    #[error(transparent)]
    Record(#[from] BadRecord),
    #[error("the record is of slot `{record}`, the policy of slot `{policy}`")]
    OtherSlot { record: String, policy: SlotKind },
    /// The policy failed before it could be asked.
    #[error("policy failed in `{function}`: {fault}")]
    Fault { function: String, fault: Fault },
    /// Before the first call of the record.
    #[error(transparent)]
    Start(#[from] Error),
}

/// Slots of the prefill and of the decode table, for schedulers: without them no column of a question is found.
pub type Tables = [usize; 2];

/// An engine's calls by the names of the contract.
pub trait Playable: Hook {
    /// Tells the engine what was pushed. The record has been checked.
    ///
    /// # Errors
    /// The policy failed.
    fn push(engine: &mut Self::Engine, name: &str, words: &[u32], tables: Tables) -> Result<(), Fault>;

    /// # Errors
    /// As `push`.
    fn answer(engine: &mut Self::Engine, asked: &super::Call, tables: Tables) -> Result<Vec<u64>, Fault>;

    /// # Errors
    /// As `push`.
    fn scores(_engine: &mut Self::Engine, _asked: &super::Call, _tables: Tables) -> Result<Vec<f32>, Fault> {
        Ok(Vec::new())
    }

    /// # Errors
    /// As `push`.
    fn parts(_engine: &mut Self::Engine, _asked: &super::Call, _: Tables) -> Result<Vec<PartSaid>, Fault> {
        Ok(Vec::new())
    }
}

impl Record {
    /// Has an engine that was asked nothing yet answer what was asked. The engine has its settings.
    ///
    /// # Errors
    /// The record is of another slot or cannot be played, or the policy failed.
    pub fn play<H: Playable>(&self, engine: &mut H::Engine, with_scores: bool) -> Result<Played, PlayError> {
        let tables = self.prepare::<H>(engine)?;
        let failed = |function: &str| {
            let function = function.to_owned();
            move |fault| PlayError::Fault { function, fault }
        };
        // Asked for before the decision, which may change the policy's state; the scores must not.
        let (scores, parts) = match with_scores {
            true => (
                H::scores(engine, &self.asked, tables).map_err(failed("explain"))?,
                H::parts(engine, &self.asked, tables).map_err(failed("explain"))?,
            ),
            false => (Vec::new(), Vec::new()),
        };
        let answer = H::answer(engine, &self.asked, tables).map_err(failed(&self.asked.name))?;
        Ok(Played { answer, scores: bits(&scores), parts })
    }

    /// Tells an engine all that came before the question. Returns how large its tables are then.
    fn prepare<H: Playable>(&self, engine: &mut H::Engine) -> Result<Tables, PlayError> {
        if self.slot != H::KIND.as_str() {
            return Err(PlayError::OtherSlot { record: self.slot.clone(), policy: H::KIND });
        }
        shape::check(self)?;
        push_all::<H>(engine, &self.pushed)
            .map_err(|(name, fault)| PlayError::Fault { function: name.to_owned(), fault })
    }
}

/// Tells an engine what was pushed, one after the other. Returns how large its tables are then.
///
/// # Errors
/// The policy failed, in the function of that name.
pub fn push_all<'p, H: Playable>(
    engine: &mut H::Engine,
    pushed: &'p [Push],
) -> Result<Tables, (&'p str, Fault)> {
    let mut tables = Tables::default();
    for (name, words) in pushed {
        if H::KIND == SlotKind::Scheduler && name == "open" {
            let Layout { prefill_slots, decode_slots, .. } = Layout::decode(words);
            tables = [prefill_slots as usize, decode_slots as usize];
        }
        H::push(engine, name, words, tables).map_err(|fault| (name.as_str(), fault))?;
    }
    Ok(tables)
}

/// A policy of any slot, compiled once, that plays each record in an engine of its own.
pub enum Player {
    Scheduler(Prepared<SchedulerHook>),
    Evictor(Prepared<EvictorHook>),
    Admitter(Prepared<AdmitterHook>),
    Balancer(Prepared<BalancerHook>),
}

impl Player {
    /// # Errors
    /// The policy is not one that a host would load into `slot`.
    pub fn new(
        engine: &Engine,
        config: &PolicyConfig,
        slot: SlotKind,
        source: Source,
        settings: Vec<(String, String)>,
    ) -> Result<Self, Error> {
        Ok(match slot {
            SlotKind::Scheduler => Self::Scheduler(Prepared::new(engine, config, source, settings)?),
            SlotKind::Evictor => Self::Evictor(Prepared::new(engine, config, source, settings)?),
            SlotKind::Admitter => Self::Admitter(Prepared::new(engine, config, source, settings)?),
            SlotKind::Balancer => Self::Balancer(Prepared::new(engine, config, source, settings)?),
        })
    }

    pub fn slot(&self) -> SlotKind {
        match self {
            Self::Scheduler(_) => SlotKind::Scheduler,
            Self::Evictor(_) => SlotKind::Evictor,
            Self::Admitter(_) => SlotKind::Admitter,
            Self::Balancer(_) => SlotKind::Balancer,
        }
    }

    /// What the policy says of itself.
    ///
    /// # Errors
    /// It cannot be instantiated or configured.
    pub fn describe(&self) -> Result<Description, Error> {
        match self {
            Self::Scheduler(policy) => policy.engine().map(|(_, description)| description),
            Self::Evictor(policy) => policy.engine().map(|(_, description)| description),
            Self::Admitter(policy) => policy.engine().map(|(_, description)| description),
            Self::Balancer(policy) => policy.engine().map(|(_, description)| description),
        }
    }

    /// What an engine of it logged last.
    pub fn last_words(&self) -> Option<String> {
        match self {
            Self::Scheduler(policy) => policy.last_words(),
            Self::Evictor(policy) => policy.last_words(),
            Self::Admitter(policy) => policy.last_words(),
            Self::Balancer(policy) => policy.last_words(),
        }
    }

    /// The answer of a fresh engine, and its scores if they are wanted.
    ///
    /// # Errors
    /// As [`Record::play`], or no engine can be made.
    pub fn play(&self, record: &Record, with_scores: bool) -> Result<Played, PlayError> {
        match self {
            Self::Scheduler(policy) => play(policy, record, with_scores),
            Self::Evictor(policy) => play(policy, record, with_scores),
            Self::Admitter(policy) => play(policy, record, with_scores),
            Self::Balancer(policy) => play(policy, record, with_scores),
        }
    }
}

fn play<H: Playable>(policy: &Prepared<H>, record: &Record, with_scores: bool) -> Result<Played, PlayError> {
    let (mut engine, _) = policy.engine()?;
    record.play::<H>(&mut engine, with_scores)
}

impl Playable for SchedulerHook {
    fn push(engine: &mut Self::Engine, name: &str, words: &[u32], tables: Tables) -> Result<(), Fault> {
        match name {
            "open" => engine.open(words),
            "update-prefill" => engine.update_prefill(&floats(words)),
            "update-decode" => engine.update_decode(&floats(words)),
            "update-links" => engine.update_links(&floats(words)),
            "set-thresholds" => engine.set_thresholds(&floats(words)),
            "schedule" => {
                let (now, question) = words.split_at(1);
                engine.schedule(&asked_question(now[0], question, tables)).map(drop)
            }
            _ => push_to_any(engine, name, words),
        }
    }

    fn answer(engine: &mut Self::Engine, asked: &super::Call, tables: Tables) -> Result<Vec<u64>, Fault> {
        engine.schedule(&question_of(asked, tables)).map(decision_words)
    }

    fn scores(engine: &mut Self::Engine, asked: &super::Call, tables: Tables) -> Result<Vec<f32>, Fault> {
        engine.explain(&question_of(asked, tables))
    }

    fn parts(engine: &mut Self::Engine, asked: &super::Call, tables: Tables) -> Result<Vec<PartSaid>, Fault> {
        engine.parts(&question_of(asked, tables))
    }
}

fn question_of(asked: &super::Call, tables: Tables) -> Question {
    asked_question(asked.scalars[0] as u32, &asked.lists[0], tables)
}

fn asked_question(now: u32, words: &[u32], [prefill_slots, decode_slots]: Tables) -> Question {
    Question::of_words(f32::from_bits(now), words, prefill_slots, decode_slots)
}

/// A decision as it is recorded.
pub(crate) fn decision_words(decision: Decision) -> Vec<u64> {
    let Answer { prefill, decode, transfer_blocks, source, reason, retry_after, session_memo, tenant_charge } =
        decision.into();
    let words = [prefill, decode, transfer_blocks, source, reason, retry_after].map(u64::from);
    words.into_iter().chain([session_memo, tenant_charge]).collect()
}

impl Playable for EvictorHook {
    fn push(engine: &mut Self::Engine, name: &str, words: &[u32], _: Tables) -> Result<(), Fault> {
        match (name, words) {
            ("open", _) => engine.open(words),
            ("update-tiers", _) => engine.update_tiers(&floats(words)),
            ("on-events", [low, high, events @ ..]) => engine.on_events(joined(*low, *high), events),
            ("select-victims", [low, high, want, ..]) => {
                engine.select_victims(joined(*low, *high), *want, &mut Vec::new())
            }
            _ => push_to_any(engine, name, words),
        }
    }

    fn answer(engine: &mut Self::Engine, asked: &super::Call, _: Tables) -> Result<Vec<u64>, Fault> {
        let mut victims = Vec::new();
        engine.select_victims(asked.scalars[0], asked.scalars[1] as u32, &mut victims)?;
        Ok(victims.into_iter().map(Victim::pack).map(u64::from).collect())
    }
}

impl Playable for AdmitterHook {
    fn push(engine: &mut Self::Engine, name: &str, words: &[u32], _: Tables) -> Result<(), Fault> {
        match name {
            "update-load" => engine.update_load(&Load::decode(&floats(words))),
            _ => push_to_any(engine, name, words),
        }
    }

    fn answer(engine: &mut Self::Engine, asked: &super::Call, _: Tables) -> Result<Vec<u64>, Fault> {
        if asked.name == "admit-blocks" {
            let answers = engine.admit_blocks(asked.scalars[0] as u32, &asked.lists[0])?;
            return Ok(answers.into_iter().map(|answer| answer as u64).collect());
        }
        let forecast = Forecast::decode(&floats(&asked.lists[1]));
        engine.admit_request(&asked.lists[0], &forecast).map(|verdict: Verdict| vec![verdict.pack()])
    }
}

impl Playable for BalancerHook {
    fn push(engine: &mut Self::Engine, name: &str, words: &[u32], _: Tables) -> Result<(), Fault> {
        push_to_any(engine, name, words)
    }

    fn answer(engine: &mut Self::Engine, asked: &super::Call, _: Tables) -> Result<Vec<u64>, Fault> {
        let [cluster, prefill_queue, decode_step] = [0, 1, 2].map(|list: usize| floats(&asked.lists[list]));
        let thresholds =
            engine.tick(&Snapshot::decode(asked.scalars[0], &cluster, prefill_queue, decode_step))?;
        Ok(thresholds.into_iter().map(|value| u64::from(value.to_bits())).collect())
    }
}

/// What every policy can be told.
fn push_to_any(engine: &mut (impl Policy + ?Sized), name: &str, words: &[u32]) -> Result<(), Fault> {
    match name {
        "adopt" => engine.adopt(&unpacked(words)),
        "import-state" => match engine.import_state(&unpacked(words))? {
            Ok(()) => Ok(()),
            Err(reason) => {
                Err(Fault::Invalid(format!("state refused: {}", crate::text::printable(&reason, 1024))))
            }
        },
        // The record has been checked: a function that is not known does not get here.
        _ => Ok(()),
    }
}

fn floats(words: &[u32]) -> Vec<f32> {
    words.iter().copied().map(f32::from_bits).collect()
}

fn joined(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// The bytes of [`super::packed`].
pub(super) fn unpacked(words: &[u32]) -> Vec<u8> {
    let Some((&len, words)) = words.split_first() else { return Vec::new() };
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.truncate(len as usize);
    bytes
}
