//! No room of `host/src` uses another that uses it, by whatever way round.

use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// What each room uses of the others.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// Rooms that use each other, one finding for each that can come back to itself.
///
/// # Errors
/// A source file cannot be read.
pub(crate) fn findings(root: &Path) -> Result<Vec<String>> {
    let uses = uses(&root.join("host/src"))?;
    let circle = |room: &String| {
        let way = way_back(&uses, room)?;
        Some(format!("host/src: a circle of rooms: {}", way.join(" -> ")))
    };
    Ok(uses.keys().filter_map(circle).collect())
}

fn uses(folder: &Path) -> Result<Uses> {
    let mut uses = Uses::new();
    for file in sources(folder)? {
        let below = file.strip_prefix(folder).expect("it was found below");
        let room = below.iter().next().and_then(|first| Path::new(first).file_stem());
        let room = room.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        uses.entry(room.clone()).or_default().extend(named(&text).filter(|other| *other != room));
    }
    let rooms: BTreeSet<String> = uses.keys().cloned().collect();
    uses.values_mut().for_each(|others| others.retain(|other| rooms.contains(other)));
    Ok(uses)
}

/// Every source file but those of tests.
fn sources(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.file_stem().is_some_and(|name| name == "tests") {
            continue;
        }
        if path.is_dir() {
            found.extend(sources(&path)?);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            found.push(path);
        }
    }
    Ok(found)
}

/// What follows `crate::` in a file, but for its comments and its tests, which come last.
fn named(text: &str) -> impl Iterator<Item = String> {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let uses = lines.flat_map(|line| line.split("crate::").skip(1));
    uses.map(|rest| rest.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect())
}

/// The shortest way from a room back to itself.
fn way_back(uses: &Uses, room: &str) -> Option<Vec<String>> {
    let mut ways = vec![vec![room.to_owned()]];
    let mut seen = BTreeSet::new();
    while !ways.is_empty() {
        let mut longer = Vec::new();
        for way in ways {
            for next in &uses[way.last().expect("it begins with the room")] {
                let way: Vec<_> = way.iter().chain([next]).cloned().collect();
                if next == room {
                    return Some(way);
                }
                if seen.insert(next.clone()) {
                    longer.push(way);
                }
            }
        }
        ways = longer;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_circle_is_found_however_long() {
        let root = std::env::temp_dir().join(format!("kvasir-rooms-{}", std::process::id()));
        let write = |name: &str, text: &str| {
            let file = root.join("host/src").join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        write("policy.rs", "use crate::fleet::Fleet;\n// crate::conductor\n");
        write("policy/tests.rs", "use crate::conductor::Conductor;\n");
        write("fleet/table.rs", "#[cfg(test)]\nmod tests {\n use crate::policy::Slot;\n}\n");
        write("conductor.rs", "fn ask() { crate::policy::ask(); }\n");
        assert!(findings(&root).unwrap().is_empty());
        write("fleet.rs", "use crate::conductor::Conductor;\n");
        let way = "host/src: a circle of rooms: conductor -> policy -> fleet -> conductor";
        assert_eq!(findings(&root).unwrap()[0], way);
        fs::remove_dir_all(&root).unwrap();
    }
}
