//! One slot: the version that serves, the one before it, and the workers that call them.
//!
//! A load prepares everything beside the traffic (compile, instantiate one guest per worker,
//! configure) and then publishes the new [`Version`] with one pointer exchange. A worker notices at
//! its next call, takes a ready guest and drops its old one; no call is ever without a version.
//! Lock order: `Slot::change` before `Slot::previous`; `Slot::totals` and `Version::ready` are leaves.

use super::catalog::{Assignment, Catalog, Origin};
use super::counters::{Breaker, CounterValues, Counters, Totals};
use super::engine::{Digest, Engine, Module};
use super::log::Log;
use super::{Error, Fault, Limits, PolicyConfig, SlotKind};
use arc_swap::{ArcSwap, Cache};
use kvasir_policy::Description;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// What differs between the four slots.
pub trait Hook: Sized + 'static {
    const KIND: SlotKind;
    /// The hot functions, behind either engine.
    type Engine: Policy + ?Sized + 'static;

    /// Name, component and native twin of each default policy; the first is the default.
    fn builtins() -> impl Iterator<Item = Builtin<Self>>;

    /// # Errors
    /// The module cannot be instantiated.
    fn instantiate(module: &Module, limits: Limits, log: Arc<Log>) -> Result<Box<Self::Engine>, Error>;
}

/// A default policy.
pub struct Builtin<H: Hook> {
    pub name: &'static str,
    pub component: &'static [u8],
    pub native: Native<H>,
}

/// Makes a native engine.
pub type Native<H> = Box<dyn Fn() -> Box<<H as Hook>::Engine> + Send + Sync>;

/// The cold functions every engine has (`control` of the contract).
pub trait Policy: Send {
    /// # Errors
    /// Any [`Fault`].
    fn describe(&mut self) -> Result<Description, Fault>;

    /// The inner error is the policy's own refusal.
    ///
    /// # Errors
    /// Any [`Fault`].
    fn configure(&mut self, settings: &[(String, String)]) -> Result<Result<(), String>, Fault>;

    /// # Errors
    /// Any [`Fault`].
    fn export_state(&mut self) -> Result<Vec<u8>, Fault>;

    /// # Errors
    /// Any [`Fault`].
    fn import_state(&mut self, state: &[u8]) -> Result<Result<(), String>, Fault>;
}

/// Largest `export-state` handed on.
const MAX_STATE_BYTES: usize = 16 << 20;

enum Program<H: Hook> {
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
    program: Arc<Program<H>>,
    breaker: Breaker,
    ready: Mutex<Vec<Box<H::Engine>>>,
}

impl<H: Hook> Version<H> {
    pub fn digest(&self) -> Option<Digest> {
        match &*self.program {
            Program::Component(module) => Some(module.digest),
            Program::Native(_) => None,
        }
    }

    /// A configured engine: describe, configure.
    fn build(&self, limits: Limits, log: &Arc<Log>) -> Result<Box<H::Engine>, Error> {
        build::<H>(&self.program, &self.assignment, limits, log).map(|(engine, _)| engine)
    }

    fn take_ready(&self) -> Option<Box<H::Engine>> {
        lock(&self.ready).pop()
    }
}

fn build<H: Hook>(
    program: &Program<H>,
    assignment: &Assignment,
    limits: Limits,
    log: &Arc<Log>,
) -> Result<(Box<H::Engine>, Description), Error> {
    let mut engine = match program {
        Program::Component(module) => H::instantiate(module, limits, log.clone())?,
        Program::Native(make) => make(),
    };
    let name = || assignment.origin.name().to_owned();
    let description =
        engine.describe().map_err(|fault| Error::Start { name: name(), step: "describe", fault })?;
    if description.slot != H::KIND.as_str() {
        return Err(Error::WrongSlot { name: name(), slot: H::KIND, described: description.slot });
    }
    let configured = engine.configure(&assignment.settings);
    configured
        .map_err(|fault| Error::Start { name: name(), step: "configure", fault })?
        .map_err(|reason| Error::Settings { name: name(), reason })?;
    Ok((engine, description))
}

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

