//! The project's chores: `cargo xtask --help`.

mod checks;
mod contract;
mod engines;
mod fuzz;
mod graph;
mod languages;
mod powercut;
mod python;
mod rooms;
mod settings;
mod shell;
mod tidy;
mod wheels;

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser, Subcommand};
use shell::Shell;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// Builds, checks and shows Kvasir.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build everything quickly, then run the demo: `kvasir dev --demo`, real bytes, a live swap.
    Demo {
        /// Passed on to `kvasir dev --demo`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Run every check: formatting, clippy, unit, integration, whole-system and doc tests, dependencies.
    Test {
        /// Leave out the whole-system scenarios, the rendered docs and the dependency check.
        #[arg(long, conflicts_with_all = ["wheel", "rdma", "gpu", "miri", "tsan"])]
        quick: bool,
        /// Run only the checks of the Python wheel, under each Python that is here.
        #[arg(long, conflicts_with_all = ["rdma", "gpu", "miri", "tsan", "real_engine"])]
        wheel: bool,
        /// Run only the RDMA tests, in a virtual machine with two Soft-RoCE devices (tests/rdma-vm).
        #[arg(long, conflicts_with_all = ["gpu", "miri", "tsan"])]
        rdma: bool,
        /// Run only the tests that need a CUDA device; where there is none, on one in software (tests/cuda).
        #[arg(long, conflicts_with_all = ["miri", "tsan"])]
        gpu: bool,
        /// Run only the templates of policies in the languages that CI tests, as far as their tools are here (docs/policy-languages.md).
        #[arg(long, conflicts_with_all = ["quick", "wheel", "rdma", "gpu", "miri", "tsan", "real_engine"])]
        languages: bool,
        /// The same in every language; JavaScript's, Python's and Go's components have a runtime in them, Zig's and Go's tools are large.
        #[arg(long, conflicts_with_all = ["quick", "wheel", "rdma", "gpu", "miri", "tsan", "real_engine", "languages"])]
        all_languages: bool,
        /// Run only what runs under Miri: allocator, buffers and copies.
        #[arg(long, conflicts_with = "tsan")]
        miri: bool,
        /// Run only the tests of what threads share, under ThreadSanitizer: ring, store, shared memory. Not part of a whole
        /// run: it builds the standard library.
        #[arg(long, conflicts_with = "real_engine")]
        tsan: bool,
        /// Run only the connectors' tests under real engines, on the CPU. The first run installs them: 6 GB for vLLM.
        #[arg(long, conflicts_with_all = ["quick", "rdma", "gpu", "miri"])]
        real_engine: bool,
    },
    /// Build the release binary, default policies embedded: target/release/kvasir, and its manual pages: target/man.
    Build,
    /// Build the wheels of a release, `kvasir` and `kvasir-host`, to target/wheels, and try them as a new user would.
    Wheels,
    /// Write every default policy as a component to target/policies/, for `kvasir policy load`.
    Policies,
    /// Measure in release: `kvasir bench policy`, `index`, `rpc`, `store`, `tiers` and `transfer`.
    Bench {
        /// Run the criterion benches of `benches/` instead.
        #[arg(long)]
        criterion: bool,
        /// Measure the templates of policies in every language instead (docs/policy-languages.md); installs their tools.
        #[arg(long, conflicts_with_all = ["criterion", "args"])]
        languages: bool,
        /// Measure the prefix index beside what others publish instead (benches/peers).
        #[arg(long, conflicts_with_all = ["criterion", "languages"])]
        peers: bool,
        /// Passed on, for example `--json`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Look for inputs that break what a host reads from outside, with libFuzzer (tests/fuzz). Ends at the first.
    Fuzz {
        /// Kinds of input, as tests/fuzz/corpus has folders; all, if none is named.
        targets: Vec<String>,
        /// For each of them.
        #[arg(long, default_value_t = 30.0)]
        minutes: f64,
        /// Add what reached new code to tests/fuzz/corpus.
        #[arg(long)]
        keep: bool,
    },
    /// Run hosts of the data plane in a simulated world, each seed another one (tests/simulation).
    Simulate {
        /// Passed on: `--seeds 0..100`, or `--replay 17 --trace`; `--help` has the rest.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Cut the power of the NVMe tier and of a database, in a virtual machine that records its block device (tests/powercut). A
    /// device that breaks a promise is kept in `powercut` of the target folder.
    Powercut {
        /// Passed on: `--points 200`, `--all`, `--seed 7`, `--plant NAME`; `--help` has the rest.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Check the text of the repository: links, commands, settings, the graph of crates, paths of one machine, long files.
    Tidy,
}

fn main() -> ExitCode {
    match run(Args::parse().task) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<ExitCode> {
    let shell = Shell::new()?;
    match task {
        Task::Demo { args } => {
            let built = build(&shell, "demo")?;
            eprintln!("Built quickly, not to be fast: `cargo xtask build` makes the release binary.");
            shell.exec(Command::new(built).args(["dev", "--demo"]).args(args))
        }
        Task::Test { wheel: true, .. } => checks::run_only(&shell, checks::WHEEL),
        Task::Test { rdma: true, .. } => checks::run_only(&shell, checks::RDMA),
        Task::Test { gpu: true, .. } => checks::run_only(&shell, checks::GPU),
        Task::Test { languages: true, .. } => checks::run_only(&shell, checks::LANGUAGES),
        Task::Test { all_languages: true, .. } => checks::run_all_languages(&shell),
        Task::Test { miri: true, .. } => checks::run_only(&shell, checks::MIRI),
        Task::Test { tsan: true, .. } => checks::run_tsan(&shell),
        Task::Test { real_engine: true, .. } => checks::run_engines(&shell),
        Task::Test { quick, .. } => {
            shell.ensure_toolchain()?;
            checks::run(&shell, quick)
        }
        Task::Build => {
            build(&shell, "release")?;
            let pages = shell.target("man");
            shell.run(shell.binary().args(["man", "--out"]).arg(&pages))?;
            println!("{}, its manual pages in {}", shell.binary_path().display(), pages.display());
            Ok(ExitCode::SUCCESS)
        }
        Task::Wheels => wheels::release(&shell).map(|()| ExitCode::SUCCESS),
        Task::Policies => policies(&shell).map(|()| ExitCode::SUCCESS),
        Task::Bench { languages: true, .. } => {
            shell.ensure_target()?;
            languages::bench(&shell).map(|()| ExitCode::SUCCESS)
        }
        Task::Bench { peers: true, args, .. } => {
            let manifest = shell.root().join("benches/peers/Cargo.toml");
            let mut bench = shell.cargo();
            bench.args(["run", "--release", "--locked", "--manifest-path"]).arg(manifest);
            bench.arg("--target-dir").arg(shell.target("peers"));
            shell.exec(bench.arg("--").args(args))
        }
        Task::Bench { criterion: true, args, .. } => {
            shell.ensure_target()?;
            let bench = ["bench", "--locked", "--package", "kvasir-benches", "--"];
            shell.exec(shell.cargo().args(bench).args(args))
        }
        Task::Bench { criterion: false, args, .. } => {
            build(&shell, "release")?;
            for what in ["policy", "index", "rpc", "store", "tiers", "transfer"] {
                shell.run(shell.binary().args(["bench", what]).args(&args))?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Task::Fuzz { targets, minutes, keep } => {
            shell.ensure_target()?;
            fuzz::run(&shell, &targets, minutes, keep).map(|()| ExitCode::SUCCESS)
        }
        Task::Simulate { args } => {
            shell.ensure_target()?;
            let run = ["run", "--quiet", "--locked", "--package", "kvasir-tests-simulation", "--"];
            shell.exec(shell.cargo().args(run).args(args))
        }
        Task::Powercut { args } => powercut::run(&shell, args),
        Task::Tidy => {
            tidy::run(&shell, &task_names())?;
            println!("tidy");
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn task_names() -> Vec<String> {
    Args::command().get_subcommands().map(|c| c.get_name().to_owned()).collect()
}

/// Returns the binary. The default policies are compiled on the way, by the build script of `policies/defaults`.
fn build(shell: &Shell, profile: &str) -> Result<PathBuf> {
    shell.ensure_target()?;
    let built = shell.target(profile).join("kvasir");
    if !built.exists() {
        eprintln!(
            "First build: some 500 crates, a third of the work a Wasm compiler; about 6 minutes on two cores, 15 for a release."
        );
    }
    shell.run(shell.cargo().args(["build", "--profile", profile, "--locked", "--package", "kvasir"]))?;
    Ok(built)
}

fn policies(shell: &Shell) -> Result<()> {
    shell.ensure_target()?;
    let names = shell.policy_crates()?;
    let packages: Vec<_> = names.iter().map(String::as_str).collect();
    let components = kvasir_policy_build::components(shell.root(), &packages, &shell.target("guests"))?;
    let folder = shell.target("policies");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for (name, component) in names.iter().zip(components) {
        let path = folder.join(format!("{name}.wasm"));
        std::fs::write(&path, &component).with_context(|| format!("cannot write {}", path.display()))?;
        println!("{:>8} B  {}", component.len(), path.display());
    }
    Ok(())
}
