//! The core module of a component, entered without the component around it.
//!
//! To enter a component takes some 150 ns more than to enter the module in it (docs/design/0001). Where one module of a component
//! exports what the component does, by the names that all tools give, and imports the log at most, schedulers and evictors are
//! called there, by the canonical ABI. The contract stays what it is: whether both ways answer alike is tried when a policy is
//! loaded, and what does not, or is made in any other way, is entered as a component.

mod abi;
mod control;
mod evictor;
mod scheduler;
#[cfg(test)]
mod tests;
mod trial;

pub(super) use self::control::Control;
pub(super) use self::evictor::Evictor;
pub(super) use self::scheduler::Scheduler;
pub(super) use self::trial::{evictors_agree, schedulers_agree};

use super::SlotKind;
use super::engine::LOG;
use super::guest::State;
use wasmparser::{Parser, Payload};
use wasmtime::{Caller, Extern, Instance, Linker, Store, bail};

/// Larger modules are no hot policies: compiling them twice would cost more than entering them.
const BYTES_MAX: usize = 1 << 20;

/// The functions of an unwrapped module.
pub(super) trait Unwrapped: Send + Sized {
    /// # Errors
    /// A function is missing or has another type.
    fn new(store: &mut Store<State>, instance: &Instance, learns: bool) -> wasmtime::Result<Self>;

    fn control(&self) -> &Control;
}

/// The module in a component of `slot` that exports what the component is made of, if it is the only one that does, and
/// imports the log at most.
pub(super) fn module_of(slot: SlotKind, component: &[u8]) -> Option<&[u8]> {
    if !matches!(slot, SlotKind::Scheduler | SlotKind::Evictor) {
        return None;
    }
    let prefix = format!("{}#", slot.interface());
    let (mut found, mut module, mut depth) = (None, Module::default(), 0u32);
    for payload in Parser::new(0).parse_all(component) {
        match payload.ok()? {
            Payload::ModuleSection { unchecked_range: range, .. } => {
                let bytes = component.get(range.start as usize..range.end as usize)?;
                module = Module { bytes, ..Module::default() };
                // What lies in an inner component is called by that, and not by this one.
                module.needs_more = depth > 0;
                depth += 1;
            }
            Payload::ComponentSection { .. } => depth += 1,
            Payload::ImportSection(section) => {
                let mut imports = section.into_imports();
                module.needs_more |= imports.any(|i| i.map_or(true, |i| (i.module, i.name) != (LOG, "log")));
            }
            Payload::ExportSection(section) => {
                for export in section {
                    let name = export.ok()?.name;
                    module.serves |= name.starts_with(&prefix);
                    // A component would call it once.
                    module.needs_more |= name == "_initialize";
                }
            }
            Payload::End(_) => {
                depth = depth.saturating_sub(1);
                let Module { bytes, serves, needs_more } = std::mem::take(&mut module);
                if serves && (needs_more || bytes.len() > BYTES_MAX || found.replace(bytes).is_some()) {
                    return None;
                }
            }
            Payload::ComponentStartSection { .. } => return None,
            _ => {}
        }
    }
    found
}

/// What was read of one module.
#[derive(Default)]
struct Module<'a> {
    bytes: &'a [u8],
    /// It exports the functions of the slot.
    serves: bool,
    /// It cannot be entered as it is.
    needs_more: bool,
}

/// What modules may import: the log of the contract.
///
/// # Errors
/// It is there already.
pub(super) fn add_log(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    linker.func_wrap(LOG, "log", log)?;
    Ok(())
}

fn log(mut caller: Caller<'_, State>, level: u32, at: u32, len: u32) -> wasmtime::Result<()> {
    let memory = caller.get_export("memory").and_then(Extern::into_memory);
    let Some(memory) = memory else { bail!("it exports no `memory`") };
    let (memory, state) = memory.data_and_store_mut(&mut caller);
    let message = memory.get(at as usize..).and_then(|rest| rest.get(..len as usize));
    let Some(message) = message else { bail!("pointer out of bounds of memory") };
    state.add_log(level, std::str::from_utf8(message)?);
    Ok(())
}