/// The slot itself; shared by workers, the loader and the builder thread.
pub struct Slot<H: Hook> {
    current: Arc<ArcSwap<Version<H>>>,
    previous: Mutex<Option<Previous<H>>>,
    /// Held by whoever changes the version, so that loads, rollbacks and trips come one by one.
    change: Mutex<()>,
    pub log: Arc<Log>,
    /// Why the breaker last took a policy out of service.
    last_trip: Mutex<Option<String>>,
    /// Of the versions before `current`, which changes under this lock.
    totals: Mutex<Totals>,
    generations: AtomicU64,
    workers: AtomicUsize,
    engine: Engine,
    limits: Limits,
    config: PolicyConfig,
    catalog: Option<Catalog>,
    builder: Builder,
}

/// What served before. Compiled if it served since the start, else rebuilt when it is wanted.
struct Previous<H: Hook> {
    assignment: Assignment,
    program: Option<Arc<Program<H>>>,
}

impl<H: Hook> Clone for Previous<H> {
    fn clone(&self) -> Self {
        Self { assignment: self.assignment.clone(), program: self.program.clone() }
    }
}

/// Hands work to the thread that builds instances beside the traffic.
#[derive(Clone)]
pub struct Builder(mpsc::Sender<Box<dyn FnOnce() + Send>>);

impl Builder {
    /// # Errors
    /// The thread cannot be started.
    pub fn start() -> Result<Self, Error> {
        let (sender, jobs) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let thread = std::thread::Builder::new().name("kvasir-policy".into());
        thread
            .spawn(move || jobs.into_iter().for_each(|job| job()))
            .map_err(|e| Error::Engine(format!("cannot start the builder thread: {e}")))?;
        Ok(Self(sender))
    }

    fn submit(&self, job: impl FnOnce() + Send + 'static) {
        // The receiver ends with the last sender, so this cannot fail while `self` lives.
        let _ = self.0.send(Box::new(job));
    }
}

impl<H: Hook> Slot<H> {
    /// Restores the slot's assignment from the catalogue, or takes `wanted`.
    ///
    /// A stored policy that no longer starts is reported in the slot's trip reason and replaced by
    /// `wanted`, so that a daemon always comes up.
    ///
    /// # Errors
    /// `wanted` cannot be brought into service.
    pub fn open(
        engine: Engine,
        config: &PolicyConfig,
        wanted: (Source, Vec<(String, String)>),
        catalog: Option<Catalog>,
        builder: Builder,
    ) -> Result<Arc<Self>, Error> {
        let limits = H::KIND.limits(config);
        let log = Arc::new(Log::default());
        let prepare = |program, assignment, generation| {
            prepare::<H>(Arc::new(program), assignment, generation, limits, &log, config, 1)
        };
        let stored = catalog.as_ref().map(|c| c.assignments(H::KIND)).transpose()?.flatten();
        let (stored, previous) = stored.map_or((None, None), |(current, previous)| (Some(current), previous));
        let mut last_trip = None;
        let restored = stored.and_then(|assignment| {
            let program = stored_program::<H>(&engine, catalog.as_ref(), &assignment.origin);
            let version = program.and_then(|program| prepare(program, assignment, 1));
            version.map_err(|e| last_trip = Some(format!("not restored: {e}"))).ok()
        });
        let version = match restored {
            Some(version) => version,
            None => {
                let code = code::<H>(&engine, wanted.0)?;
                prepare(code.program, Assignment { origin: code.origin, settings: wanted.1 }, 1)?
            }
        };
        Ok(Arc::new(Self {
            current: Arc::new(ArcSwap::from_pointee(version)),
            previous: Mutex::new(previous.map(|assignment| Previous { assignment, program: None })),
            change: Mutex::new(()),
            log,
            last_trip: Mutex::new(last_trip),
            totals: Mutex::default(),
            generations: AtomicU64::new(1),
            workers: AtomicUsize::new(0),
            engine,
            limits,
            config: config.clone(),
            catalog,
            builder,
        }))
    }

    pub fn current(&self) -> Arc<Version<H>> {
        self.current.load_full()
    }

