//! What a component is, found without a host that runs: `kvasir policy inspect`.

use super::admitter::AdmitterHook;
use super::balancer::BalancerHook;
use super::chain::is_chain;
pub use super::engine::slot_of;
use super::evictor::EvictorHook;
use super::interface::Interface;
use super::scheduler::SchedulerHook;
use super::slot::Hook;
use super::{Digest, Engine, Error, PolicyConfig, Prepared, SlotKind, Source};
use kvasir_policy::Description;
use std::path::Path;
use std::time::{Duration, Instant};
use wit_component::WitPrinter;

/// The contract that this host speaks.
pub const CONTRACT: &str = "kvasir:policy@0.1.0";
/// The interface of the contract that a policy with a learner exports.
const LEARNING: &str = "kvasir:policy/learning@0.1.0";

/// A component that a host would load.
pub struct Inspection {
    pub slot: SlotKind,
    pub description: Description,
    /// SHA-256 of the file.
    pub digest: Digest,
    pub bytes: u64,
    pub imports: Vec<String>,
    pub exports: Vec<String>,
    /// It has a learner.
    pub learns: bool,
    /// What it imports and exports with the types of all functions, as text.
    pub wit: Option<String>,
    /// Its calls enter its core module alone (docs/design/0001, "Unwrapped"), which costs less.
    pub is_unwrapped: bool,
    /// Time to check, compile, instantiate and configure it, with nothing taken from a cache.
    pub load_time: Duration,
}

const ONE_COMPONENT: &str = "here it takes one component, such as a part of the chain; chains are taken by `kvasir policy run`, `bench`, \
                             `replay` and `load`";

/// Loads the component in `path` as a host would, with its default settings, and forgets it.
///
/// # Errors
/// Whatever would make a host refuse it.
pub fn inspect(config: &PolicyConfig, path: &Path) -> Result<Inspection, Error> {
    let name = path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
    if is_chain(path) {
        return Err(Error::Chain { name, reason: ONE_COMPONENT.into() });
    }
    let engine = Engine::new(config, None)?;
    inspect_with(&engine, config, &name, &super::slot::read(&engine, path)?)
}

/// As [`inspect`], of a component that was read already.
///
/// # Errors
/// As [`inspect`].
pub fn inspect_component(config: &PolicyConfig, name: &str, bytes: &[u8]) -> Result<Inspection, Error> {
    inspect_with(&Engine::new(config, None)?, config, name, bytes)
}

fn inspect_with(
    engine: &Engine,
    config: &PolicyConfig,
    name: &str,
    bytes: &[u8],
) -> Result<Inspection, Error> {
    let slot = slot_of(name, bytes)?;
    let source = Source::Bytes { name: name.to_owned(), bytes: bytes.to_vec() };
    let start = Instant::now();
    let (description, is_unwrapped) = match slot {
        SlotKind::Scheduler => describe::<SchedulerHook>(engine, config, source),
        SlotKind::Evictor => describe::<EvictorHook>(engine, config, source),
        SlotKind::Admitter => describe::<AdmitterHook>(engine, config, source),
        SlotKind::Balancer => describe::<BalancerHook>(engine, config, source),
    }?;
    let load_time = start.elapsed();
    let Interface { imports, exports, .. } = Interface::read(bytes).unwrap_or_default();
    let owned = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect();
    Ok(Inspection {
        slot,
        description,
        digest: Digest::of(bytes),
        bytes: bytes.len() as u64,
        learns: slot.has_outcomes() && exports.contains(&LEARNING),
        wit: wit(bytes),
        is_unwrapped,
        imports: owned(imports),
        exports: owned(exports),
        load_time,
    })
}

/// Without the comments, which a component may fill as it likes. `None`: it has types that are not read here; a host that
/// only calls the functions of the contract does not mind.
fn wit(bytes: &[u8]) -> Option<String> {
    let decoded = wit_component::decode(bytes).ok()?;
    let (resolve, main) = (decoded.resolve(), decoded.package());
    let others: Vec<_> = resolve.packages.iter().map(|(id, _)| id).filter(|id| *id != main).collect();
    let mut printer = WitPrinter::default();
    printer.emit_docs(false);
    printer.print(resolve, main, &others).ok()?;
    Some(printer.output.to_string())
}

/// The slot that the component in `path` is for. Nothing is compiled.
///
/// # Errors
/// It cannot be read, is too large or no component, or is for no slot.
pub fn slot_of_file(config: &PolicyConfig, path: &Path) -> Result<SlotKind, Error> {
    let engine = Engine::new(config, None)?;
    let name = path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
    slot_of(&name, &super::slot::read(&engine, path)?)
}

/// What it says of itself, and whether it is unwrapped.
fn describe<H: Hook>(
    engine: &Engine,
    config: &PolicyConfig,
    source: Source,
) -> Result<(Description, bool), Error> {
    let policy = Prepared::<H>::new(engine, config, source, Vec::new())?;
    let (_, description) = policy.engine()?;
    Ok((description, policy.is_unwrapped()))
}
