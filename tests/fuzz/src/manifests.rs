//! Short texts of people: the file of a chain (`c`), of a project (`p`), the arguments of `kvasir policy`, one a line (`f`), a
//! reference into a registry (`r`), and single words (`w`).

use crate::kind;
use crate::text::told;
use clap::Parser;
use kvasir::authoring::Project;
use kvasir::bench::contest::Budget;
use kvasir::cli::Cli;
use kvasir::package::Reference;
use kvasir::policy::chain::{self, Role};
use kvasir::policy::{Digest, SlotKind};
use std::path::Path;

pub(crate) fn run(data: &[u8]) {
    let Some((kind, text)) = kind(data) else { return };
    let Ok(text) = str::from_utf8(text) else { return };
    match kind {
        b'c' => chain_file(text),
        b'p' => project(text),
        b'f' => flags(text),
        b'r' => reference(text),
        b'w' => words(text),
        _ => {}
    }
}

fn chain_file(text: &str) {
    match chain::parse(Path::new("folder/mine.toml"), text) {
        Ok((name, parts)) => {
            assert_eq!(name, "mine");
            let picker = parts.last().map(|part| part.role);
            assert_eq!(picker, Some(Role::Pick));
            for part in parts {
                assert!(!matches!(part.role, Role::Score { weight_permille: 1_000_000_001.. }));
            }
        }
        Err(refusal) => drop(told(&refusal)),
    }
}

fn project(text: &str) {
    match Project::parse(Path::new("folder"), text) {
        Ok(project) => {
            let component = project.component();
            assert!(component.starts_with("folder"), "{} is outside of its folder", component.display());
            project.limits();
        }
        Err(refusal) => drop(told(&refusal)),
    }
}

/// Flags are their user's own, who may see them as they are.
fn flags(text: &str) {
    if let Err(refusal) = Cli::try_parse_from(["kvasir", "policy"].into_iter().chain(text.lines())) {
        let _ = refusal.to_string();
    }
}

fn reference(text: &str) {
    match text.parse::<Reference>() {
        Ok(reference) => {
            assert_eq!(reference.to_string().parse().ok().as_ref(), Some(&reference));
            assert!(reference.to_string().is_ascii() && !reference.repository.contains(".."));
        }
        Err(refusal) => drop(told(&refusal)),
    }
}

fn words(text: &str) {
    let _ = text.parse::<Budget>();
    match text.parse::<Digest>() {
        Ok(digest) => assert_eq!(digest.to_string(), text),
        Err(refusal) => drop(told(&refusal)),
    }
    if let Ok(slot) = text.parse::<SlotKind>() {
        assert_eq!(slot.as_str(), text);
    }
}
