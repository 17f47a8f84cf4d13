//! What operators see of the settings: their names, defaults and order, and the words of each refusal. The expected texts
//! are what the tests found when they were written; a text that improves is changed here by hand.

use super::load;
use std::collections::BTreeMap;
use toml::{Table, Value};

/// These defaults come from the user and the machine.
const NAMED: [&str; 3] = ["node.name=a", "node.data_dir=/d", "conductor.workers=4"];

#[test]
fn defaults_are_printed_under_their_names() {
    assert_eq!(load(None, &[], &NAMED).unwrap().to_toml(), include_str!("default.toml"));
}

#[test]
fn settings_are_printed_as_they_were_set() {
    let text = include_str!("changed.toml");
    assert_eq!(load(Some(text), &[], &[]).unwrap().to_toml(), text);
}

#[test]
fn every_setting_is_among_those_that_were_set() {
    let (default, changed) = (leaves(include_str!("default.toml")), leaves(include_str!("changed.toml")));
    let left: Vec<_> = default.iter().filter(|(key, value)| changed.get(*key) == Some(value)).collect();
    assert!(left.is_empty(), "{left:?}");
    let known = |key: &str| default.keys().any(|section| key.starts_with(section.as_str()));
    let unknown: Vec<_> = changed.keys().filter(|key| !known(key)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

/// Cases apart by an empty line: the assignments, and what is said to them.
#[test]
fn refusals_say_key_value_and_reason() {
    for case in include_str!("refusals.txt").split("\n\n") {
        let set = case.lines().filter_map(|line| line.strip_prefix("--set "));
        let set: Vec<_> = ["node.name=a", "node.data_dir=/d"].into_iter().chain(set).collect();
        let expected = case.lines().find_map(|line| line.strip_prefix("    ")).unwrap();
        assert_eq!(load(None, &[], &set).expect_err(case), expected, "{case}");
    }
}

/// Every value by its path; a table without any stands for itself.
fn leaves(text: &str) -> BTreeMap<String, Value> {
    fn walk(path: String, value: Value, leaves: &mut BTreeMap<String, Value>) {
        match value {
            Value::Table(table) if !table.is_empty() => {
                table.into_iter().for_each(|(key, value)| walk(format!("{path}.{key}"), value, leaves));
            }
            value => drop(leaves.insert(path, value)),
        }
    }
    let mut found = BTreeMap::new();
    let table: Table = text.parse().unwrap();
    table.into_iter().for_each(|(key, value)| walk(key, value, &mut found));
    found
}
