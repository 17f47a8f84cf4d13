//! The graph of crates in ARCHITECTURE.md is that of the manifests, and what is for tests alone is in no product.

use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const PAGE: &str = "ARCHITECTURE.md";
/// Where the crates are that the page has a line for.
const ROOMS: [&str; 4] = ["clients/", "dataplane", "host", "proto"];

/// Crates there that no other crate uses.
const LEAVES: [&str; 2] = ["clients/c", "clients/python"];

/// Features of crates that only tests may ask for.
const FOR_TESTS: [&str; 2] = ["\"conformance\"", "\"testing\""];

/// Lines that the page lacks, or has for nothing, and manifests that build what is for tests into the product.
///
/// # Errors
/// A manifest or the page cannot be read.
pub(crate) fn findings(root: &Path) -> Result<Vec<String>> {
    let read = |name: &str| fs::read_to_string(root.join(name)).with_context(|| name.to_owned());
    let mut folders = folders(&read("Cargo.toml")?);
    // Nobody in the workspace uses these.
    folders.extend(LEAVES.map(|at| (at.to_owned(), at.to_owned())));
    let (mut lines, mut rigs) = (Vec::new(), Vec::new());
    for folder in folders.values().filter(|folder| ROOMS.iter().any(|room| folder.starts_with(room))) {
        let manifest = read(&format!("{folder}/Cargo.toml"))?;
        if used(&manifest).any(|line| FOR_TESTS.iter().any(|feature| line.contains(feature))) {
            rigs.push(format!("{folder}/Cargo.toml: what is for tests alone is a dependency of the product"));
        }
        let known = dependencies(&manifest);
        let mut known: Vec<_> =
            known.iter().filter_map(|name| folders.get(name)).map(|at| short(at)).collect();
        known.sort_unstable();
        lines.push(format!(
            "{} -> {}",
            short(folder),
            if known.is_empty() { "-".into() } else { known.join(", ") }
        ));
    }
    let page = read(PAGE)?;
    let drawn: Vec<&str> =
        page.lines().filter(|line| line.contains(" -> ") && !line.starts_with('|')).collect();
    let lacking = lines.iter().filter(|line| !drawn.contains(&line.as_str()));
    let lacking = lacking.map(|line| format!("{PAGE}: the graph of crates lacks the line `{line}`"));
    let surplus = drawn.iter().filter(|&&line| !lines.iter().any(|known| known == line));
    let surplus =
        surplus.map(|line| format!("{PAGE}: the graph of crates has the line `{line}` for nothing"));
    Ok(lacking.chain(surplus).chain(rigs).collect())
}

/// Name to folder, of the crates that others of the workspace may use.
fn folders(workspace: &str) -> BTreeMap<String, String> {
    let of = |line: &str| {
        let (name, rest) = line.split_once(" = { path = \"")?;
        Some((name.to_owned(), rest.split('"').next()?.to_owned()))
    };
    workspace.lines().filter_map(of).collect()
}

/// What a manifest says of what a crate uses, except for tests and builds.
fn used(manifest: &str) -> impl Iterator<Item = &str> {
    let section = manifest.lines().skip_while(|line| *line != "[dependencies]").skip(1);
    section.take_while(|line| !line.starts_with('['))
}

/// The crates of the workspace among that.
fn dependencies(manifest: &str) -> Vec<String> {
    used(manifest)
        .filter(|line| line.starts_with("kvasir"))
        .filter_map(|line| line.split(['.', ' ']).next())
        .map(str::to_owned)
        .collect()
}

fn short(folder: &str) -> &str {
    folder.strip_prefix("dataplane/").unwrap_or(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_missing_is_found() {
        let dir = std::env::temp_dir().join(format!("kvasir-graph-{}", std::process::id()));
        let write = |name: &str, text: &str| {
            fs::create_dir_all(dir.join(name).parent().unwrap()).unwrap();
            fs::write(dir.join(name), text).unwrap();
        };
        write(
            "Cargo.toml",
            "kvasir-store = { path = \"dataplane/store\" }\nkvasir-memory = { path = \"dataplane/memory\" }\n",
        );
        write("dataplane/memory/Cargo.toml", "[dependencies]\nserde.workspace = true\n");
        LEAVES.iter().for_each(|at| write(&format!("{at}/Cargo.toml"), "[dependencies]\n"));
        let uses =
            "[dependencies]\nkvasir-memory.workspace = true\n[dev-dependencies]\nkvasir-x.workspace = true\n";
        write("dataplane/store/Cargo.toml", uses);
        write(PAGE, "clients/c -> -\nclients/python -> -\nmemory -> -\nstore -> net\n");
        let found = findings(&dir).unwrap();
        assert_eq!(
            found,
            [
                "ARCHITECTURE.md: the graph of crates lacks the line `store -> memory`",
                "ARCHITECTURE.md: the graph of crates has the line `store -> net` for nothing"
            ]
        );
        write(PAGE, "clients/c -> -\nclients/python -> -\nmemory -> -\nstore -> memory\n");
        assert!(findings(&dir).unwrap().is_empty());
        let uses = "[dependencies]\nkvasir-memory = { workspace = true, features = [\"testing\"] }\n";
        write("dataplane/store/Cargo.toml", uses);
        let rig = "dataplane/store/Cargo.toml: what is for tests alone is a dependency of the product";
        assert_eq!(findings(&dir).unwrap(), [rig]);
        fs::remove_dir_all(&dir).unwrap();
    }
}
