//! The core module of a component, entered without the component around it.
//!
//! To enter a component takes some 150 ns more than to enter the module in it (docs/design/0001). Where a component is nothing
//! but one module that imports nothing, behind the functions of the contract, the hot slots call that module by the
//! canonical ABI. The contract stays what it is: whether both ways answer alike is tried when a policy is loaded, and what does
//! not, or is made in any other way, is entered as a component.

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
pub(super) use self::trial::{SLOTS, evictors_agree, schedulers_agree};

use super::SlotKind;
use super::guest::State;
use wasmparser::{Parser, Payload};
use wasmtime::{Instance, Store};

/// Larger modules are no hot policies: compiling them twice would cost more than entering them.
const BYTES_MAX: usize = 1 << 20;

/// The functions of an unwrapped module.
pub(super) trait Unwrapped: Send + Sized {
    /// # Errors
    /// A function is missing or has another type.
    fn new(store: &mut Store<State>, instance: &Instance, learns: bool) -> wasmtime::Result<Self>;

    fn control(&self) -> &Control;
}

/// The one module of a component of `slot`, if there is no other, it imports nothing, and it exports what a component would be
/// made of.
pub(super) fn module_of(slot: SlotKind, component: &[u8]) -> Option<&[u8]> {
    if !matches!(slot, SlotKind::Scheduler | SlotKind::Evictor) {
        return None;
    }
    let (mut module, mut exports) = (None, Vec::new());
    for payload in Parser::new(0).parse_all(component) {
        match payload.ok()? {
            Payload::ModuleSection { unchecked_range: range, .. } => {
                let bytes = component.get(range.start as usize..range.end as usize)?;
                if module.replace(bytes).is_some() || bytes.len() > BYTES_MAX {
                    return None;
                }
            }
            Payload::ImportSection(section) if section.count() > 0 => return None,
            Payload::ComponentStartSection { .. } => return None,
            Payload::ExportSection(section) => {
                for export in section {
                    exports.push(export.ok()?.name);
                }
            }
            _ => {}
        }
    }
    // A component would call it once.
    let starts = exports.contains(&"_initialize");
    let prefix = format!("{}#", slot.interface());
    let serves = exports.iter().any(|name| name.starts_with(&prefix));
    module.filter(|_| serves && !starts)
}
