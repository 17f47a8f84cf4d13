//! Nobody reads what is printed: `kvasir policy list | head -1`.

use crate::process::{Host, KVASIR, serve};
use crate::replicas::until;
use std::process::{Command, Output, Stdio};

/// The end of a pipe whose other end is gone.
fn unread() -> Stdio {
    std::io::pipe().unwrap().1.into()
}

fn kvasir(host: &Host, args: &[&str]) -> Command {
    let mut command = Command::new(KVASIR);
    command.args(args);
    command.env("KVASIR_HOST", format!("unix:{}", host.addr("socket")));
    command.env("KVASIR_GRPC", format!("unix:{}", host.addr("control")));
    command
}

/// Exit code and standard error.
fn said(output: Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_command_that_nobody_reads_ends_quietly() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(dir.path());
    host.check(&["put", "a"], b"some bytes", 0, "stored");
    for args in [
        &["policy", "list"][..],
        &["policy", "list", "--json"],
        &["policy", "history"],
        &["policy", "logs", "scheduler", "--json"],
        &["policy", "status", "evictor"],
        &["config", "print"],
        &["completions", "bash"],
        &["get", "a"],
        &["ls"],
        &["stat", "--json"],
    ] {
        let output = kvasir(&host, args).stdout(unread()).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(said(output), (Some(141), String::new()), "{args:?}");
    }
    // Of what goes wrong nobody hears either, but for the code.
    let refused = kvasir(&host, &["policy", "load", "evictor", "lur"]).stderr(unread()).output().unwrap();
    assert_eq!(said(refused), (Some(2), String::new()));
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = kvasir(&host, &["policy", "list"]).stdout(full).stderr(Stdio::piped()).output().unwrap();
    let (code, text) = said(output);
    assert!(
        code == Some(2) && text.starts_with("kvasir: cannot write to standard output"),
        "{code:?} {text}"
    );
}

#[test]
fn a_host_whose_output_nobody_reads_serves() {
    let dir = tempfile::tempdir().unwrap();
    let mut host =
        serve(dir.path()).env("RUST_LOG", "debug").stdout(unread()).stderr(unread()).spawn().unwrap();
    let list = || {
        let mut command = Command::new(KVASIR);
        command.args(["policy", "load", "evictor", "lru"]);
        command.env("KVASIR_GRPC", format!("unix:{}", dir.path().join("control.sock").display()));
        command.output().unwrap().status.success()
    };
    until("it serves", list);
    let pid = rustix::process::Pid::from_child(&host);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(host.wait().unwrap().code(), Some(0));
}
