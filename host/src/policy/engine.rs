//! The wasmtime engine: how components are checked, compiled and interrupted.

use super::compiler::Compiler;
use super::fault::TEXT_BYTES;
use super::guest::State;
use super::interface::{Interface, TooMuch};
use super::trust::Gate;
use super::{Error, Limits, PolicyConfig, SlotKind, bindings, unwrapped};
use crate::text::printable;
use sha2::{Digest as _, Sha256};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use wasmtime::component::{Component, InstancePre, Linker};
use wasmtime::{Cache, CacheConfig, Config, InstanceAllocationStrategy, PoolingAllocationConfig};

/// Epochs pass once per tick; a call is looked at when one passes under it.
const TICK: Duration = Duration::from_millis(1);
pub(super) const LOG: &str = "kvasir:policy/log@0.1.0";
pub(super) const CONTROL: &str = "kvasir:policy/control@0.1.0";
pub(super) const LEARNING: &str = "kvasir:policy/learning@0.1.0";

/// SHA-256 of a component's bytes: its identity in the catalogue and in lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Digest([u8; 32]);

/// Text that is no SHA-256 in 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a digest has 64 digits of 0-9 a-f")]
pub struct NoDigest;

impl Digest {
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl std::str::FromStr for Digest {
    type Err = NoDigest;

    fn from_str(text: &str) -> Result<Self, NoDigest> {
        let digit = |b: u8| (b as char).to_digit(16).filter(|_| !b.is_ascii_uppercase()).ok_or(NoDigest);
        let mut bytes = [0; 32];
        if text.len() != 2 * bytes.len() {
            return Err(NoDigest);
        }
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().as_chunks::<2>().0) {
            *byte = ((digit(pair[0])? << 4) | digit(pair[1])?) as u8;
        }
        Ok(Self(bytes))
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Compiles components and lets time pass for them. Cheap to clone.
#[derive(Clone)]
pub struct Engine {
    engine: wasmtime::Engine,
    /// For modules that are entered without their component: what differs in the bits of NaNs is found by the trial at load.
    bare: wasmtime::Engine,
    linker: Arc<Linker<State>>,
    config: Arc<PolicyConfig>,
    pub(super) gate: Gate,
    compiler: Arc<Compiler>,
    ticker: Arc<Ticker>,
}

/// A compiled component with its imports resolved, ready to be instantiated in microseconds.
#[derive(Clone)]
pub struct Module {
    pub(super) pre: InstancePre<State>,
    /// The core module in it, to be entered instead.
    pub(super) core: Option<wasmtime::InstancePre<State>>,
    /// Guests keep it: without it a call would have no deadline.
    pub(super) ticker: Arc<Ticker>,
    pub name: String,
    pub digest: Digest,
    /// It exports `learning`, and its slot has outcomes to learn from.
    pub learns: bool,
}

impl Module {
    /// The same, to be entered as a component.
    pub(super) fn wrapped(&self) -> Self {
        Self { core: None, ..self.clone() }
    }
}

impl Engine {
    /// `cache`: folder for compiled code, owned by this host alone; `None` compiles every time.
    ///
    /// # Errors
    /// The machine refuses the address space, or the cache folder cannot be used.
    pub fn new(config: &PolicyConfig, cache: Option<&Path>) -> Result<Self, Error> {
        let engine_error = |e: wasmtime::Error| Error::Engine(format!("{e:#}"));
        let mut wasm = Config::new();
        wasm.epoch_interruption(true).wasm_relaxed_simd(false).max_wasm_stack(256 << 10);
        if let Some(folder) = cache {
            let mut files = CacheConfig::new();
            files.with_directory(folder);
            wasm.cache(Some(Cache::new(files).map_err(engine_error)?));
        }
        let engine =
            |wasm: &mut Config| pooled(wasm, config).or_else(|e| on_demand(wasm, &e)).map_err(engine_error);
        // A third to two fifths of a scan over 512 instances, whose operations are all of floats.
        let bare = engine(wasm.cranelift_nan_canonicalization(false))?;
        let engine = engine(wasm.cranelift_nan_canonicalization(true))?;
        let mut linker = Linker::new(&engine);
        bindings::add_log(&mut linker).map_err(engine_error)?;
        let ticker = Arc::new(Ticker::start([engine.clone(), bare.clone()])?);
        Ok(Self {
            engine,
            bare,
            linker: Arc::new(linker),
            config: Arc::new(config.clone()),
            gate: Gate::new(config.trust_file.as_deref()),
            compiler: Arc::new(Compiler::start()?),
            ticker,
        })
    }

    /// Checks a component against the contract of `slot` and compiles it, off the hot path.
    ///
    /// # Errors
    /// The bytes are too many, no component, of another version or world, or want an import that
    /// is not granted; each names the cause.
    pub fn compile(&self, slot: SlotKind, name: &str, bytes: &[u8]) -> Result<Module, Error> {
        self.check_size(name, bytes.len() as u64)?;
        check_header(name, bytes)?;
        let compile = |e: wasmtime::Error| {
            let mut reason = printable(&format!("{e:#}"), TEXT_BYTES);
            if reason.contains("core module instances") {
                reason.push_str("; raise policy.core_instances_max");
            }
            Error::Compile { name: name.into(), reason }
        };
        let learns = check_interface(slot, name, bytes)?;
        let component = self.compiler.run(|| Component::new(&self.engine, bytes)).map_err(compile)?;
        let pre = self.linker.instantiate_pre(&component).map_err(|e| Error::Instantiate {
            name: name.into(),
            reason: printable(&format!("{e:#}"), TEXT_BYTES),
        })?;
        Ok(Module {
            pre,
            core: self.core_of(slot, bytes),
            ticker: Arc::clone(&self.ticker),
            name: name.into(),
            digest: Digest::of(bytes),
            learns,
        })
    }

    /// What a policy of `slot` may use here.
    pub(super) fn limits(&self, slot: SlotKind) -> Limits {
        slot.limits(&self.config)
    }

    /// The core module of a component, where it can be entered alone. What does not compile there is entered as a component.
    fn core_of(&self, slot: SlotKind, component: &[u8]) -> Option<wasmtime::InstancePre<State>> {
        let module = unwrapped::module_of(slot, component)?;
        let module = self.compiler.run(|| wasmtime::Module::new(&self.bare, module)).ok()?;
        let mut linker = wasmtime::Linker::new(&self.bare);
        unwrapped::add_log(&mut linker).ok()?;
        linker.instantiate_pre(&module).ok()
    }

    /// Refuses a size before the bytes are read.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn check_size(&self, name: &str, bytes: u64) -> Result<(), Error> {
        let limit = self.config.max_module_bytes;
        if bytes > limit {
            return Err(Error::TooLarge { name: name.into(), bytes, limit });
        }
        Ok(())
    }
}

/// The slot whose interface a component exports. Nothing is compiled.
///
/// # Errors
/// It is no component, or exports the interface of no slot.
pub fn slot_of(name: &str, bytes: &[u8]) -> Result<SlotKind, Error> {
    check_header(name, bytes)?;
    let exports = Interface::read(bytes).map_err(|error| unreadable(name, &error))?.exports;
    let slot = SlotKind::ALL.into_iter().find(|slot| exports.contains(&slot.interface()));
    slot.ok_or_else(|| Error::NoSlot { name: name.into(), found: names(&exports) })
}

fn unreadable(name: &str, error: &wasmparser::BinaryReaderError) -> Error {
    Error::Compile { name: name.into(), reason: printable(&error.to_string(), TEXT_BYTES) }
}

fn names(exports: &[&str]) -> String {
    if exports.is_empty() { "nothing".into() } else { printable(&exports.join(", "), TEXT_BYTES) }
}

/// Looks at the names alone, so that what cannot serve here is not compiled first, which may take seconds.
/// Returns whether it learns.
fn check_interface(slot: SlotKind, name: &str, bytes: &[u8]) -> Result<bool, Error> {
    let interface = Interface::read(bytes).map_err(|error| unreadable(name, &error))?;
    let Interface { imports, exports, .. } = &interface;
    // One that exports several versions is called by ours.
    let ours = exports.iter().any(|e| e.starts_with("kvasir:policy/") && e.ends_with("@0.1.0"));
    if let Some(found) = exports.iter().find(|e| e.starts_with("kvasir:policy/") && !ours) {
        return Err(Error::WrongVersion {
            name: name.into(),
            found: format!("`{}`", printable(found, TEXT_BYTES)),
        });
    }
    // Versions first: a policy of another version also imports that version's log.
    if let Some(import) = imports.iter().find(|import| **import != LOG) {
        return Err(Error::ImportNotGranted { name: name.into(), import: printable(import, TEXT_BYTES) });
    }
    for wanted in [CONTROL, slot.interface()] {
        if !exports.contains(&wanted) {
            let found = names(exports);
            return Err(Error::WrongWorld { name: name.into(), slot, missing: wanted.into(), found });
        }
    }
    let too_much = |reason: TooMuch| Error::Compile { name: name.into(), reason: reason.to_string() };
    interface.check_amount().map_err(too_much)?;
    Ok(slot.has_outcomes() && exports.contains(&LEARNING))
}

/// Room for every instance is reserved at the start: 4 GiB of address space each, none of it memory until
/// it is used, for which loads and stores need no check of their bounds.
fn pooled(wasm: &mut Config, config: &PolicyConfig) -> wasmtime::Result<wasmtime::Engine> {
    wasm.allocation_strategy(InstanceAllocationStrategy::Pooling(pool(config)));
    wasmtime::Engine::new(wasm)
}

/// For machines where address space is short (`ulimit -v`): each instance takes what it needs when it is made.
fn on_demand(wasm: &mut Config, refused: &wasmtime::Error) -> wasmtime::Result<wasmtime::Engine> {
    tracing::warn!(
        reason = %format!("{refused:#}"),
        "no address space for a pool of policy instances; each is allocated when it is made, and calls are somewhat slower"
    );
    wasm.allocation_strategy(InstanceAllocationStrategy::OnDemand)
        .memory_reservation(0)
        .memory_reservation_for_growth(1 << 20)
        .memory_guard_size(64 << 10);
    wasmtime::Engine::new(wasm)
}

/// A full pool refuses a load, never a call.
fn pool(config: &PolicyConfig) -> PoolingAllocationConfig {
    let PolicyConfig { instances, core_instances, .. } = *config;
    let mut pool = PoolingAllocationConfig::default();
    pool.total_component_instances(instances)
        .total_core_instances(core_instances.saturating_mul(instances))
        .total_memories(instances)
        .total_tables(4 * instances)
        .max_component_instance_size(1 << 20)
        .max_core_instances_per_component(core_instances)
        .max_memory_size(4 << 30)
        .linear_memory_keep_resident(64 << 10)
        .table_keep_resident(16 << 10);
    pool
}

/// Says what is wrong with the first bytes, which the compiler would only call malformed.
fn check_header(name: &str, bytes: &[u8]) -> Result<(), Error> {
    let reason = match bytes {
        [0, b'a', b's', b'm', _, _, 1, 0, ..] => return Ok(()),
        [0, b'a', b's', b'm', 1, 0, 0, 0, ..] => {
            "it is a core module; `kvasir policy build` makes a component of a project, `wasm-tools component new` of any module"
        }
        [0, b'a', b's', b'm', ..] if bytes.len() < 8 => "the file is cut off",
        [] => "the file is empty",
        _ => "it does not begin with the WebAssembly magic number",
    };
    Err(Error::NotAComponent { name: name.into(), reason: reason.into() })
}

/// The thread that advances the epoch; ends with the last engine, module or guest that needs it.
pub(super) struct Ticker {
    stop: Arc<AtomicBool>,
}

impl Ticker {
    fn start(engines: [wasmtime::Engine; 2]) -> Result<Self, Error> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let tick = move || {
            while !stopped.load(Ordering::Relaxed) {
                std::thread::sleep(TICK);
                engines.iter().for_each(wasmtime::Engine::increment_epoch);
            }
        };
        let thread = std::thread::Builder::new().name("kvasir-epoch".into()).spawn(tick);
        thread.map_err(|e| Error::Engine(format!("cannot start the epoch thread: {e}")))?;
        Ok(Self { stop })
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A component of one empty module, instantiated `count` times.
    fn of_core_instances(count: u8) -> Vec<u8> {
        let module = [0, b'a', b's', b'm', 1, 0, 0, 0];
        let mut component = vec![0, b'a', b's', b'm', 0x0d, 0, 1, 0, 1, module.len() as u8];
        component.extend(module);
        let instances: Vec<u8> = (0..count).flat_map(|_| [0, 0, 0]).collect();
        let len = instances.len() + 1;
        component.extend([2, (len & 0x7f) as u8 | 0x80, (len >> 7) as u8, count]);
        component.extend(instances);
        component
    }

    #[test]
    fn what_interpreted_languages_are_made_into_is_admitted() {
        for core_instances in [48, 60] {
            let engine =
                Engine::new(&PolicyConfig { core_instances, ..PolicyConfig::default() }, None).unwrap();
            Component::new(&engine.engine, of_core_instances(core_instances as u8)).unwrap();
            let error =
                Component::new(&engine.engine, of_core_instances(core_instances as u8 + 1)).unwrap_err();
            let expected = format!("exceeds the configured maximum of {core_instances}");
            assert!(format!("{error:#}").contains(&expected), "{error:#}");
        }
    }
}
