//! A policy that was found, compiled and configured: how it comes to be a [`Version`] of a slot.

use super::learning::Learner;
use super::{Builtin, Hook, Native, Policy, Settings};
use crate::policy::bindings::learner::Learner as LearnerBindings;
use crate::policy::catalog::{Assignment, Catalog, Origin};
use crate::policy::counters::{Breaker, Counters};
use crate::policy::engine::{Digest, Engine, Module};
use crate::policy::fault::TEXT_BYTES;
use crate::policy::guest::Guest;
use crate::policy::log::Log;
use crate::policy::{Error, Fault, Limits, PolicyConfig, description};
use crate::text::printable;
use kvasir_policy::Description;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Where a policy comes from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A default policy by name, as a component.
    Builtin(String),
    /// The native twin of a default policy.
    Native(String),
    File(std::path::PathBuf),
    Bytes {
        name: String,
        bytes: Vec<u8>,
    },
}

pub(super) enum Program<H: Hook> {
    Component(Module),
    Native(Native<H>),
}

/// A policy with its settings, as it serves or served.
pub struct Version<H: Hook> {
    /// Rises with every swap of the slot.
    pub generation: u64,
    pub description: Description,
    pub assignment: Assignment,
    pub counters: Arc<Counters>,
    pub(super) program: Arc<Program<H>>,
    pub(super) breaker: Breaker,
    /// Its `import-state` failed: other instances start cold without another try.
    pub(super) refuses_state: AtomicBool,
    /// For the workers that will take this version up.
    pub(super) ready: Mutex<Vec<Box<H::Engine>>>,
    /// For workers whose engine fails.
    pub(super) spares: Mutex<Vec<Box<H::Engine>>>,
}

impl<H: Hook> Version<H> {
    pub fn digest(&self) -> Option<Digest> {
        match &*self.program {
            Program::Component(module) => Some(module.digest),
            Program::Native(_) => None,
        }
    }

    /// An engine that can serve: describe, configure, open.
    pub(super) fn build(&self, limits: &Limits, log: &Arc<Log>) -> Result<Box<H::Engine>, Error> {
        build::<H>(&self.program, &self.assignment, limits, log).map(|(engine, _)| engine)
    }

    /// As [`Version::build`], with the state of another instance. The inner error is why it did not take it.
    pub(super) fn build_with(
        &self,
        state: &[u8],
        limits: &Limits,
        log: &Arc<Log>,
    ) -> Result<Result<Box<H::Engine>, StateRefused>, Error> {
        let (mut engine, _) = configured::<H>(&self.program, &self.assignment, limits, log)?;
        match engine.import_state(state) {
            Ok(Ok(())) => opened::<H>(engine, &self.assignment, limits).map(Ok),
            Ok(Err(reason)) => Ok(Err(StateRefused::Politely(reason))),
            Err(fault) => Ok(Err(StateRefused::ByFault(fault))),
        }
    }

    pub(super) fn take_ready(&self) -> Option<Box<H::Engine>> {
        self.ready.lock().pop()
    }

    pub(super) fn take_spare(&self) -> Option<Box<H::Engine>> {
        self.spares.lock().pop()
    }

    pub(super) fn learns(&self) -> bool {
        matches!(&*self.program, Program::Component(module) if module.learns)
    }

    /// One more instance, which hears outcomes; `None` if the policy does not learn.
    pub(super) fn build_learner(&self, limits: &Limits, log: &Arc<Log>) -> Result<Option<Learner>, Error> {
        let Program::Component(module) = &*self.program else { return Ok(None) };
        if !module.learns {
            return Ok(None);
        }
        let mut learner = Guest::new(module, limits, log.clone(), |store, i| LearnerBindings::new(store, i))?;
        introduced::<H>(&mut learner, &self.assignment)?;
        Ok(Some(learner))
    }

    pub(super) fn is_component(&self) -> bool {
        matches!(&*self.program, Program::Component(_))
    }
}

/// Why an engine starts cold although its predecessor left a state.
pub(super) enum StateRefused {
    Politely(String),
    ByFault(Fault),
}

fn build<H: Hook>(
    program: &Program<H>,
    assignment: &Assignment,
    limits: &Limits,
    log: &Arc<Log>,
) -> Result<(Box<H::Engine>, Description), Error> {
    let (engine, description) = configured::<H>(program, assignment, limits, log)?;
    Ok((opened::<H>(engine, assignment, limits)?, description))
}

fn opened<H: Hook>(
    mut engine: Box<H::Engine>,
    assignment: &Assignment,
    limits: &Limits,
) -> Result<Box<H::Engine>, Error> {
    let name = || printable(assignment.origin.name(), TEXT_BYTES);
    let failed = |fault| Error::Start { name: name(), step: "open", fault };
    H::open(&mut engine, limits).map_err(failed)?;
    Ok(engine)
}

pub(super) fn configured<H: Hook>(
    program: &Program<H>,
    assignment: &Assignment,
    limits: &Limits,
    log: &Arc<Log>,
) -> Result<(Box<H::Engine>, Description), Error> {
    let mut engine = match program {
        Program::Component(module) => H::instantiate(module, limits, log.clone())?,
        Program::Native(make) => make(),
    };
    let description = introduced::<H>(&mut *engine, assignment)?;
    Ok((engine, description))
}

