//! Hosts, puts with two copies, crashes: a fixed range of seeds, each in a process of its own.

use std::process::{Command, Output};

use kvasir_os::planted::Bug;

fn simulate(args: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_kvasir-tests-simulation")).args(args).output();
    output.expect("it can be started")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn what_was_promised_is_kept() {
    for (hosts, seeds) in [("2", "0..50"), ("3", "0..12"), ("5", "0..4")] {
        let output = simulate(&["--seeds", seeds, "--hosts", hosts]);
        assert!(
            output.status.success(),
            "replay a seed with `cargo xtask simulate --replay SEED --hosts {hosts} --trace`\n{}",
            said(&output)
        );
    }
}

#[test]
fn a_disk_that_fails_costs_only_what_was_not_durable() {
    let output = simulate(&["--seeds", "0..100", "--disk"]);
    assert!(
        output.status.success(),
        "replay a seed with `cargo xtask simulate --replay SEED --disk --trace`\n{}",
        said(&output)
    );
}

#[test]
fn a_seed_is_one_history() {
    is_one_history(&[]);
    is_one_history(&["--disk"]);
}

fn is_one_history(world: &[&str]) {
    let trace = |seed: &str| {
        let said = said(&simulate(&[&["--replay", seed, "--trace"], world].concat()));
        // The folder of its files is named by the process.
        said.lines().filter(|line| !line.contains("kvasir-simulation-")).collect::<Vec<_>>().join("\n")
    };
    let (first, second) = (trace("4"), trace("4"));
    assert!(first.lines().count() > 100, "{first}");
    for (one, other) in first.lines().zip(second.lines()) {
        assert_eq!(one, other, "from the same seed");
    }
    assert_eq!(first.len(), second.len());
    assert_ne!(first, trace("5"), "another seed is another history");
}

/// What is left fails in the same way, with few of the steps, and is said so that it can be repeated.
#[test]
fn a_seed_that_fails_is_shrunk() {
    let plant = ["--plant", "reports-copy-before-its-bytes"];
    let shrunk = simulate(&[&["--seeds", "0..20", "--shrink"][..], &plant].concat());
    let shrunk = said(&shrunk);
    println!("{shrunk}");
    let (before, after) = shrunk.split_once(" are left:").expect("it says what is left");
    let (left, all) = before.lines().last().and_then(|line| line.split_once(" of ")).expect("and how much");
    let count = |text: &str| text.split(' ').next().and_then(|count| count.parse::<u32>().ok());
    let (left, all) = (count(left).expect("a number"), count(all).expect("a number"));
    assert!(left > 0 && left * 4 < all, "{left} steps are left of {all}");

    let command =
        after.lines().find_map(|line| line.split_once("cargo xtask simulate ")).expect("the command");
    let again = said(&simulate(&command.1.split(' ').collect::<Vec<_>>()));
    let violation = |text: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix("violated: "));
        line.unwrap_or_default().replace(|letter: char| letter.is_ascii_digit(), "")
    };
    assert!(!violation(&again).is_empty(), "{again}");
    let first = shrunk.lines().find_map(|line| line.strip_prefix("shrinks ")?.split_once(" steps: "));
    let first = format!("violated: {}", first.expect("a seed failed").1);
    assert_eq!(violation(&again), violation(&first));
}

/// A world in which nothing is ever found shows nothing.
#[test]
fn planted_bugs_are_found() {
    for bug in Bug::ALL {
        let world: &[&str] = match bug {
            // Of two hosts none has a copy too many.
            Bug::TrimsWhatHostsShare => &["--hosts", "3"],
            // A disk or a bucket must fail amid a removal, and nothing else hide it, which is rarer with two.
            Bug::ForgetsUnfinishedRemovals => &["--hosts", "3"],
            bug if bug.is_of_disk() => &["--disk"],
            _ => &[],
        };
        // It takes two power cuts, each at the right moment.
        let seeds = if *bug == Bug::GivesEpochAgain { "0..3000" } else { "0..1000" };
        let bug = bug.name();
        let output = simulate(&[&["--seeds", seeds, "--first", "--plant", &bug], world].concat());
        println!("{bug}: {}", said(&output));
        assert!(output.status.success(), "no seed finds {bug}");
    }
}

#[test]
fn what_cannot_be_run_is_refused() {
    for args in [
        &["--seeds", "7"][..],
        &["--seeds", "9..9"],
        &["--plant", "nonsense", "--replay", "1"],
        &["--seeds", "0..9", "--hosts", "1"],
        &["--seeds", "0..9", "--hosts", "31"],
        &["--seeds", "0..9", "--faults", "weather"],
        &["--seeds", "0..9", "--disk", "--shrink"],
        &["--replay", "1", "--only", "3-x"],
        &[],
    ] {
        assert_eq!(simulate(args).status.code(), Some(2), "{args:?}");
    }
}
