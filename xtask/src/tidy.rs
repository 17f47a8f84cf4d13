//! `cargo xtask tidy`: checks of the repository's text that no compiler makes.

use crate::settings::Settings;
use crate::shell::Shell;
use crate::{contract, graph, rooms};
use anyhow::{Result, bail};
use std::path::Path;
use std::process::Command;

/// Source files longer than this are listed: they may hold two ideas.
const LONG_LINES: usize = 900;

/// Policies that show what the contract can say, each of which fits into one file shorter than this.
const SAMPLES: [&str; 13] = [
    "arc-evictor",
    "fitted-cost-scheduler",
    "gdsf-evictor",
    "lbgr-scheduler",
    "lhd-evictor",
    "local-or-remote-scheduler",
    "lora-affinity-scheduler",
    "netkv-scheduler",
    "overlap-cost-scheduler",
    "rlt-evictor",
    "s3fifo-evictor",
    "score-scheduler",
    "vtc-scheduler",
];
const SAMPLE_LINES: usize = 200;

/// Folders that exist on one machine only, and hosts that a mirror may stand in for. Written in
/// halves so that this file passes its own check.
const FOREIGN: &[&str] = &[
    concat!("/ho", "me/"),
    concat!("/ro", "ot/"),
    concat!("/wo", "rk/"),
    concat!("/Use", "rs/"),
    concat!("index.crates", ".io"),
    concat!("static.crates", ".io"),
    concat!("registry.npmjs", ".org"),
    concat!("pypi", ".org"),
    concat!("deb.debian", ".org"),
];

/// Prints long files; fails on everything else it finds, all at once.
pub(crate) fn run(shell: &Shell, tasks: &[String]) -> Result<()> {
    let listed = shell.output(Command::new("git").current_dir(shell.root()).args([
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
    ]))?;
    let settings = Settings::read(shell.root())?;
    let mut findings = graph::findings(shell.root())?;
    findings.extend(contract::findings(shell.root())?);
    findings.extend(rooms::findings(shell.root())?);
    for name in listed.lines().filter(|name| *name != "Cargo.lock") {
        // Binary files, and files deleted but not yet committed.
        let Ok(text) = std::fs::read_to_string(shell.root().join(name)) else { continue };
        findings.extend(foreign_names(&text).map(|(line, what)| format!("{name}:{line}: names `{what}`")));
        let unknown = settings.unknown(name, &text);
        findings.extend(unknown.map(|(line, key)| format!("{name}:{line}: no setting `{key}`")));
        if name.ends_with(".md") {
            let folder = shell.root().join(name).parent().map(Path::to_path_buf).unwrap_or_default();
            let broken = links(&text).filter(|(_, link)| !folder.join(link).exists());
            findings.extend(broken.map(|(line, link)| format!("{name}:{line}: link to missing `{link}`")));
            let unknown = tasks_named(&text).filter(|(_, task)| !tasks.iter().any(|t| t == task));
            findings
                .extend(unknown.map(|(line, task)| format!("{name}:{line}: no task `cargo xtask {task}`")));
        }
        if let Some(lines) = lines_of_sample(name, &text).filter(|lines| *lines >= SAMPLE_LINES) {
            findings.push(format!(
                "{name}: {lines} lines without its tests; a sample has less than {SAMPLE_LINES}"
            ));
        }
        if name.ends_with(".rs") && text.lines().count() > LONG_LINES {
            println!("{name}: {} lines; does it hold two ideas?", text.lines().count());
        }
    }
    if !findings.is_empty() {
        bail!("{} findings:\n{}", findings.len(), findings.join("\n"));
    }
    Ok(())
}

/// Lines of the policy, if that file is one of a sample.
fn lines_of_sample(name: &str, text: &str) -> Option<usize> {
    let policy = name.strip_prefix("policies/")?.strip_suffix("/src/lib.rs")?;
    let tests = text.lines().position(|line| line.trim() == "#[cfg(test)]");
    SAMPLES.contains(&policy).then(|| tests.unwrap_or(text.lines().count()))
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(i, line)| (i + 1, line))
}

/// A folder counts only at the beginning of a path, so `framework/` and `a/home/b` are fine.
fn foreign_names(text: &str) -> impl Iterator<Item = (usize, &'static str)> {
    let begins = |before: &str| !before.ends_with(|c: char| c.is_alphanumeric() || "_-.*}".contains(c));
    let found = move |line: &str, what: &str| line.match_indices(what).any(|(at, _)| begins(&line[..at]));
    numbered(text).flat_map(move |(n, line)| {
        FOREIGN.iter().filter(move |what| found(line, what)).map(move |what| (n, *what))
    })
}

/// Targets of `[text](target)` within the repository, without their anchors.
fn links(text: &str) -> impl Iterator<Item = (usize, &str)> {
    numbered(text)
        .flat_map(|(n, line)| line.split("](").skip(1).map(move |rest| (n, rest)))
        .filter_map(|(n, rest)| Some((n, rest.split_once(')')?.0.split('#').next()?)))
        .filter(|(_, link)| !link.is_empty() && !link.contains("://") && !link.starts_with("mailto:"))
}

/// Words after `cargo xtask`.
fn tasks_named(text: &str) -> impl Iterator<Item = (usize, &str)> {
    numbered(text)
        .flat_map(|(n, line)| line.split("cargo xtask ").skip(1).map(move |rest| (n, rest)))
        .filter_map(|(n, rest)| Some((n, rest.split(|c: char| !c.is_ascii_lowercase()).next()?)))
        .filter(|(_, task)| !task.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_links_and_tasks() {
        let text = "see [a](docs/a.md#top), [b](https://x.y/z), [c](#here)\n`cargo xtask demo` then cargo xtask nope.";
        assert_eq!(links(text).collect::<Vec<_>>(), [(1, "docs/a.md")]);
        assert_eq!(tasks_named(text).collect::<Vec<_>>(), [(2, "demo"), (2, "nope")]);
    }

    #[test]
    fn samples_are_counted_without_their_tests() {
        let text = "a\nb\n\n#[cfg(test)]\nmod tests;\n";
        let count = |policy: &str| lines_of_sample(&format!("policies/{policy}/src/lib.rs"), text);
        assert_eq!((count("arc-evictor"), count("sieve-evictor")), (Some(3), None));
        assert_eq!(lines_of_sample("policies/arc-evictor/src/tests.rs", text), None);
        assert_eq!(lines_of_sample("policies/arc-evictor/src/lib.rs", "a\nb"), Some(2));
    }

    #[test]
    fn finds_foreign_names_where_a_path_begins() {
        let work = FOREIGN[2];
        for (text, found) in [
            (format!("cd {work}x"), true),
            (format!("`{work}x`"), true),
            (format!("frame{}", &work[1..]), false),
            (format!("a{work}x"), false),
            (format!("https://{}/x", FOREIGN[4]), true),
        ] {
            assert_eq!(foreign_names(&text).next().is_some(), found, "{text}");
        }
    }
}
