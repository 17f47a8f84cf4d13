//! What is tried with a policy, whatever its slot.

use super::panel::{Failure, Panel, Times};
use super::{Row, Trial, learning};
use crate::policy::PolicyConfig;
use crate::policy::record::{Call, FORMAT, Playable, PolicyOf, Push, Record, push_all};
use crate::policy::slot::{Hook, Policy as _, Prepared};
use crate::policy::{Engine, Error, Fault, Source};
use kvasir_policy::{Description, Setting};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// Something that a policy of one slot can find itself in, and what happens there.
pub(super) trait World: Sized {
    type Hook: Playable;
    /// The kinds of its worlds.
    const KINDS: &'static [&'static str];
    /// The kind in which a state is handed on.
    const ORDINARY: usize;
    /// Whether a successor that has the state and was told what there is decides as its predecessor would. False where the host
    /// cannot tell all that happened.
    const SUCCESSOR_DECIDES_ALIKE: bool;

    fn new(kind: usize, trial: &Trial, rng: ChaCha8Rng) -> Self;

    /// How often something happens.
    fn steps(&self) -> usize {
        200
    }

    /// How a host with such a world is configured.
    fn config(&self, trial: &Trial) -> PolicyConfig {
        trial.config.clone()
    }

    /// What is tried with policies of this slot alone.
    fn own(_prepared: &Prepared<Self::Hook>, _trial: &Trial) -> Option<Row> {
        None
    }

    /// What there is, for an engine that knows nothing, as a recording has it.
    fn told(&self) -> Vec<Push>;

    /// Something that it can be asked then.
    fn asked(&mut self) -> Call;

    /// Something happens, and the policy is told of it and asked.
    ///
    /// # Errors
    /// Its answers differ, or are not within the contract.
    fn step(&mut self, panel: &mut Panel<Self::Hook>) -> Result<(), Failure>;
}

/// The policy that is tried.
pub(super) struct Policy<'a> {
    pub(super) engine: &'a Engine,
    pub(super) trial: &'a Trial,
    pub(super) source: Source,
}

/// The largest state that is handed on.
const STATE_BYTES_MAX: usize = 16 << 20;

pub(super) fn rows<W: World>(policy: &Policy<'_>, description: &Description) -> Result<Vec<Row>, Error> {
    let Policy { engine, trial, source } = policy;
    let prepared = Prepared::<W::Hook>::new(engine, &trial.config, source.clone(), trial.settings.clone())?;
    let mut rows = Vec::new();
    if !trial.settings.is_empty() {
        let given: Vec<_> = trial.settings.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let taken = prepared.engine().map(|_| "accepted".to_owned()).map_err(|error| error.to_string());
        let refused = taken.is_err();
        rows.push(Row::new("settings", given.join(", "), taken));
        if refused {
            return Ok(rows);
        }
    }
    rows.extend([unknown_setting(&prepared), defaults(&prepared, &description.settings)]);
    let mut measured = Measured::default();
    for kind in 0..W::KINDS.len() {
        rows.push(answers::<W>(&prepared, trial, kind, &mut measured));
    }
    rows.extend(W::own(&prepared, trial));
    rows.push(state::<W>(&prepared, trial));
    rows.push(foreign_state(&prepared, trial));
    rows.extend(learning::rows::<W>(&prepared, trial, &mut measured.times));
    rows.extend(measured.times());
    rows.push(measured.memory(prepared.memory_bytes_max()));
    Ok(rows)
}

fn configured<H: Hook>(
    prepared: &Prepared<H>,
    settings: &[(String, String)],
) -> Result<Result<(), String>, String> {
    let (mut engine, _) = prepared.engine().map_err(|error| error.to_string())?;
    engine.configure(settings).map_err(|fault| fault.to_string())
}

fn unknown_setting<H: Hook>(prepared: &Prepared<H>) -> Row {
    const NAME: &str = "no-such-setting";
    let came = match configured(prepared, &[(NAME.to_owned(), "1".to_owned())]) {
        Ok(Err(reason)) if reason.contains(NAME) => {
            Ok(format!("refused: {}", crate::text::printable(&reason, 120)))
        }
        Ok(Err(reason)) => {
            Err(format!("refused by a text that does not name it: {}", crate::text::printable(&reason, 120)))
        }
        Ok(Ok(())) => Err("accepted; an operator's slip of the pen would go unnoticed".to_owned()),
        Err(fault) => Err(fault),
    };
    Row::new("settings", "one that it does not have", came)
}