    /// What a rollback would bring back.
    pub fn previous(&self) -> Option<Assignment> {
        lock(&self.previous).as_ref().map(|p| p.assignment.clone())
    }

    pub fn last_trip(&self) -> Option<String> {
        lock(&self.last_trip).clone()
    }

    /// What all versions counted since the start.
    pub fn totals(&self) -> CounterValues {
        lock(&self.totals).with(&self.current().counters)
    }

    /// Brings a policy into service. Blocking (compiles): not for the hot path.
    ///
    /// # Errors
    /// Any step failed; the version in service is untouched.
    pub fn load(&self, source: Source, settings: Vec<(String, String)>) -> Result<Arc<Version<H>>, Error> {
        let code = code::<H>(&self.engine, source)?;
        let assignment = Assignment { origin: code.origin, settings };
        let _change = lock(&self.change);
        let version = self.prepare(Arc::new(code.program), assignment)?;
        self.publish(version, code.bytes.as_deref(), None)
    }

    /// Puts the previous version back; what served becomes the previous one.
    ///
    /// # Errors
    /// There is none, it no longer starts, or the catalogue cannot be written.
    pub fn rollback(&self) -> Result<Arc<Version<H>>, Error> {
        let _change = lock(&self.change);
        let version = self.prepare_previous()?;
        self.publish(version, None, None)
    }

    fn prepare_previous(&self) -> Result<Version<H>, Error> {
        let previous = lock(&self.previous).clone().ok_or(Error::NoPrevious(H::KIND))?;
        let program = match previous.program {
            Some(program) => program,
            None => {
                Arc::new(stored_program(&self.engine, self.catalog.as_ref(), &previous.assignment.origin)?)
            }
        };
        self.prepare(program, previous.assignment)
    }

    fn prepare(&self, program: Arc<Program<H>>, assignment: Assignment) -> Result<Version<H>, Error> {
        let generation = self.generations.fetch_add(1, Ordering::Relaxed) + 1;
        let workers = self.workers.load(Ordering::Relaxed).max(1);
        prepare(program, assignment, generation, self.limits, &self.log, &self.config, workers)
    }

    /// Writes the catalogue, then exchanges the pointer: after a crash in between, the policy that
    /// is stored is one that was proven to start. A `trip` is why the old version may not come back; whoever
    /// sees the new version sees it too.
    fn publish(
        &self,
        version: Version<H>,
        module: Option<&[u8]>,
        trip: Option<String>,
    ) -> Result<Arc<Version<H>>, Error> {
        let version = Arc::new(version);
        let old = self.current();
        let previous = trip
            .is_none()
            .then(|| Previous { assignment: old.assignment.clone(), program: Some(old.program.clone()) });
        if let Some(catalog) = &self.catalog {
            let previous = previous.as_ref().map(|p| &p.assignment);
            catalog.assign(H::KIND, &version.assignment, previous, module)?;
        }
        *lock(&self.previous) = previous;
        if trip.is_some() {
            *lock(&self.last_trip) = trip;
        }
        let mut totals = lock(&self.totals);
        self.current.store(version.clone());
        totals.retire(old.counters.clone());
        drop(totals);
        // Unused guests of the old version would keep their memory until its last Arc goes.
        lock(&old.ready).clear();
        Ok(version)
    }

    /// Takes generation `broken` out of service: back to the previous version, or to the native
    /// twin of the default.
    fn trip(&self, broken: u64, fault: &Fault) {
        let _change = lock(&self.change);
        let current = self.current();
        if current.generation != broken {
            return; // replaced meanwhile
        }
        let reason = format!("`{}` taken out of service: {fault}", current.description.name);
        self.log.add(1, &reason);
        let back = self.prepare_previous().ok().or_else(|| {
            let (program, assignment) = default_native::<H>()?;
            self.prepare(Arc::new(program), assignment).ok()
        });
        let Some(version) = back else { return };
        let serves = format!("{reason}; `{}` serves", version.description.name);
        if let Err(e) = self.publish(version, None, Some(serves)) {
            self.log.add(1, &format!("breaker: {e}"));
        }
    }

