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
fn a_seed_is_one_history() {
    let trace = || said(&simulate(&["--replay", "4", "--trace"]));
    let (first, second) = (trace(), trace());
    assert!(first.lines().count() > 100, "{first}");
    for (one, other) in first.lines().zip(second.lines()) {
        assert_eq!(one, other, "from the same seed");
    }
    assert_eq!(first.len(), second.len());
    assert_ne!(first, said(&simulate(&["--replay", "5", "--trace"])), "another seed is another history");
}

/// A world in which nothing is ever found shows nothing.
#[test]
fn planted_bugs_are_found() {
    for bug in Bug::ALL.iter().map(|bug| bug.name()) {
        let output = simulate(&["--seeds", "0..100", "--first", "--plant", &bug]);
        println!("{bug}: {}", said(&output));
        assert!(output.status.success(), "100 seeds do not find {bug}");
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