fn defaults<H: Hook>(prepared: &Prepared<H>, settings: &[Setting]) -> Row {
    let asked = "each default, as an operator could give it";
    if settings.is_empty() {
        return Row::skipped("settings", asked, "it has none");
    }
    let all: Vec<_> =
        settings.iter().map(|setting| (setting.name.clone(), setting.default.clone())).collect();
    let came = match configured(prepared, &all) {
        Ok(Ok(())) => Ok(format!("{} accepted", all.len())),
        Ok(Err(reason)) => Err(format!("refused: {}", crate::text::printable(&reason, 200))),
        Err(fault) => Err(fault),
    };
    Row::new("settings", asked, came)
}

/// What was seen while it answered.
#[derive(Default)]
struct Measured {
    times: Times,
    memory_bytes: usize,
}

fn answers<W: World>(
    prepared: &Prepared<W::Hook>,
    trial: &Trial,
    kind: usize,
    measured: &mut Measured,
) -> Row {
    let mut world = W::new(kind, trial, rng(trial, kind));
    let prepared = &prepared.within(&world.config(trial));
    // However it is entered: what depends on the bits of a NaN differs, too.
    let both = [prepared, &prepared.wrapped()];
    let came = both.into_iter().map(engine).collect::<Result<_, _>>().and_then(|engines| {
        let mut panel = Panel::new(engines);
        let gone_through = brief(&world, &mut panel)
            .map_err(|failure| failure.to_string())
            .and_then(|()| happen(&mut world, &mut panel, |_| measured.look(prepared)));
        measured.add(std::mem::take(&mut panel.times));
        gone_through.map(|()| format!("{} answers, the same from two instances", panel.answers))
    });
    let came = came.map_err(|failed| match prepared.last_words() {
        Some(said) => format!("{failed}; the last line of its log: {}", crate::text::printable(&said, 200)),
        None => failed,
    });
    Row::new("answers", W::KINDS[kind], came)
}

pub(super) fn engines<H: Hook>(prepared: &Prepared<H>, count: usize) -> Result<Vec<Box<H::Engine>>, String> {
    (0..count).map(|_| engine(prepared)).collect()
}

fn engine<H: Hook>(prepared: &Prepared<H>) -> Result<Box<H::Engine>, String> {
    prepared.engine().map(|(engine, _)| engine).map_err(|error| error.to_string())
}

pub(super) fn brief<W: World>(world: &W, panel: &mut Panel<W::Hook>) -> Result<(), Failure> {
    let told = world.told();
    panel.tell("open", |engine| tell::<W>(&told, engine))
}

fn tell<W: World>(told: &[Push], engine: &mut <W::Hook as Hook>::Engine) -> Result<(), Fault> {
    push_all::<W::Hook>(engine, told).map(drop).map_err(|(_, fault)| fault)
}

pub(super) fn happen<W: World>(
    world: &mut W,
    panel: &mut Panel<W::Hook>,
    mut after: impl FnMut(usize),
) -> Result<(), String> {
    for step in 0..world.steps() {
        world.step(panel).map_err(|failure| format!("step {step}: {failure}"))?;
        after(step);
    }
    Ok(())
}

/// Each kind of world has numbers of its own.
pub(super) fn rng(trial: &Trial, kind: usize) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(trial.seed);
    rng.set_stream(kind as u64);
    rng
}

/// Steps of a world after which it is recorded; all have so many.
const RECORDED_AT: [usize; 4] = [0, 3, 9, 19];

/// What a fresh instance answers in the midst of each world.
///
/// # Errors
/// The policy fails, or answers what the contract does not allow.
pub(super) fn records<W: World>(policy: &Policy<'_>, of: &PolicyOf) -> Result<Vec<Record>, String> {
    let Policy { engine, trial, source } = policy;
    let prepared = Prepared::<W::Hook>::new(engine, &trial.config, source.clone(), trial.settings.clone())
        .map_err(|error| error.to_string())?;
    let mut records = Vec::new();
    for kind in 0..W::KINDS.len() {
        let mut world = W::new(kind, trial, rng(trial, kind));
        let mut panel = Panel::new(engines(&prepared, 1)?);
        brief(&world, &mut panel).map_err(|failure| failure.to_string())?;
        for step in 0..=RECORDED_AT[RECORDED_AT.len() - 1] {
            world.step(&mut panel).map_err(|failure| failure.to_string())?;
            if RECORDED_AT.contains(&step) {
                let record = record(&mut world, of, records.len() as u64 + 1);
                records.push(answered(&prepared, record)?);
            }
        }
    }
    Ok(records)
}

/// Without the time of day: the same policy gives the same file.
fn record<W: World>(world: &mut W, of: &PolicyOf, id: u64) -> Record {
    Record {
        record: FORMAT,
        slot: W::Hook::KIND.to_string(),
        id,
        at_ms: 0,
        policy: of.clone(),
        pushed: world.told(),
        asked: world.asked(),
        answer: Vec::new(),
        scores: Vec::new(),
        fallback: None,
        ns: 0,
    }
}

