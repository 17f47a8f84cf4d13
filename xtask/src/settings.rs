//! Every `section.key` that a message, a comment or a page names is a setting that exists.

use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Where the structs of settings are declared.
const DECLARED: [&str; 2] = ["host/src/config", "dataplane/net/src/topology"];

/// The keys of each section, read from the declarations themselves.
pub(crate) struct Settings(BTreeMap<String, BTreeSet<String>>);

impl Settings {
    /// # Errors
    /// The declarations are not where they are looked for.
    pub(crate) fn read(root: &Path) -> Result<Self> {
        let mut text =
            std::fs::read_to_string(root.join("host/src/config.rs")).context("host/src/config.rs")?;
        for folder in DECLARED {
            for file in root.join(folder).read_dir().with_context(|| format!("cannot list {folder}"))? {
                let path = file?.path();
                if path.extension().is_some_and(|extension| extension == "rs") {
                    text += &std::fs::read_to_string(path)?;
                }
            }
        }
        Self::of(&text)
    }

    fn of(text: &str) -> Result<Self> {
        let structs = structs(text);
        let Some(config) = structs.get("Config") else {
            bail!("no `pub struct Config` in host/src/config.rs")
        };
        let section = |(name, of): (&String, &String)| {
            let of = of.rsplit("::").next().unwrap_or(of);
            let fields = structs.get(of).with_context(|| format!("no struct {of} for section {name}"))?;
            Ok((name.clone(), fields.keys().cloned().collect()))
        };
        config.iter().map(section).collect::<Result<_>>().map(Self)
    }

    /// Lines of `text` that name a key that its section does not have. In source, comments and strings alone are read.
    pub(crate) fn unknown<'a>(
        &'a self,
        name: &str,
        text: &'a str,
    ) -> impl Iterator<Item = (usize, String)> + 'a {
        let source = name.ends_with(".rs");
        // Tests name settings that do not exist on purpose.
        let relevant = (source && !name.contains("tests")) || name.ends_with(".md");
        let lines = text.lines().take_while(move |line| relevant && *line != "#[cfg(test)]").enumerate();
        lines.flat_map(move |(n, line)| {
            let words = if source { spoken(line) } else { quoted(line, '`') };
            let words: Vec<_> = words.iter().flat_map(|words| self.unknown_in(words)).collect();
            words.into_iter().map(move |word| (n + 1, word))
        })
    }

    fn unknown_in(&self, text: &str) -> Vec<String> {
        let mut unknown = Vec::new();
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
        let mut rest = text;
        while let Some(at) = rest.find(word) {
            let end = rest[at..].find(|c| !word(c)).map_or(rest.len(), |end| at + end);
            let (path, after) = (&rest[at..end], &rest[end..]);
            // `--set x.y=z` in tests of bad names, calls and paths of code and of files are something else.
            let before = rest[..at].chars().next_back();
            let other = after.starts_with(['(', ':', '=', '/', '-', '*'])
                || before.is_some_and(|c| "/:-$&*{".contains(c));
            if !other {
                unknown.extend(self.bad(path.trim_end_matches('.')));
            }
            rest = after;
        }
        unknown
    }

    fn bad(&self, path: &str) -> Option<String> {
        const FILES: [&str; 7] = ["rs", "md", "wasm", "toml", "proto", "wit", "sock"];
        let mut parts = path.split('.');
        let (section, key) = (parts.next()?, parts.next()?);
        let keys = self.0.get(section)?;
        let named = !key.is_empty() && !FILES.contains(&key) && !keys.contains(key);
        named.then(|| format!("{section}.{key}"))
    }
}

/// Name to field to type, of every `pub struct` with named fields.
fn structs(text: &str) -> BTreeMap<String, BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    let mut open: Option<(String, BTreeMap<String, String>)> = None;
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("pub struct ").and_then(|rest| rest.strip_suffix(" {")) {
            open = Some((name.to_owned(), BTreeMap::new()));
        } else if line == "}" {
            found.extend(open.take());
        } else if let (Some((_, fields)), Some(field)) = (&mut open, line.strip_prefix("    pub "))
            && let Some((field, of)) = field.trim_end_matches(',').split_once(": ")
        {
            fields.insert(field.to_owned(), of.to_owned());
        }
    }
    found
}

/// What a line of source says to people: its comment, and the strings in it.
fn spoken(line: &str) -> Vec<&str> {
    let line = line.trim_start();
    if line.starts_with("//") { quoted(line, '`') } else { quoted(line, '"') }
}

/// The parts of a line between pairs of `quote`.
fn quoted(line: &str, quote: char) -> Vec<&str> {
    line.split(quote).skip(1).step_by(2).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_do_not_exist_are_found_where_people_read_them() {
        let declared = "pub struct Config {\n    pub store: Store,\n}\npub struct Store {\n    pub pool_bytes: Size,\n}\n";
        let settings = Settings::of(declared).unwrap();
        let check = |name: &str, text: &str, expected: &[&str]| {
            let found: Vec<_> = settings.unknown(name, text).map(|(_, word)| word).collect();
            assert_eq!(found, expected, "{text}");
        };
        check("a.rs", "/// set `store.pool_bytes`, not `store.pool`", &["store.pool"]);
        check("a.rs", "#[error(\"enlarge store.pol_bytes or wait\")]", &["store.pol_bytes"]);
        check("a.rs", "store.validate()?; // store.x is code here", &[]);
        check("a.rs", "f(\"see store.rs and a.store.x\")", &[]);
        check("a.md", "`store.size` and store.size", &["store.size"]);
        check("a.md", "`--set store.size=1`, `dram/store.rs`", &[]);
        assert!(Settings::of("pub struct Store {\n}\n").is_err());
    }
}
