//! What can go wrong between an idea and a component.

use super::MissingTool;
use crate::policy::{self, SlotKind};
use std::path::PathBuf;

/// Why a project was not made, built or tried.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("`{name}` is no name for a policy: {reason}")]
    Name { name: String, reason: &'static str },
    #[error(
        "unknown language `{name}`; languages: {known}. Any other that compiles to WebAssembly: docs/policy-languages.md"
    )]
    Language { name: String, known: String },
    #[error("there is something in {path} already; name another folder with --dir")]
    Exists { path: PathBuf },
    #[error("cannot {action} {path}: {source}")]
    File { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("cannot read {path}: {source}; `kvasir policy new` makes a project")]
    NoManifest { path: PathBuf, source: std::io::Error },
    #[error("{path} is not there; `kvasir policy build` makes it")]
    NotBuilt { path: PathBuf },
    #[error("a component has no folder of vectors; name the file: --write-vectors=FILE")]
    NoVectors,
    #[error(
        "{path} names the slot {named}, and what was compiled serves {found}; correct `slot`, or the world in the sources"
    )]
    OtherSlot { path: PathBuf, named: SlotKind, found: SlotKind },
    #[error("{path}: {reason}")]
    Manifest { path: PathBuf, reason: String },
    #[error(
        "{language} needs `{}`, which is not on the PATH; get it with `{}`, or name another by the variable {}",
        .tool.program, .tool.get, .tool.variable
    )]
    Tool { language: &'static str, tool: MissingTool },
    #[error("{path} does not compile ({status}); what its tools said stands above")]
    Compile { path: PathBuf, status: std::process::ExitStatus },
    #[error("what was compiled is no policy: {reason}")]
    Module { reason: String },
    #[error("the policy imports what no host grants; a policy may import {LOG} only:{}", list(.imports))]
    Imports { imports: Vec<Import> },
    #[error(transparent)]
    Policy(#[from] policy::Error),
}

/// The only import of the contract.
pub(super) const LOG: &str = "kvasir:policy/log@0.1.0";

/// Something that a policy wants of the host and does not get.
#[derive(Debug, PartialEq, Eq)]
pub struct Import {
    pub name: String,
    /// What it usually comes from.
    pub cause: &'static str,
}

impl Error {
    /// Whether the command was given wrongly, rather than that it failed.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::Name { .. }
                | Self::Language { .. }
                | Self::NoVectors
                | Self::NoManifest { .. }
                | Self::NotBuilt { .. }
                | Self::Manifest { .. }
                | Self::OtherSlot { .. }
                | Self::Policy(policy::Error::Chain { .. } | policy::Error::Read { .. })
        )
    }
}

fn list(imports: &[Import]) -> String {
    imports.iter().map(|Import { name, cause }| format!("\n  {name}: {cause}")).collect()
}