fn answered<H: Playable>(prepared: &Prepared<H>, record: Record) -> Result<Record, String> {
    let (mut engine, _) = prepared.engine().map_err(|error| error.to_string())?;
    let played = record.play::<H>(&mut engine, false).map_err(|error| error.to_string())?;
    Ok(Record { answer: played.answer, ..record })
}

fn state<W: World>(prepared: &Prepared<W::Hook>, trial: &Trial) -> Row {
    let check = "state";
    let alike = W::SUCCESSOR_DECIDES_ALIKE;
    let asked = if alike {
        "a successor that has it decides as its predecessor"
    } else {
        "two successors that have it decide alike"
    };
    match handed_on::<W>(prepared, trial) {
        Ok(None) => Row::skipped(check, asked, "it hands nothing on"),
        Ok(Some((bytes, answers))) => Row::new(check, asked, Ok(format!("{bytes} B, {answers} answers"))),
        Err(reason) => Row::new(check, asked, Err(reason)),
    }
}

/// Size of the state, and how many answers were compared. `None` means that there is no state.
fn handed_on<W: World>(prepared: &Prepared<W::Hook>, trial: &Trial) -> Result<Option<(usize, u64)>, String> {
    let text = |failure: Failure| failure.to_string();
    let mut world = W::new(W::ORDINARY, trial, rng(trial, W::ORDINARY));
    let mut panel = Panel::new(engines(prepared, 1)?);
    brief(&world, &mut panel).map_err(text)?;
    happen(&mut world, &mut panel, |_| ())?;
    let state = panel.state().map_err(text)?;
    match state.len() {
        0 => return Ok(None),
        len if len > STATE_BYTES_MAX => {
            return Err(format!("{len} B; at most {STATE_BYTES_MAX} are handed on"));
        }
        _ => {}
    }
    let alike = W::SUCCESSOR_DECIDES_ALIKE;
    let mut successors = engines(prepared, if alike { 1 } else { 2 })?;
    for successor in &mut successors {
        let taken = successor.import_state(&state).map_err(|fault| format!("`import-state` {fault}"))?;
        taken.map_err(|reason| {
            format!("`import-state` refused its own: {}", crate::text::printable(&reason, 200))
        })?;
        tell::<W>(&world.told(), successor).map_err(|fault| format!("after `import-state`: {fault}"))?;
    }
    if !alike {
        panel.engines.clear();
    }
    panel.engines.append(&mut successors);
    panel.answers = 0;
    happen(&mut world, &mut panel, |_| ()).map_err(|reason| format!("after the hand-over, {reason}"))?;
    Ok(Some((state.len(), panel.answers)))
}

/// A later or damaged version's state must be refused by a text, not by a trap.
fn foreign_state<H: Hook>(prepared: &Prepared<H>, trial: &Trial) -> Row {
    let mut noise = [0; 64];
    rng(trial, usize::MAX).fill_bytes(&mut noise);
    let tries: [&[u8]; 4] = [&[], &[0], &noise, &[0xff; 4096]];
    let came = tries.into_iter().try_for_each(|state| {
        let (mut engine, _) = prepared.engine().map_err(|error| error.to_string())?;
        let answered = engine.import_state(state).map(drop);
        answered.map_err(|fault| format!("`import-state` of {} B {fault}; answer with an error", state.len()))
    });
    Row::new("state", "one that it did not write", came.map(|()| "no trap".to_owned()))
}

impl Measured {
    /// Two engines are alive.
    fn look<H: Hook>(&mut self, prepared: &Prepared<H>) {
        self.memory_bytes = self.memory_bytes.max(prepared.memory_in_use() / 2);
    }

    fn add(&mut self, times: Times) {
        for (call, seen) in times {
            match self.times.entry(call) {
                std::collections::btree_map::Entry::Vacant(free) => drop(free.insert(seen)),
                // All histograms have the same bounds.
                std::collections::btree_map::Entry::Occupied(mut known) => drop(known.get_mut().add(seen)),
            }
        }
    }

    /// A line for each function. What is past its deadline has failed already.
    fn times(&self) -> impl Iterator<Item = Row> {
        self.times.iter().map(|(call, times)| {
            let us = |ns: u64| ns as f64 / 1e3;
            let [median, p99] = [0.5, 0.99].map(|quantile| us(times.value_at_quantile(quantile)));
            let came = format!(
                "{median:.1} µs, p99 {p99:.1} µs, worst {:.1} µs of {}",
                us(times.max()),
                times.len()
            );
            Row::new("time", *call, Ok(came))
        })
    }

    fn memory(&self, limit: usize) -> Row {
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        let came = format!("{:.1} MiB at most", mib(self.memory_bytes));
        Row::new("memory", format!("{:.0} MiB for an instance", mib(limit)), Ok(came))
    }
}
