//! How `kvasir policy --help` lists its verbs: in the order of a policy's life, one line each.

use super::Action;
use clap::{Command, Subcommand};

/// Without clap's own list, which knows no groups.
pub(super) const TEMPLATE: &str =
    "{about-with-newline}\n{usage-heading} {usage}{after-help}\nOptions:\n{options}";

/// What is done one after the other, and the verbs for it.
pub(super) const STAGES: [(&str, &[&str]); 5] = [
    ("Write", &["new", "build", "check", "inspect"]),
    ("Prove", &["run", "bench", "replay"]),
    ("Hand on", &["sign", "verify", "trust", "push", "pull", "save", "load-bundle"]),
    ("Roll out", &["load", "promote", "rollback", "pause", "resume", "set", "rollout"]),
    ("Watch", &["list", "status", "logs", "history"]),
];

/// The list, of the verbs that there are.
pub(super) fn verbs() -> String {
    let command = Action::augment_subcommands(Command::new("policy"));
    let mut text = String::new();
    for (stage, verbs) in STAGES {
        let known: Vec<_> = verbs.iter().filter_map(|verb| command.find_subcommand(verb)).collect();
        if known.is_empty() {
            continue;
        }
        text += &format!("{stage}:\n");
        for verb in known {
            text += &format!("  {:11} {}\n", verb.get_name(), gist(verb));
        }
        text.push('\n');
    }
    text + "`kvasir policy VERB --help` tells more of one.\n"
}

/// The first sentence about a verb.
fn gist(verb: &Command) -> String {
    let about = verb.get_about().map(ToString::to_string).unwrap_or_default();
    about.split(". ").next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_verb_has_two_flags_of_one_name() {
        Action::augment_subcommands(Command::new("policy")).debug_assert();
    }

    #[test]
    fn every_verb_can_answer_in_json() {
        fn check(verb: &Command, path: &str) {
            let path = format!("{path} {}", verb.get_name());
            if verb.has_subcommands() {
                return verb.get_subcommands().for_each(|below| check(below, &path));
            }
            let flag = verb.get_arguments().find(|argument| argument.get_long() == Some("json"));
            assert!(flag.is_some_and(|flag| !flag.get_action().takes_values()), "{path} has no --json");
        }
        check(&Action::augment_subcommands(Command::new("policy")), "kvasir");
    }

    #[test]
    fn every_verb_is_listed_once_on_one_line() {
        let command = Action::augment_subcommands(Command::new("policy"));
        let text = verbs();
        for verb in command.get_subcommands() {
            let line = |line: &&str| line.starts_with(&format!("  {} ", verb.get_name()));
            assert_eq!(text.lines().filter(line).count(), 1, "{} in:\n{text}", verb.get_name());
            let gist = gist(verb);
            assert!(!gist.is_empty() && !gist.contains('\n') && gist.len() <= 86, "{gist}");
        }
    }
}
