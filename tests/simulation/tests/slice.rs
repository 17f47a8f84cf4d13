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

/// A world in which nothing is ever found shows nothing.
#[test]
fn planted_bugs_are_found() {
    for bug in Bug::ALL {
        let world: &[&str] = if bug.is_of_disk() { &["--disk"] } else { &[] };
        // The first that finds it is 152.
        let seeds = if *bug == Bug::KeepsRemovedOnItsWayDown { "140..440" } else { "0..300" };
        let bug = bug.name();
        let output = simulate(&[&["--seeds", seeds, "--first", "--plant", &bug], world].concat());
        println!("{bug}: {}", said(&output));
        assert!(output.status.success(), "the seeds {seeds} do not find {bug}");
    }
}

#[test]
fn what_cannot_be_run_is_refused() {
    for args in [
        &["--seeds", "7"][..],
        &["--seeds", "9..9"],
        &["--plant", "nonsense", "--replay", "1"],
        &["--seeds", "0..9", "--hosts", "1"],
        &[],
    ] {
        assert_eq!(simulate(args).status.code(), Some(2), "{args:?}");
    }
}
