//! What serves a slot, with its code, for callers that fetch it.

use super::version::{builtin, read};
use super::{ChainPart, Hook, Settings, Slot, Source};
use crate::policy::catalog::{Origin, StoredPart};
use crate::policy::chain;
use crate::policy::engine::Digest;
use crate::policy::{Error, SlotKind};
use std::path::PathBuf;

/// See the module documentation. The source names no file.
#[derive(Clone, Debug)]
pub struct Serving {
    pub slot: SlotKind,
    pub source: Source,
    pub settings: Settings,
    /// SHA-256 of the component; of a chain, of what its parts are. `None` means that the policy is native.
    pub digest: Option<Digest>,
}

impl<H: Hook> Slot<H> {
    /// `builtins_as_components`: default policies too come with their code, unless they decide natively.
    ///
    /// # Errors
    /// The catalogue cannot be read, or the file that the configuration names is no longer what serves.
    pub fn serving(&self, builtins_as_components: bool) -> Result<Serving, Error> {
        let current = self.current();
        let source = self.source_of(&current.assignment.origin, builtins_as_components)?;
        let settings = current.assignment.settings.clone();
        Ok(Serving { slot: H::KIND, source, settings, digest: current.digest() })
    }

    fn source_of(&self, origin: &Origin, builtins_as_components: bool) -> Result<Source, Error> {
        Ok(match origin {
            Origin::Native { name } => Source::Native(name.clone()),
            Origin::Builtin { name } if builtins_as_components => {
                let bytes = builtin::<H>(name)?.component.to_vec();
                Source::Bytes { name: name.clone(), bytes }
            }
            Origin::Builtin { name } => Source::Builtin(name.clone()),
            Origin::Module { name, digest, signatures } => {
                let (name, signatures) = (name.clone(), signatures.clone());
                Source::Signed { name, bytes: self.module(digest)?, signatures }
            }
            Origin::Chain { name, parts } => {
                let part = |part: &StoredPart| {
                    let source = self.source_of(&part.assignment.origin, builtins_as_components)?;
                    Ok(ChainPart { role: part.role, source, settings: part.assignment.settings.clone() })
                };
                let parts = parts.iter().map(part).collect::<Result<_, Error>>()?;
                Source::Chain { name: name.clone(), parts }
            }
        })
    }

    /// The catalogue keeps what was loaded. What the configuration names is read again: it is stored when another takes its
    /// place, if at all.
    fn module(&self, digest: &str) -> Result<Vec<u8>, Error> {
        if let Some(Ok(bytes)) = self.catalog.as_ref().map(|catalog| catalog.module(digest)) {
            return Ok(bytes);
        }
        let files = files_of(&self.wanted.0).into_iter();
        let mut read = files.filter_map(|path| read(&self.engine, &path).ok());
        read.find(|bytes| Digest::of(bytes).to_string() == digest).ok_or(Error::NotKept(H::KIND))
    }
}

/// The components that a source names.
fn files_of(source: &Source) -> Vec<PathBuf> {
    match source {
        Source::File(path) if chain::is_chain(path) => {
            let parts = chain::read(path).map_or_else(|_| Vec::new(), |(_, parts)| parts);
            parts.iter().flat_map(|part| files_of(&part.source)).collect()
        }
        Source::File(path) => vec![path.clone()],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PolicyConfig;
    use crate::policy::engine::Engine;
    use crate::policy::scheduler::SchedulerHook;
    use crate::policy::slot::Builder;
    use std::path::Path;
    use std::sync::Arc;

    fn slot(wanted: Source) -> Arc<Slot<SchedulerHook>> {
        let (config, builder) = (PolicyConfig::default(), Builder::start().unwrap());
        let engine = Engine::new(&config, None).unwrap();
        Slot::open(engine, &config, (wanted, Vec::new()), None, builder).unwrap()
    }

    fn in_chain(folder: &Path) -> PathBuf {
        std::fs::write(folder.join("mine.wasm"), kvasir_tests::guest("scheduler")).unwrap();
        let chain = folder.join("both.toml");
        std::fs::write(&chain, "[[scorer]]\nsource = \"mine.wasm\"\n[[scorer]]\nsource = \"netkv\"\n")
            .unwrap();
        chain
    }

    #[test]
    fn what_the_configuration_names_is_read_again_and_held_against_what_serves() {
        let folder = tempfile::tempdir().unwrap();
        let slot = slot(Source::File(in_chain(folder.path())));
        let Serving { source: Source::Chain { name, parts }, digest, .. } = slot.serving(false).unwrap()
        else {
            panic!("a chain serves");
        };
        assert_eq!((name.as_str(), digest), ("both", slot.current().digest()));
        let sources: Vec<_> = parts.iter().map(|part| &part.source).collect();
        let [Source::Signed { bytes, .. }, Source::Builtin(netkv), Source::Builtin(pick)] = &sources[..]
        else {
            panic!("{sources:?}");
        };
        assert_eq!((&bytes[..], &netkv[..], &pick[..]), (kvasir_tests::guest("scheduler"), "netkv", "pick"));

        std::fs::write(folder.path().join("mine.wasm"), kvasir_tests::guest("learning")).unwrap();
        let error = slot.serving(false).unwrap_err().to_string();
        assert!(error.contains("is not kept") && error.contains("load it again"), "{error}");
    }

    #[test]
    fn default_policies_go_by_name_or_with_their_code() {
        let slot = slot(Source::Builtin("mooncake".into()));
        assert!(matches!(slot.serving(false).unwrap().source, Source::Builtin(name) if name == "mooncake"));
        let Serving { source: Source::Bytes { name, bytes }, digest, .. } = slot.serving(true).unwrap()
        else {
            panic!("with its code");
        };
        assert_eq!((name.as_str(), Some(Digest::of(&bytes))), ("mooncake", digest));
        slot.load(Source::Native("random".into()), vec![]).unwrap();
        let Serving { source, digest, .. } = slot.serving(true).unwrap();
        assert!(matches!(source, Source::Native(name) if name == "random") && digest.is_none());
    }
}
