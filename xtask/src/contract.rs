//! The contract with policies is frozen: what was published stays as it is.

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::path::Path;

const FOLDER: &str = "wit/policy-0.1";
/// A line for each file: its SHA-256, and its name.
const DIGESTS: &str = "DIGESTS";
/// Where each change since is told.
const REASONS: &str = "docs/design/0001-policy-contract.md";
/// Digits of a digest that are told there.
const SHORT: usize = 12;

const RULE: &str = "the contract is frozen: only what `How it grows` in common.wit allows may be added, and nothing changed or taken \
     away; any other change is a new folder beside this one";

/// Files that are not as they were published, and changes of which no reason is told.
pub(crate) fn findings(root: &Path) -> Result<Vec<String>> {
    let folder = root.join(FOLDER);
    let read = |path: &Path| std::fs::read_to_string(path).with_context(|| path.display().to_string());
    let (published, reasons) = (read(&folder.join(DIGESTS))?, read(&root.join(REASONS))?);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(&folder)? {
        let path = entry?.path();
        let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        if name.ends_with(".wit") {
            files.push((name, digest(&std::fs::read(&path)?)));
        }
    }
    files.sort();
    Ok(compare(&files, &published, &reasons))
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}"); // to a string, which does not fail
        text
    })
}

fn compare(files: &[(String, String)], published: &str, reasons: &str) -> Vec<String> {
    let published: Vec<(&str, &str)> = published.lines().filter_map(|line| line.split_once("  ")).collect();
    let mut findings = Vec::new();
    for (name, now) in files {
        let place = format!("{FOLDER}/{name}");
        match published.iter().find(|(_, known)| known == name) {
            None => findings.push(format!("{place}: not in {DIGESTS}; {RULE}; then add `{now}  {name}`")),
            Some((known, _)) if known != now => {
                findings.push(format!("{place}: changed; {RULE}; then write `{now}  {name}` into {DIGESTS}"));
            }
            Some(_) if !reasons.contains(&now[..SHORT]) => findings
                .push(format!("{place}: {REASONS} does not tell why it is at {}; add a line", &now[..SHORT])),
            Some(_) => {}
        }
    }
    for (_, name) in published.iter().filter(|(_, name)| !files.iter().any(|(file, _)| file == name)) {
        findings.push(format!("{FOLDER}/{name}: is gone; {RULE}"));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_published_stays_and_each_change_has_its_reason() {
        let files = [("a.wit".to_owned(), digest(b"a")), ("b.wit".to_owned(), digest(b"b"))];
        let [a, b] = files.clone().map(|(name, digest)| format!("{digest}  {name}\n"));
        let reasons = format!("{} {}", &files[0].1[..SHORT], &files[1].1[..SHORT]);
        let check = |published: &str, reasons: &str, expected: &[&str]| {
            let found = compare(&files, published, reasons);
            assert_eq!(found.len(), expected.len(), "{found:?}");
            assert!(found.iter().zip(expected).all(|(found, part)| found.contains(part)), "{found:?}");
        };
        check(&format!("{a}{b}"), &reasons, &[]);
        check(&a, &reasons, &["b.wit: not in DIGESTS; the contract is frozen"]);
        check(&format!("{}{b}", a.replace("a.wit", "b.wit")), &reasons, &["a.wit: not", "b.wit: changed"]);
        check(&format!("{a}{b}{}", a.replace("a.wit", "c.wit")), &reasons, &["c.wit: is gone"]);
        check(&format!("{a}{b}"), "nothing", &["a.wit: docs/design/0001", "b.wit: docs/design/0001"]);
    }
}