    fn rebuild(self: &Arc<Self>, version: &Arc<Version<H>>) {
        let (slot, version) = (self.clone(), version.clone());
        self.builder.clone().submit(move || {
            if slot.current().generation != version.generation {
                return;
            }
            match version.build(slot.limits, &slot.log) {
                Ok(engine) => lock(&version.ready).push(engine),
                Err(e) => slot.log.add(1, &format!("instance not rebuilt: {e}")),
            }
        });
    }

    /// A worker with an engine of the version in service.
    pub fn worker(self: &Arc<Self>) -> Worker<H> {
        self.workers.fetch_add(1, Ordering::Relaxed);
        let version = self.current();
        let engine = version.take_ready().or_else(|| version.build(self.limits, &self.log).ok());
        Worker {
            slot: self.clone(),
            cache: Cache::new(self.current.clone()),
            version,
            engine,
            fresh: true,
            rebuild_asked: false,
            retry: Backoff::default(),
        }
    }
}

fn prepare<H: Hook>(
    program: Arc<Program<H>>,
    assignment: Assignment,
    generation: u64,
    limits: Limits,
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
    Ok(Version { generation, description, assignment, counters, program, breaker, ready: Mutex::new(ready) })
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

fn default_native<H: Hook>() -> Option<(Program<H>, Assignment)> {
    let default = H::builtins().next()?;
    let origin = Origin::Native { name: default.name.into() };
    Some((Program::Native(default.native), Assignment { origin, settings: Vec::new() }))
}

fn read(engine: &Engine, path: &std::path::Path) -> Result<Vec<u8>, Error> {
    let failed = |source| Error::Read { path: path.into(), source };
    let size = std::fs::metadata(path).map_err(failed)?.len();
    engine.check_size(&path.display().to_string(), size)?;
    std::fs::read(path).map_err(failed)
}

/// A policy that was found and compiled.
struct Code<H: Hook> {
    program: Program<H>,
    origin: Origin,
    /// What must be kept for a restart; built-in policies come with the binary.
    bytes: Option<Vec<u8>>,
}

fn code<H: Hook>(engine: &Engine, source: Source) -> Result<Code<H>, Error> {
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

fn stored_program<H: Hook>(
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
/// As [`Slot::load`].
pub fn standalone<H: Hook>(
    engine: &Engine,
    config: &PolicyConfig,
    source: Source,
    settings: Vec<(String, String)>,
) -> Result<(Box<H::Engine>, Description), Error> {
    let code = code::<H>(engine, source)?;
    let assignment = Assignment { origin: code.origin, settings };
    build::<H>(&code.program, &assignment, H::KIND.limits(config), &Arc::default())
}

/// One thread's view of a slot: its own engine, exchanged when the version changes.
pub struct Worker<H: Hook> {
    slot: Arc<Slot<H>>,
    cache: Cache<Arc<ArcSwap<Version<H>>>, Arc<Version<H>>>,
    /// Version of `engine`.
    version: Arc<Version<H>>,
    engine: Option<Box<H::Engine>>,
    /// The engine has seen nothing yet.
    fresh: bool,
    rebuild_asked: bool,
    retry: Backoff,
}

impl<H: Hook> Worker<H> {
    /// Looks for a newer version or a rebuilt engine; costs a pointer load when there is none.
    pub fn refresh(&mut self) {
        let newest = self.cache.load();
        if newest.generation == self.version.generation && self.engine.is_some() {
            return;
        }
        let newest = newest.clone();
        if let Some(engine) = newest.take_ready() {
            self.install(newest, engine);
        } else if !self.rebuild_asked && self.retry.due() {
            self.rebuild_asked = true;
            self.slot.rebuild(&newest);
        }
    }

    fn install(&mut self, version: Arc<Version<H>>, mut engine: Box<H::Engine>) {
        if let Some(old) = &mut self.engine
            && self.version.description.name == version.description.name
        {
            hand_over::<H>(old, &mut engine, &self.slot.log);
        }
        if version.generation != self.version.generation {
            self.retry = Backoff::default(); // another policy does not wait for the faults of this one
        }
        self.version = version;
        self.engine = Some(engine);
        self.fresh = true;
        self.rebuild_asked = false;
    }

    /// The engine, unless the last one failed and its successor is still being built.
    pub fn engine(&mut self) -> Option<&mut H::Engine> {
        self.engine.as_deref_mut()
    }

    /// Whether the engine has to be given everything; true once per engine.
    pub fn take_fresh(&mut self) -> bool {
        std::mem::take(&mut self.fresh)
    }

    /// Gives up the engine, so that the next refresh looks for a fresh one.
    pub fn drop_engine(&mut self) {
        self.engine = None;
        self.rebuild_asked = false;
        self.retry.failed();
    }

    pub fn version(&self) -> &Arc<Version<H>> {
        &self.version
    }

    /// The native twin of the version in service, or of the slot's default.
    pub fn native(&self) -> Option<Box<H::Engine>> {
        let name = match &self.version.assignment.origin {
            Origin::Builtin { name } | Origin::Native { name } => name,
            Origin::Module { .. } => "",
        };
        let twin = H::builtins().find(|b| b.name == name).or_else(|| H::builtins().next())?;
        Some((twin.native)())
    }

    /// Records a call that gave no usable answer; the version's breaker decides whether the policy
    /// goes out of service.
    pub fn record(&mut self, fault: &Fault) {
        self.version.counters.fault(fault);
        if matches!(fault, Fault::Trap(_) | Fault::Deadline(_)) {
            self.drop_engine();
        }
        if *fault != Fault::NotReady && self.version.breaker.fault(Instant::now()) {
            let (slot, generation, fault) = (self.slot.clone(), self.version.generation, fault.clone());
            self.slot.builder.submit(move || slot.trip(generation, &fault));
        }
    }
}

impl<H: Hook> Drop for Worker<H> {
    fn drop(&mut self) {
        self.slot.workers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// `export-state` of the outgoing engine to the incoming one of the same name.
fn hand_over<H: Hook>(old: &mut H::Engine, new: &mut H::Engine, log: &Log) {
    let state = match old.export_state() {
        Ok(state) if state.is_empty() => return,
        Ok(state) if state.len() > MAX_STATE_BYTES => {
            return log
                .add(2, &format!("state of {} bytes not handed over: over {MAX_STATE_BYTES}", state.len()));
        }
        Ok(state) => state,
        Err(fault) => return log.add(2, &format!("state not exported: {fault}")),
    };
    match new.import_state(&state) {
        Ok(Ok(())) => {}
        Ok(Err(reason)) => log.add(2, &format!("starts cold: {reason}")),
        Err(fault) => log.add(2, &format!("starts cold: import-state {fault}")),
    }
}

/// Waits longer after each failure, so that a broken policy is not rebuilt in a loop.
#[derive(Default)]
struct Backoff {
    failures: u32,
    until: Option<Instant>,
}

impl Backoff {
    fn failed(&mut self) {
        let wait = Duration::from_millis(1 << self.failures.min(10));
        self.failures += 1;
        self.until = Some(Instant::now() + wait);
    }

    fn due(&self) -> bool {
        self.until.is_none_or(|until| Instant::now() >= until)
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::scheduler::SchedulerHook;
    use super::*;

    #[test]
    fn another_policy_does_not_wait_for_the_faults_of_the_one_before() {
        let config = PolicyConfig::default();
        let wanted = (Source::Builtin("mooncake".into()), Vec::new());
        let (engine, builder) = (Engine::new(&config, None).unwrap(), Builder::start().unwrap());
        let slot = Slot::<SchedulerHook>::open(engine, &config, wanted, None, builder).unwrap();
        let mut worker = slot.worker();
        for _ in 0..20 {
            worker.drop_engine();
        }
        assert_eq!(worker.retry.failures, 20);
        slot.load(Source::Builtin("random".into()), Vec::new()).unwrap();
        worker.refresh();
        assert_eq!(worker.version().description.name, "random");
        worker.drop_engine();
        assert_eq!(worker.retry.failures, 1);
    }
}
