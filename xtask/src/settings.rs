//! Every `section.key` that a message, a comment or a page names is a setting that exists.

use anyhow::{Context, Result, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// All settings, as a host prints them; a test of the host keeps it so.
const PRINTED: &str = "host/src/config/tests/default.toml";

/// The keys of each section.
pub(crate) struct Settings(BTreeMap<String, BTreeSet<String>>);

impl Settings {
    /// # Errors
    /// The settings are not where they are looked for.
    pub(crate) fn read(root: &Path) -> Result<Self> {
        Self::of(&std::fs::read_to_string(root.join(PRINTED)).context(PRINTED)?)
    }

    fn of(printed: &str) -> Result<Self> {
        let (mut sections, mut section) = (BTreeMap::<_, BTreeSet<_>>::new(), String::new());
        for line in printed.lines() {
            if let Some(path) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                section = path.to_owned();
            }
            let path = line.split_once(" = ").map_or(section.clone(), |(key, _)| format!("{section}.{key}"));
            let (top, rest) = path.split_once('.').unwrap_or((&path, ""));
            let key = rest.split('.').next().filter(|key| !key.is_empty());
            sections.entry(top.to_owned()).or_default().extend(key.map(str::to_owned));
        }
        ensure!(!sections.is_empty(), "{PRINTED} has no settings");
        Ok(Self(sections))
    }

    /// Lines of `text` that name a key that its section does not have. In source, comments and strings alone are read.
    pub(crate) fn unknown<'a>(
        &'a self,
        name: &str,
        text: &'a str,
    ) -> impl Iterator<Item = (usize, String)> + 'a {
        let source = [".rs", ".proto"].iter().any(|end| name.ends_with(end));
        // Tests name settings that do not exist on purpose.
        let relevant = (source && !name.contains("tests")) || name.ends_with(".md");
        let lines = text.lines().take_while(move |line| relevant && *line != "#[cfg(test)]").enumerate();
        // In a string that began on a line before.
        let mut inside = false;
        lines.flat_map(move |(n, line)| {
            let words = if source { spoken(line, &mut inside) } else { quoted(line, '`') };
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
        const FILES: [&str; 12] =
            ["rs", "md", "wasm", "toml", "proto", "wit", "sock", "c", "cpp", "ts", "js", "py"];
        let mut parts = path.split('.');
        let (section, key) = (parts.next()?, parts.next()?);
        let keys = self.0.get(section)?;
        let named = !key.is_empty() && !FILES.contains(&key) && !keys.contains(key);
        named.then(|| format!("{section}.{key}"))
    }
}

/// What a line of source says to people: its comment, and the strings in it.
fn spoken<'a>(line: &'a str, inside: &mut bool) -> Vec<&'a str> {
    let line = line.trim();
    if line.starts_with("//") && !*inside {
        return quoted(line, '`');
    }
    let words = line.split('"').skip(usize::from(!*inside)).step_by(2).collect();
    let quotes = line.matches('"').count() - line.matches("\\\"").count();
    *inside = line.ends_with('\\') && (quotes % 2 == 1) != *inside;
    words
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
        let settings = Settings::of("[store]\npool_bytes = \"1GiB\"\n\n[listen.tls]\ncert = \"\"\n").unwrap();
        let check = |name: &str, text: &str, expected: &[&str]| {
            let found: Vec<_> = settings.unknown(name, text).map(|(_, word)| word).collect();
            assert_eq!(found, expected, "{text}");
        };
        check("a.rs", "/// set `store.pool_bytes`, not `store.pool`", &["store.pool"]);
        check("a.rs", "#[error(\"enlarge store.pol_bytes or wait\")]", &["store.pol_bytes"]);
        check("a.rs", "store.validate()?; // store.x is code here", &[]);
        check("a.rs", "f(\"wait, or \\\n  lower store.pol_bytes\");\nlet store.x = 1;", &["store.pol_bytes"]);
        check("a.rs", "f(\"see store.rs and a.store.x\")", &[]);
        check("a.md", "`store.size` and store.size", &["store.size"]);
        check("a.md", "`--set store.size=1`, `dram/store.rs`", &[]);
        check("a.md", "`listen.tls` and `listen.cert`", &["listen.cert"]);
        assert!(Settings::of("").is_err());
    }
}
