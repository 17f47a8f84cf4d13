//! A policy that was found, compiled and configured: how it comes to be a [`Version`] of a slot.

use super::learning::{Learner, LearnerGuest};
use super::{Builtin, Hook, Native, Policy, Settings};
use crate::policy::bindings::learner::Learner as LearnerBindings;
use crate::policy::catalog::{Assignment, Catalog, Origin, StoredPart};
use crate::policy::chain::{self, Role};
use crate::policy::counters::{Breaker, Counters};
use crate::policy::engine::{Digest, Engine, Module};
use crate::policy::fault::TEXT_BYTES;
use crate::policy::guest::Guest;
use crate::policy::log::Log;
use crate::policy::trust::{self, Signature};
use crate::policy::{Error, Fault, Limits, PolicyConfig, PolicyId, SlotKind, description, nearest};
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
    /// A component, with the signatures beside it.
    File(std::path::PathBuf),
    /// A component that nobody signed.
    Bytes {
        name: String,
        bytes: Vec<u8>,
    },
    Signed {
        name: String,
        bytes: Vec<u8>,
        signatures: Vec<Signature>,
    },
    /// Several that decide together.
    Chain {
        name: String,
        parts: Vec<ChainPart>,
    },
}

impl Source {
    /// Whether an operator who says this means a file, and not the name of a default policy.
    pub fn is_path(what: &str) -> bool {
        what.contains('/') || what.ends_with(".wasm") || what.ends_with(".toml")
    }
}

/// A part of a chain, before its code was looked for.
#[derive(Clone, Debug)]
pub struct ChainPart {
    pub role: Role,
    pub source: Source,
    pub settings: Settings,
}

impl Source {
    /// As a person called it.
    pub fn name(&self) -> &str {
        match self {
            Self::Builtin(name)
            | Self::Native(name)
            | Self::Bytes { name, .. }
            | Self::Signed { name, .. }
            | Self::Chain { name, .. } => name,
            Self::File(path) => path.to_str().unwrap_or_default(),
        }
    }
}

pub(super) enum Program<H: Hook> {
    Component(Module),
    Native(Native<H>),
    Chain { name: String, parts: Vec<ProgramPart<H>> },
}

/// A part of a chain with its code.
pub(super) struct ProgramPart<H: Hook> {
    role: Role,
    program: Arc<Program<H>>,
    assignment: Assignment,
}

impl<H: Hook> Program<H> {
    /// SHA-256 of the component; of a chain, of what its parts are.
    fn digest(&self) -> Option<Digest> {
        match self {
            Self::Component(module) => Some(module.digest),
            Self::Native(_) => None,
            Self::Chain { parts, .. } => {
                let part = |part: &ProgramPart<H>| {
                    let code = part.program.digest().map(|digest| digest.to_string());
                    serde_json::json!([part.role, code, part.assignment])
                };
                let parts: serde_json::Value = parts.iter().map(part).collect();
                Some(Digest::of(parts.to_string().as_bytes()))
            }
        }
    }
}

/// A policy with its settings, as it serves or served.
pub struct Version<H: Hook> {
    /// Rises with every policy that gets a seat of the slot.
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
    /// As a change of the slot knows it.
    pub fn id(&self) -> PolicyId {
        PolicyId {
            name: self.description.name.clone(),
            version: self.description.version.clone(),
            digest: self.digest().map(|digest| digest.to_string()),
            generation: self.generation,
            settings: self.assignment.settings.clone(),
        }
    }

    pub fn digest(&self) -> Option<Digest> {
        self.program.digest()
    }

    /// An engine that can serve: describe, configure, open.
    pub(super) fn build(&self, limits: &Limits, log: &Arc<Log>) -> Result<Box<H::Engine>, Error> {
        build::<H>(&self.program, &self.assignment, limits, log).map(|(engine, _)| engine)
    }

