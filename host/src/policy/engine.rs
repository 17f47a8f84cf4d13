//! The wasmtime engine: how components are checked, compiled and interrupted.

use super::fault::TEXT_BYTES;
use super::guest::State;
use super::{Error, PolicyConfig, SlotKind, bindings};
use crate::text::printable;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use wasmparser::{Parser, Payload};
use wasmtime::component::{Component, InstancePre, Linker};
use wasmtime::{Cache, CacheConfig, Config, InstanceAllocationStrategy, PoolingAllocationConfig};

/// Epochs pass once per tick; a call is looked at when one passes under it.
const TICK: Duration = Duration::from_millis(1);
const LOG: &str = "kvasir:policy/log@0.1.0";
const CONTROL: &str = "kvasir:policy/control@0.1.0";
const LEARNING: &str = "kvasir:policy/learning@0.1.0";

/// SHA-256 of a component's bytes: its identity in the catalogue and in lists.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
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
    linker: Arc<Linker<State>>,
    max_module_bytes: u64,
    /// A compilation uses every core; one at a time leaves some to the requests.
    compiling: Arc<Mutex<()>>,
    ticker: Arc<Ticker>,
}

/// A compiled component with its imports resolved, ready to be instantiated in microseconds.
#[derive(Clone)]
pub struct Module {
    pub(super) pre: InstancePre<State>,
    pub(super) engine: wasmtime::Engine,
    /// Guests keep it, for a call would have no deadline without.
    pub(super) ticker: Arc<Ticker>,
    pub name: String,
    pub digest: Digest,
    /// It exports `learning`, and its slot has outcomes to learn from.
    pub learns: bool,
}

impl Engine {
    /// `cache`: folder for compiled code, owned by this host alone; `None` compiles every time.
    ///
    /// # Errors
    /// The machine refuses the address space, or the cache folder cannot be used.
    pub fn new(config: &PolicyConfig, cache: Option<&Path>) -> Result<Self, Error> {
        let engine_error = |e: wasmtime::Error| Error::Engine(format!("{e:#}"));
        let mut wasm = Config::new();
        wasm.epoch_interruption(true)
            .cranelift_nan_canonicalization(true)
            .wasm_relaxed_simd(false)
            .max_wasm_stack(256 << 10);
        if let Some(folder) = cache {
            let mut files = CacheConfig::new();
            files.with_directory(folder);
            wasm.cache(Some(Cache::new(files).map_err(engine_error)?));
        }
        let engine = pooled(&mut wasm, config.instances)
            .or_else(|e| on_demand(&mut wasm, &e))
            .map_err(engine_error)?;
        let mut linker = Linker::new(&engine);
        bindings::add_log(&mut linker).map_err(engine_error)?;
        let ticker = Arc::new(Ticker::start(engine.clone())?);
        Ok(Self {
            engine,
            linker: Arc::new(linker),
            max_module_bytes: config.max_module_bytes,
            compiling: Arc::default(),
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
        let compile = |e: wasmtime::Error| Error::Compile {
            name: name.into(),
            reason: printable(&format!("{e:#}"), TEXT_BYTES),
        };
        let learns = check_interface(slot, name, bytes)?;
        let compiling = self.compiling.lock();
        let component = Component::new(&self.engine, bytes).map_err(compile)?;
        drop(compiling);
        let pre = self.linker.instantiate_pre(&component).map_err(|e| Error::Instantiate {
            name: name.into(),
            reason: printable(&format!("{e:#}"), TEXT_BYTES),
        })?;
        Ok(Module {
            pre,
            engine: self.engine.clone(),
            ticker: Arc::clone(&self.ticker),
            name: name.into(),
            digest: Digest::of(bytes),
            learns,
        })
    }

    /// Refuses a size before the bytes are read.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn check_size(&self, name: &str, bytes: u64) -> Result<(), Error> {
        let limit = self.max_module_bytes;
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
pub(super) fn slot_of(name: &str, bytes: &[u8]) -> Result<SlotKind, Error> {
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
    let Interface { imports, exports } = Interface::read(bytes).map_err(|error| unreadable(name, &error))?;
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
            let found = names(&exports);
            return Err(Error::WrongWorld { name: name.into(), slot, missing: wanted.into(), found });
        }
    }
    Ok(slot.has_outcomes() && exports.contains(&LEARNING))
}

/// What a component itself imports and exports, not the parts in it.
#[derive(Default)]
pub(super) struct Interface<'a> {
    pub(super) imports: Vec<&'a str>,
    pub(super) exports: Vec<&'a str>,
}

impl<'a> Interface<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self, wasmparser::BinaryReaderError> {
        let mut found = Self::default();
        let mut depth = 0;
        for payload in Parser::new(0).parse_all(bytes) {
            match payload? {
                Payload::ModuleSection { .. } | Payload::ComponentSection { .. } => depth += 1,
                Payload::End(_) => depth -= 1,
                Payload::ComponentImportSection(section) if depth == 0 => {
                    for import in section {
                        found.imports.push(import?.name.name);
                    }
                }
                Payload::ComponentExportSection(section) if depth == 0 => {
                    for export in section {
                        found.exports.push(export?.name.name);
                    }
                }
                _ => {}
            }
        }
        Ok(found)
    }
}

/// Room for every instance is reserved at the start: 4 GiB of address space each, none of it memory until
/// it is used, for which loads and stores need no check of their bounds.
fn pooled(wasm: &mut Config, instances: u32) -> wasmtime::Result<wasmtime::Engine> {
    wasm.allocation_strategy(InstanceAllocationStrategy::Pooling(pool(instances)));
    wasmtime::Engine::new(wasm)
}

/// Where address space is short (`ulimit -v`): each instance takes what it needs when it comes.
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

/// The most core instances of one component; what `componentize-py` makes has about 40.
const CORE_INSTANCES: u32 = 48;

/// A full pool refuses a load, never a call.
fn pool(instances: u32) -> PoolingAllocationConfig {
    let mut pool = PoolingAllocationConfig::default();
    pool.total_component_instances(instances)
        .total_core_instances(4 * instances)
        .total_memories(instances)
        .total_tables(4 * instances)
        .max_component_instance_size(1 << 20)
        .max_core_instances_per_component(CORE_INSTANCES)
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
            "it is a core module; wrap it with wit-component (`cargo xtask policies` does)"
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
    fn start(engine: wasmtime::Engine) -> Result<Self, Error> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let tick = move || {
            while !stopped.load(Ordering::Relaxed) {
                std::thread::sleep(TICK);
                engine.increment_epoch();
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

    /// A component of one empty module, instantiated so many times.
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
        let engine = Engine::new(&PolicyConfig::default(), None).unwrap();
        Component::new(&engine.engine, of_core_instances(CORE_INSTANCES as u8)).unwrap();
        let error = Component::new(&engine.engine, of_core_instances(CORE_INSTANCES as u8 + 1)).unwrap_err();
        assert!(format!("{error:#}").contains("exceeds the configured maximum of 48"), "{error:#}");
    }
}