/// Has an instance describe itself, and take the operator's settings.
fn introduced<H: Hook>(
    engine: &mut (impl Policy + ?Sized),
    assignment: &Assignment,
) -> Result<Description, Error> {
    let name = || printable(assignment.origin.name(), TEXT_BYTES);
    let description =
        engine.describe().map_err(|fault| Error::Start { name: name(), step: "describe", fault })?;
    if description.slot != H::KIND.as_str() {
        let described = printable(&description.slot, TEXT_BYTES);
        return Err(Error::WrongSlot { name: name(), slot: H::KIND, described });
    }
    description::check(&description).map_err(|reason| Error::Description { name: name(), reason })?;
    let configured = engine.configure(&assignment.settings);
    configured
        .map_err(|fault| Error::Start { name: name(), step: "configure", fault })?
        .map_err(|reason| Error::Settings { name: name(), reason: printable(&reason, TEXT_BYTES) })?;
    Ok(description)
}

pub(super) fn prepare<H: Hook>(
    program: Arc<Program<H>>,
    assignment: Assignment,
    generation: u64,
    limits: &Limits,
    log: &Arc<Log>,
    config: &PolicyConfig,
    workers: usize,
) -> Result<Version<H>, Error> {
    let (engine, description) = build::<H>(&program, &assignment, limits, log)?;
    let mut ready = vec![engine];
    for _ in 1..workers {
        ready.push(build::<H>(&program, &assignment, limits, log)?.0);
    }
    let breaker = Breaker::new(config.breaker_faults, config.breaker_window);
    let counters = Arc::default();
    let (refuses_state, ready, spares) = (AtomicBool::new(false), Mutex::new(ready), Mutex::default());
    Ok(Version {
        generation,
        description,
        assignment,
        counters,
        program,
        breaker,
        refuses_state,
        ready,
        spares,
    })
}

fn builtin<H: Hook>(name: &str) -> Result<Builtin<H>, Error> {
    H::builtins().find(|b| b.name == name).ok_or_else(|| {
        let known: Vec<_> = H::builtins().map(|b| b.name).collect();
        let close = known.iter().map(|k| (strsim::damerau_levenshtein(k, name), *k)).min();
        Error::UnknownBuiltin {
            slot: H::KIND,
            name: name.into(),
            known: known.join(", "),
            suggestion: close.filter(|(distance, _)| *distance <= 3).map(|(_, k)| k.into()),
        }
    })
}

pub(super) fn default_native<H: Hook>(settings: Settings) -> Option<(Program<H>, Assignment)> {
    let default = H::builtins().next()?;
    let origin = Origin::Native { name: default.name.into() };
    Some((Program::Native(default.native), Assignment { origin, settings }))
}

/// The bytes of a file that is not too large.
pub(in crate::policy) fn read(engine: &Engine, path: &std::path::Path) -> Result<Vec<u8>, Error> {
    let failed = |source| Error::Read { path: path.into(), source };
    let size = std::fs::metadata(path).map_err(failed)?.len();
    engine.check_size(&path.display().to_string(), size)?;
    std::fs::read(path).map_err(failed)
}

/// A policy that was found and compiled.
pub(super) struct Code<H: Hook> {
    pub(super) program: Program<H>,
    pub(super) origin: Origin,
    /// What must be kept for a restart; built-in policies come with the binary.
    pub(super) bytes: Option<Vec<u8>>,
}

pub(super) fn code<H: Hook>(engine: &Engine, source: Source) -> Result<Code<H>, Error> {
    let (name, bytes) = match source {
        Source::Builtin(name) => {
            let module = engine.compile(H::KIND, &name, builtin::<H>(&name)?.component)?;
            return Ok(Code {
                program: Program::Component(module),
                origin: Origin::Builtin { name },
                bytes: None,
            });
        }
        Source::Native(name) => {
            let program = Program::Native(builtin::<H>(&name)?.native);
            return Ok(Code { program, origin: Origin::Native { name }, bytes: None });
        }
        Source::File(path) => {
            let stem = path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned());
            (stem, read(engine, &path)?)
        }
        Source::Bytes { name, bytes } => (name, bytes),
    };
    let module = engine.compile(H::KIND, &name, &bytes)?;
    let origin = Origin::Module { name, digest: module.digest.to_string() };
    Ok(Code { program: Program::Component(module), origin, bytes: Some(bytes) })
}

pub(super) fn stored_program<H: Hook>(
    engine: &Engine,
    catalog: Option<&Catalog>,
    origin: &Origin,
) -> Result<Program<H>, Error> {
    let source = match (origin, catalog) {
        (Origin::Builtin { name }, _) => Source::Builtin(name.clone()),
        (Origin::Native { name }, _) => Source::Native(name.clone()),
        (Origin::Module { name, digest }, Some(catalog)) => {
            Source::Bytes { name: name.clone(), bytes: catalog.module(digest)? }
        }
        (Origin::Module { .. }, None) => return Err(Error::NoPrevious(H::KIND)),
    };
    code::<H>(engine, source).map(|code| code.program)
}

/// An engine on its own, outside any slot: for replays and benches.
///
/// # Errors
/// As [`Slot::load`](super::Slot::load).
pub fn standalone<H: Hook>(
    engine: &Engine,
    config: &PolicyConfig,
    source: Source,
    settings: Vec<(String, String)>,
) -> Result<(Box<H::Engine>, Description), Error> {
    let code = code::<H>(engine, source)?;
    let assignment = Assignment { origin: code.origin, settings };
    configured::<H>(&code.program, &assignment, &H::KIND.limits(config), &Arc::default())
}
