//! The learning half of a policy that has one: what its learner makes of outcomes, and whether those that decide take it.

use super::panel::{Panel, Times, timed};
use super::trials::{World, brief, engines, happen, rng};
use super::{Row, Trial};
use crate::policy::Fault;
use crate::policy::slot::{Hook, Learner, Policy as _, Prepared};
use kvasir_policy::learning::{End, OUTCOME, OUTCOMES_MAX, Outcome, Times as Ms};
use rand::{Rng as _, RngExt as _};
use rand_chacha::ChaCha8Rng;

const CHECK: &str = "learning";
/// Calls of `observe`.
const LESSONS: usize = 20;
/// Words that a later host may put behind each record.
const LATER_WORDS: usize = 3;
/// An end that the contract does not know.
const UNKNOWN_END: u32 = 9;

/// The checks of the learning half; none if the policy does not learn.
pub(super) fn rows<W: World>(prepared: &Prepared<W::Hook>, trial: &Trial, times: &mut Times) -> Vec<Row> {
    let first = match prepared.learner() {
        Ok(None) => return Vec::new(),
        Ok(Some(learner)) => Ok(learner),
        Err(error) => Err(error.to_string()),
    };
    let learned = first.and_then(|first| Ok([first, new_learner(prepared)?]));
    let learned = learned.and_then(|mut learners| Ok((learn(&mut learners, trial, times)?, learners)));
    let came =
        learned.as_ref().map(|(known, _)| format!("{} B published, the same by two learners", known.len()));
    let mut rows =
        vec![Row::new(CHECK, "outcomes of every kind, also of a later host", came.map_err(Clone::clone))];
    let Ok((known, [mut learner, _])) = learned else { return rows };
    rows.push(Row::new(
        CHECK,
        "two instances that adopt it decide alike",
        adopted::<W>(prepared, trial, &known, times),
    ));
    rows.push(Row::new(CHECK, "an instance that adopts what nobody published", foreign(prepared, trial)));
    rows.push(Row::new(
        CHECK,
        "a learner that has the state of the one before",
        handed_on(prepared, &mut *learner),
    ));
    rows
}

fn new_learner<H: Hook>(prepared: &Prepared<H>) -> Result<Box<dyn Learner>, String> {
    let learner = prepared.learner().map_err(|error| error.to_string())?;
    learner.ok_or_else(|| "it learned a moment ago, and does not now".to_owned())
}

fn failed(call: &'static str) -> impl Fn(Fault) -> String {
    move |fault| format!("`{call}` {fault}")
}

/// What both publish at the end.
fn learn(learners: &mut [Box<dyn Learner>; 2], trial: &Trial, times: &mut Times) -> Result<Vec<u8>, String> {
    let mut rng = rng(trial, LESSONS);
    let mut known = Vec::new();
    for lesson in 0..LESSONS {
        let stride = OUTCOME + if lesson % 4 == 3 { LATER_WORDS } else { 0 };
        let outcomes = outcomes(&mut rng, lesson, stride);
        let mut published = Vec::new();
        for learner in &mut *learners {
            timed(times, "observe", || learner.observe(stride, &outcomes)).map_err(failed("observe"))?;
            published.push(timed(times, "publish", || learner.publish()).map_err(failed("publish"))?);
        }
        known = published.swap_remove(0);
        if known != published[0] {
            return Err(format!(
                "after {} calls of `observe` two learners that heard the same publish otherwise",
                lesson + 1
            ));
        }
    }
    Ok(known)
}

/// How many outcomes come at once: none, one, a few, and as many as there can be.
fn outcomes(rng: &mut ChaCha8Rng, lesson: usize, stride: usize) -> Vec<u32> {
    let count = match lesson {
        0 => 0,
        1 => 1,
        n if n + 1 == LESSONS => OUTCOMES_MAX,
        _ => rng.random_range(2..40),
    };
    let mut words = Vec::with_capacity(count * stride);
    for _ in 0..count {
        let mut record = outcome(rng).encode();
        if rng.random_bool(0.05) {
            record[0] = UNKNOWN_END;
        }
        words.extend(record);
        words.extend((OUTCOME..stride).map(|_| rng.next_u32()));
    }
    words
}

fn outcome(rng: &mut ChaCha8Rng) -> Outcome {
    let end = [End::Finished, End::Rejected, End::Refused, End::GivenUp][rng.random_range(0..4)];
    let finished = end == End::Finished;
    let ms = |rng: &mut ChaCha8Rng| rng.random_bool(0.8).then(|| rng.random_range(0.0..20_000.0));
    let times =
        |rng: &mut ChaCha8Rng| Ms { predicted: ms(rng), measured: if finished { ms(rng) } else { None } };
    let prompt_tokens = if rng.random_bool(0.02) { u32::MAX } else { rng.random_range(0..100_000) };
    Outcome {
        end,
        reason: rng.random_range(0..4),
        decision: rng.next_u64() >> 1,
        tenant: rng.random_range(0..3),
        class: rng.random_range(0..4),
        model: rng.random_range(0..3),
        adapter: rng.random_range(0..3),
        session: rng.random_range(0..5),
        prefill: if finished { rng.random_range(1..9) } else { 0 },
        decode: if finished { rng.random_range(1..9) } else { 0 },
        prompt_tokens,
        cached_tokens: rng.random_range(0..=prompt_tokens),
        fetched_blocks: rng.random_range(0..100),
        decoded_tokens: rng.random_range(0..2_000),
        ttft_ms: times(rng),
        tbt_ms: times(rng),
        queue_ms: ms(rng),
        prefill_ms: times(rng),
        run: rng.random_range(1..3),
    }
}

fn adopted<W: World>(
    prepared: &Prepared<W::Hook>,
    trial: &Trial,
    known: &[u8],
    times: &mut Times,
) -> Result<String, String> {
    let mut world = W::new(W::ORDINARY, trial, rng(trial, W::ORDINARY));
    let mut panel: Panel<W::Hook> = Panel::new(engines(prepared, 2)?);
    let told = panel.tell("adopt", |engine| engine.adopt(known)).and_then(|()| brief(&world, &mut panel));
    told.map_err(|failure| failure.to_string())?;
    happen(&mut world, &mut panel, |_| ())?;
    times.extend(panel.times.remove_entry("adopt"));
    Ok(format!("{} answers", panel.answers))
}

/// "Ignore the rest": a trap would count against the policy.
fn foreign<H: Hook>(prepared: &Prepared<H>, trial: &Trial) -> Result<String, String> {
    let mut noise = [0; 64];
    rng(trial, LESSONS).fill_bytes(&mut noise);
    let tries = [&[][..], &[0], &noise, &[0xff; 4096]];
    for (bytes, mut engine) in tries.into_iter().zip(engines(prepared, tries.len())?) {
        engine
            .adopt(bytes)
            .map_err(|fault| format!("`adopt` of {} B {fault}; ignore what cannot be read", bytes.len()))?;
    }
    Ok("no trap".to_owned())
}

fn handed_on<H: Hook>(prepared: &Prepared<H>, learner: &mut dyn Learner) -> Result<String, String> {
    let state = learner.export_state().map_err(failed("export-state"))?;
    let mut next = new_learner(prepared)?;
    match next.import_state(&state).map_err(failed("import-state"))? {
        Err(reason) => {
            Err(format!("`import-state` refused its own: {}", crate::text::printable(&reason, 200)))
        }
        Ok(()) => next.publish().map(|_| format!("{} B", state.len())).map_err(failed("publish")),
    }
}
