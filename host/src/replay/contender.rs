//! A policy that somebody names: a default one, or one in a file, and which slot it is for.

use super::cluster::Choice;
use crate::policy::admitter::AdmitterHook;
use crate::policy::balancer::BalancerHook;
use crate::policy::chain;
use crate::policy::evictor::EvictorHook;
use crate::policy::scheduler::SchedulerHook;
use crate::policy::slot::Hook;
use crate::policy::{Error as PolicyError, PolicyConfig, SlotKind, Source, slot_of_file};
use std::path::Path;

/// See the module documentation. Whether the policy starts is not known yet.
#[derive(Clone, Debug)]
pub struct Contender {
    pub slot: SlotKind,
    /// As it was named.
    pub name: String,
    pub choice: Choice,
}

/// Why a name stands for no policy.
#[derive(Debug, thiserror::Error)]
pub enum Unknown {
    #[error("no default policy is called `{name}`; {hint}for a file write ./{name} or its name with .wasm")]
    Name { name: String, hint: String },
    #[error("`{name}` is a default policy of several slots ({slots}); say which one with --slot")]
    Several { name: String, slots: String },
    #[error("`{name}` is for the slot {found}, not {wanted}")]
    OtherSlot { name: String, found: SlotKind, wanted: SlotKind },
    #[error(transparent)]
    File(#[from] PolicyError),
}

/// Name and component of each default policy of a slot; the default of the slot first.
pub fn builtins(slot: SlotKind) -> Vec<(&'static str, &'static [u8])> {
    fn of<H: Hook>() -> Vec<(&'static str, &'static [u8])> {
        H::builtins().map(|builtin| (builtin.name, builtin.component)).collect()
    }
    match slot {
        SlotKind::Scheduler => of::<SchedulerHook>(),
        SlotKind::Evictor => of::<EvictorHook>(),
        SlotKind::Admitter => of::<AdmitterHook>(),
        SlotKind::Balancer => of::<BalancerHook>(),
    }
}

impl Contender {
    /// `slot`: the one it must be for, if that is known.
    ///
    /// # Errors
    /// Nothing has this name, it cannot be read, or it is for another slot.
    pub fn find(
        what: &str,
        slot: Option<SlotKind>,
        settings: Vec<(String, String)>,
    ) -> Result<Self, Unknown> {
        let (found, source) = match Source::is_path(what) {
            true => (slot_in_file(Path::new(what))?, Source::File(what.into())),
            false => (slot_of_name(what, slot)?, Source::Builtin(what.to_owned())),
        };
        match slot {
            Some(wanted) if wanted != found => Err(Unknown::OtherSlot { name: what.into(), found, wanted }),
            _ => Ok(Self { slot: found, name: what.to_owned(), choice: Choice { source, settings } }),
        }
    }

    /// The default policy of a slot, as a component.
    pub fn default_of(slot: SlotKind) -> Self {
        let name = builtins(slot).first().map_or("", |(name, _)| name).to_owned();
        let source = Source::Builtin(name.clone());
        Self { slot, name, choice: Choice { source, settings: Vec::new() } }
    }

    /// Its native twin, if it is a default policy.
    #[must_use]
    pub fn native(mut self) -> Self {
        if let Source::Builtin(name) = &self.choice.source {
            self.choice.source = Source::Native(name.clone());
        }
        self
    }
}

/// The native twin of the default policy with this name, if this binary has it.
pub fn native(slot: SlotKind, name: &str) -> Option<Source> {
    builtins(slot).iter().any(|(known, _)| *known == name).then(|| Source::Native(name.to_owned()))
}

fn slot_in_file(path: &Path) -> Result<SlotKind, PolicyError> {
    if chain::is_chain(path) {
        return Ok(SlotKind::Scheduler); // nothing else forms chains
    }
    slot_of_file(&PolicyConfig::default(), path)
}

fn slot_of_name(name: &str, wanted: Option<SlotKind>) -> Result<SlotKind, Unknown> {
    let has = |slot: &SlotKind| builtins(*slot).iter().any(|(known, _)| *known == name);
    let slots: Vec<SlotKind> = SlotKind::ALL.into_iter().filter(has).collect();
    match (slots.as_slice(), wanted) {
        ([slot], _) => Ok(*slot),
        (several, Some(wanted)) if several.contains(&wanted) => Ok(wanted),
        ([], _) => Err(Unknown::Name { name: name.to_owned(), hint: did_you_mean(name, wanted) }),
        (several, _) => {
            let slots: Vec<_> = several.iter().map(|slot| slot.as_str()).collect();
            Err(Unknown::Several { name: name.to_owned(), slots: slots.join(", ") })
        }
    }
}

fn did_you_mean(name: &str, wanted: Option<SlotKind>) -> String {
    let slots = SlotKind::ALL.into_iter().filter(|slot| wanted.is_none_or(|wanted| wanted == *slot));
    let known = slots.flat_map(builtins).map(|(known, _)| (strsim::damerau_levenshtein(known, name), known));
    match known.min() {
        Some((distance, near)) if distance <= 1 + near.len() / 3 => format!("did you mean `{near}`? "),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_files_have_their_slots() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path.display().to_string()
        };
        let find = |what: &str, slot| Contender::find(what, slot, Vec::new()).map(|found| found.slot);
        for (name, slot) in [
            ("mooncake", SlotKind::Scheduler),
            ("lru", SlotKind::Evictor),
            ("slo", SlotKind::Admitter),
            ("static", SlotKind::Balancer),
        ] {
            assert_eq!(find(name, None).unwrap(), slot, "{name}");
        }
        let component = file("p.wasm", kvasir_tests::guest("evictor"));
        assert_eq!(find(&component, None).unwrap(), SlotKind::Evictor);
        let rows = [
            ("lur", None, "did you mean `lru`? for a file write ./lur"),
            ("xyzzyxyzzy", None, "is called `xyzzyxyzzy`; for a file"),
            ("lru", Some(SlotKind::Scheduler), "`lru` is for the slot evictor, not scheduler"),
            (&component, Some(SlotKind::Balancer), "is for the slot evictor, not balancer"),
            ("/none.wasm", None, "cannot read policy file /none.wasm"),
            (&file("q.wasm", b"nonsense"), None, "not a WebAssembly component"),
        ];
        for (what, slot, expected) in rows {
            let error = find(what, slot).unwrap_err().to_string();
            assert!(error.contains(expected), "{what}: {error}");
        }
    }
}
