//! `cargo xtask powercut`: power cuts, replayed from a recording of a block device in a virtual machine (tests/powercut).

use crate::shell::Shell;
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::process::Command;

const PROGRAM: &str = "kvasir-tests-powercut";
/// Time for the machine to come up, besides what the run itself takes.
const LIMIT_S: &str = "36000";

/// The machine, with block devices, its time limit in seconds.
pub(crate) fn machine(shell: &Shell, limit: &str) -> Command {
    let mut machine = Command::new(shell.root().join("tests/rdma-vm/run-in-rdma-vm"));
    machine.args(["--blocks", "--timeout", limit]);
    machine
}

/// A run of the program, built if need be, in the machine.
pub(crate) fn session(shell: &Shell, limit: &str) -> Result<Command> {
    shell.run(shell.cargo().args(["build", "--quiet", "--locked", "--package", PROGRAM]))?;
    let mut session = machine(shell, limit);
    session.arg("--file").arg(format!("{}:powercut", shell.target("debug").join(PROGRAM).display()));
    let kept = shell.target("powercut");
    std::fs::create_dir_all(&kept).with_context(|| kept.display().to_string())?;
    session.arg("--share").arg(kept).args(["--", "./powercut", "session", "--keep", "/share"]);
    Ok(session)
}

/// One run with its own output.
pub(crate) fn run(shell: &Shell, args: Vec<OsString>) -> Result<std::process::ExitCode> {
    shell.exec(session(shell, LIMIT_S)?.args(args))
}