    /// An engine with its settings that was told nothing, for questions beside those of the slot. What it logs is not kept.
    pub(super) fn beside(&self, limits: &Limits) -> Result<Box<H::Engine>, Error> {
        configured::<H>(&self.program, &self.assignment, limits, &Arc::default()).map(|(engine, _)| engine)
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

    /// One more instance, which hears outcomes. Returns `None` if the policy does not learn.
    pub(super) fn build_learner(
        &self,
        limits: &Limits,
        log: &Arc<Log>,
    ) -> Result<Option<Box<dyn Learner>>, Error> {
        learner(&self.program, &self.assignment, limits, log)
    }

    pub(super) fn is_component(&self) -> bool {
        !matches!(&*self.program, Program::Native(_))
    }
}

/// Why an engine starts cold although its predecessor left a state.
pub(super) enum StateRefused {
    Politely(String),
    ByFault(Fault),
}

/// `None` means that the policy does not learn.
fn learner<H: Hook>(
    program: &Program<H>,
    assignment: &Assignment,
    limits: &Limits,
    log: &Arc<Log>,
) -> Result<Option<Box<dyn Learner>>, Error> {
    let Program::Component(module) = program else { return Ok(None) };
    if !module.learns {
        return Ok(None);
    }
    let mut learner: LearnerGuest =
        Guest::new(module, limits, log.clone(), |store, i| LearnerBindings::new(store, i))?;
    introduced::<H>(&mut learner, assignment)?;
    Ok(Some(Box::new(learner)))
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

fn configured<H: Hook>(
    program: &Program<H>,
    assignment: &Assignment,
    limits: &Limits,
    log: &Arc<Log>,
) -> Result<(Box<H::Engine>, Description), Error> {
    let mut engine = match program {
        Program::Component(module) => H::instantiate(module, limits, log.clone())?,
        Program::Native(make) => make(),
        Program::Chain { name, parts } => {
            let ready = |part: &ProgramPart<H>| {
                let (engine, description) = configured::<H>(&part.program, &part.assignment, limits, log)?;
                Ok((description.name, part.role, engine))
            };
            H::chain(name, parts.iter().map(ready).collect::<Result<_, Error>>()?)?
        }
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
    check_settings(&description, assignment)?;
    let configured = engine.configure(&assignment.settings);
    configured
        .map_err(|fault| Error::Start { name: name(), step: "configure", fault })?
        .map_err(|reason| Error::Settings { name: name(), reason: printable(&reason, TEXT_BYTES) })?;
    Ok(description)
}

/// Names are checked before the policy is asked: not every policy says which one it does not know. A chain has none, and
/// says itself where they belong.
fn check_settings(description: &Description, assignment: &Assignment) -> Result<(), Error> {
    let known = || description.settings.iter().map(|setting| setting.name.as_str());
    let unknown = assignment.settings.iter().find(|(given, _)| !known().any(|name| name == given));
    let Some((unknown, _)) = unknown.filter(|_| !matches!(assignment.origin, Origin::Chain { .. })) else {
        return Ok(());
    };
    Err(Error::UnknownSetting {
        name: printable(assignment.origin.name(), TEXT_BYTES),
        setting: printable(unknown, TEXT_BYTES),
        known: if known().next().is_none() { "none".into() } else { known().collect::<Vec<_>>().join(", ") },
        suggestion: nearest(unknown, known()),
    })
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

pub(super) fn builtin<H: Hook>(name: &str) -> Result<Builtin<H>, Error> {
    H::builtins().find(|b| b.name == name).ok_or_else(|| {
        let known: Vec<_> = H::builtins().map(|b| b.name).collect();
        Error::UnknownBuiltin {
            slot: H::KIND,
            name: printable(name, TEXT_BYTES),
            known: known.join(", "),
            suggestion: nearest(name, known),
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

/// Where everybody is trusted, a file of signatures that does not read holds up nobody.
fn signatures_beside(
    engine: &Engine,
    slot: SlotKind,
    path: &std::path::Path,
) -> Result<Vec<Signature>, Error> {
    match trust::read_beside(path) {
        Err(error) if !engine.gate.is_open() => {
            let reason = trust::Refused::Signatures(error.to_string());
            Err(Error::Untrusted { name: path.display().to_string(), slot, reason })
        }
        read => Ok(read.unwrap_or_default()),
    }
}

/// A policy that was found and compiled.
pub(super) struct Code<H: Hook> {
    pub(super) program: Arc<Program<H>>,
    pub(super) origin: Origin,
    /// The components that must be kept for a restart; built-in ones come with the binary.
    pub(super) modules: Vec<Vec<u8>>,
}

/// `compiled` is what need not be compiled again.
pub(super) fn code<H: Hook>(
    engine: &Engine,
    source: Source,
    compiled: &[Arc<Program<H>>],
) -> Result<Code<H>, Error> {
    let (name, bytes, signatures) = match source {
        Source::Builtin(name) => {
            let program = compile(engine, &name, builtin::<H>(&name)?.component, compiled)?;
            return Ok(Code { program, origin: Origin::Builtin { name }, modules: Vec::new() });
        }
        Source::Native(name) => {
            let program = Arc::new(Program::Native(builtin::<H>(&name)?.native));
            return Ok(Code { program, origin: Origin::Native { name }, modules: Vec::new() });
        }
        Source::Chain { name, parts } => return chain(engine, name, parts, compiled),
        Source::File(path) if chain::is_chain(&path) => {
            let (name, parts) = chain::read(&path)?;
            return chain(engine, name, parts, compiled);
        }
        Source::File(path) => {
            let stem = path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned());
            (stem, read(engine, &path)?, signatures_beside(engine, H::KIND, &path)?)
        }
        Source::Bytes { name, bytes } => (name, bytes, Vec::new()),
        Source::Signed { name, bytes, signatures } => (name, bytes, signatures),
    };
    let origin = Origin::Module { name: name.clone(), digest: Digest::of(&bytes).to_string(), signatures };
    // Checked before it is compiled: that takes time and memory, which a stranger's code is not given.
    engine.gate.check(H::KIND, &origin)?;
    let program = compile(engine, &name, &bytes, compiled)?;
    Ok(Code { program, origin, modules: vec![bytes] })
}

fn compile<H: Hook>(
    engine: &Engine,
    name: &str,
    bytes: &[u8],
    compiled: &[Arc<Program<H>>],
) -> Result<Arc<Program<H>>, Error> {
    let digest = Digest::of(bytes);
    let is_same = |program: &&Arc<Program<H>>| matches!(&***program, Program::Component(module) if module.digest == digest);
    if let Some(program) = compiled.iter().find(is_same) {
        return Ok(Arc::clone(program));
    }
    let module = engine.compile(H::KIND, name, bytes)?;
    Ok(Arc::new(Program::Component(entered::<H>(engine, module))))
}

/// Has the core module be entered alone, if that answers as the component does.
pub(in crate::policy) fn entered<H: Hook>(engine: &Engine, module: Module) -> Module {
    if module.core.is_none() {
        return module;
    }
    let limits = engine.limits(H::KIND);
    let wrapped = module.wrapped();
    let instance = |module| H::instantiate(module, &limits, Arc::default());
    let agree = || {
        let (mut component, mut core) = (instance(&wrapped)?, instance(&module)?);
        let failed = |fault| Error::Start { name: module.name.clone(), step: "a trial", fault };
        let describe = |engine: &mut H::Engine| Ok((engine.describe()?, engine.configure(&[])?));
        let same = describe(&mut component).and_then(|one| Ok(one == describe(&mut core)?));
        same.and_then(|same| Ok(same && H::agree(&mut component, &mut core)?)).map_err(failed)
    };
    match agree() {
        Ok(true) => module,
        Ok(false) => {
            tracing::info!(
                policy = module.name,
                "is entered as a component: its core module answers otherwise"
            );
            wrapped
        }
        Err(reason) => {
            tracing::debug!(policy = module.name, %reason, "is entered as a component");
            wrapped
        }
    }
}

fn chain<H: Hook>(
    engine: &Engine,
    name: String,
    parts: Vec<ChainPart>,
    compiled: &[Arc<Program<H>>],
) -> Result<Code<H>, Error> {
    chain::check(H::KIND, &name, &parts)?;
    let (mut programs, mut stored, mut modules) = (Vec::new(), Vec::new(), Vec::new());
    for ChainPart { role, source, settings } in parts {
        let code = code::<H>(engine, source, compiled)?;
        modules.extend(code.modules);
        let assignment = Assignment { origin: code.origin, settings };
        stored.push(StoredPart { role, assignment: assignment.clone() });
        programs.push(ProgramPart { role, program: code.program, assignment });
    }
    let program = Arc::new(Program::Chain { name: name.clone(), parts: programs });
    Ok(Code { program, origin: Origin::Chain { name, parts: stored }, modules })
}

pub(super) fn stored_program<H: Hook>(
    engine: &Engine,
    catalog: Option<&Catalog>,
    origin: &Origin,
) -> Result<Arc<Program<H>>, Error> {
    code::<H>(engine, stored_source(H::KIND, catalog, origin)?, &[]).map(|code| code.program)
}

/// Where the code of what was loaded can be read again.
fn stored_source(slot: SlotKind, catalog: Option<&Catalog>, origin: &Origin) -> Result<Source, Error> {
    Ok(match (origin, catalog) {
        (Origin::Builtin { name }, _) => Source::Builtin(name.clone()),
        (Origin::Native { name }, _) => Source::Native(name.clone()),
        (Origin::Module { name, digest, signatures }, Some(catalog)) => Source::Signed {
            name: name.clone(),
            bytes: catalog.module(digest)?,
            signatures: signatures.clone(),
        },
        (Origin::Module { .. }, None) => return Err(Error::NotKept(slot)),
        (Origin::Chain { name, parts }, _) => {
            let part = |part: &StoredPart| {
                let source = stored_source(slot, catalog, &part.assignment.origin)?;
                Ok(ChainPart { role: part.role, source, settings: part.assignment.settings.clone() })
            };
            Source::Chain { name: name.clone(), parts: parts.iter().map(part).collect::<Result<_, Error>>()? }
        }
    })
}

/// A policy that was found and compiled once, of which engines are made outside any slot: for replays and benches.
pub struct Prepared<H: Hook> {
    program: Arc<Program<H>>,
    assignment: Assignment,
    limits: Limits,
    /// What its engines say.
    log: Arc<Log>,
}

impl<H: Hook> Prepared<H> {
    /// # Errors
    /// The policy cannot be found or compiled.
    pub fn new(
        engine: &Engine,
        config: &PolicyConfig,
        source: Source,
        settings: Settings,
    ) -> Result<Self, Error> {
        let code = code::<H>(engine, source, &[])?;
        let assignment = Assignment { origin: code.origin, settings };
        let (limits, log) = (H::KIND.limits(config), Arc::default());
        Ok(Self { program: code.program, assignment, limits, log })
    }

    /// The same policy within the limits of another configuration, with a log of its own.
    pub fn within(&self, config: &PolicyConfig) -> Self {
        let (program, assignment) = (Arc::clone(&self.program), self.assignment.clone());
        Self { program, assignment, limits: H::KIND.limits(config), log: Arc::default() }
    }

    /// The same policy, entered as a component however else it could be.
    pub fn wrapped(&self) -> Self {
        let program = match &*self.program {
            Program::Component(module) => Arc::new(Program::Component(module.wrapped())),
            Program::Native(_) | Program::Chain { .. } => Arc::clone(&self.program),
        };
        let (assignment, limits, log) = (self.assignment.clone(), self.limits.clone(), Arc::clone(&self.log));
        Self { program, assignment, limits, log }
    }

    /// What an engine of it logged last: a panic's message, where the fault says "unreachable".
    pub fn last_words(&self) -> Option<String> {
        Some(self.log.read().0.pop()?.text)
    }

    /// An engine with its settings, which was told nothing yet.
    ///
    /// # Errors
    /// It cannot be instantiated, or what it says of itself or its settings is refused.
    pub fn engine(&self) -> Result<(Box<H::Engine>, Description), Error> {
        configured::<H>(&self.program, &self.assignment, &self.limits, &self.log)
    }

    /// Its learner, which heard nothing yet. `None` means that the policy does not learn.
    ///
    /// # Errors
    /// As [`Prepared::engine`].
    pub fn learner(&self) -> Result<Option<Box<dyn Learner>>, Error> {
        learner(&self.program, &self.assignment, &self.limits, &self.log)
    }

    /// Whether its engines enter the core module alone, without the component around it.
    pub(in crate::policy) fn is_unwrapped(&self) -> bool {
        matches!(&*self.program, Program::Component(module) if module.core.is_some())
    }

    /// What the memories of its engines take now, bytes.
    pub fn memory_in_use(&self) -> usize {
        self.limits.in_use.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// What one engine may take, bytes.
    pub fn memory_bytes_max(&self) -> usize {
        self.limits.memory_bytes
    }

    /// SHA-256 of the component. `None` means that the policy is native.
    pub fn digest(&self) -> Option<Digest> {
        self.program.digest()
    }
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
    Prepared::<H>::new(engine, config, source, settings)?.engine()
}
