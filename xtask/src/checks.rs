//! `cargo xtask test`: the same steps here and in CI.

use crate::shell::{Shell, WASM_TARGET};
use crate::{engines, languages, powercut, python, task_names, tidy};
use anyhow::{Context, Result, bail};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

enum Outcome {
    Passed,
    /// With something in place of what it is meant for.
    PassedOn(String),
    Failed(String),
    Skipped(&'static str),
}

struct Step {
    name: &'static str,
    /// Left out by `--quick`.
    slow: bool,
    /// Mostly waits, so others run at the same time.
    beside: bool,
    run: fn(&Shell) -> Result<Outcome>,
}

const POWERCUT: &str = "power cuts, recorded";
pub(crate) const RDMA: &str = "RDMA over Soft-RoCE, bad networks";
const METRICS: &str = "metrics, by promtool";
const REGISTRY: &str = "policies in a registry";
pub(crate) const WHEEL: &str = "Python wheel";
pub(crate) const GPU: &str = "CUDA device";
pub(crate) const LANGUAGES: &str = "policies in other languages";
pub(crate) const MIRI: &str = "memory under Miri";
pub(crate) const TSAN: &str = "threads under ThreadSanitizer";

/// Cheapest first, so that a small mistake shows early. A failed step does not stop the later ones.
const STEPS: &[Step] = &[
    Step { name: "formatting", slow: false, beside: false, run: formatting },
    Step { name: "tidy", slow: false, beside: false, run: |shell| passed(tidy::run(shell, &task_names())) },
    Step { name: "dependencies", slow: true, beside: false, run: dependencies },
    Step { name: "client without gRPC", slow: true, beside: false, run: data_half_of_the_client },
    Step { name: "clippy", slow: false, beside: false, run: clippy },
    Step { name: "the binary alone", slow: true, beside: false, run: binary_alone },
    Step { name: "clippy, guests", slow: false, beside: false, run: clippy_guests },
    Step { name: "unit tests, benches once", slow: false, beside: false, run: unit_tests },
    Step { name: "whole-system tests", slow: true, beside: false, run: system_tests },
    Step { name: RDMA, slow: true, beside: true, run: rdma },
    Step { name: POWERCUT, slow: true, beside: true, run: power_cuts },
    Step { name: GPU, slow: true, beside: true, run: gpu },
    Step { name: LANGUAGES, slow: true, beside: false, run: |shell| templates(shell, false) },
    Step { name: WHEEL, slow: true, beside: false, run: wheel },
    Step { name: METRICS, slow: true, beside: false, run: metrics },
    Step { name: REGISTRY, slow: true, beside: false, run: registry },
    Step { name: MIRI, slow: true, beside: false, run: miri },
    Step { name: "doc tests", slow: true, beside: false, run: doc_tests },
    Step { name: "rendered docs", slow: true, beside: false, run: docs },
];

/// Runs the steps and prints the outcome of each.
pub(crate) fn run(shell: &Shell, quick: bool) -> Result<ExitCode> {
    let start = Instant::now();
    Ok(summary(&run_steps(shell, STEPS, quick), start.elapsed()))
}

/// Runs the tests under ThreadSanitizer, which build too much to be one of [`STEPS`].
pub(crate) fn run_tsan(shell: &Shell) -> Result<ExitCode> {
    run_apart(shell, &Step { name: TSAN, slow: true, beside: false, run: tsan })
}

/// Runs the connectors' tests under real engines, which are too large to be one of [`STEPS`].
pub(crate) fn run_engines(shell: &Shell) -> Result<ExitCode> {
    run_apart(shell, &Step { name: "real engines", slow: true, beside: false, run: real_engines })
}

/// Tests the templates of every language, also those whose components take long to compile.
pub(crate) fn run_all_languages(shell: &Shell) -> Result<ExitCode> {
    run_apart(
        shell,
        &Step { name: LANGUAGES, slow: true, beside: false, run: |shell| templates(shell, true) },
    )
}

/// Runs one of the steps alone.
pub(crate) fn run_only(shell: &Shell, name: &str) -> Result<ExitCode> {
    let step = STEPS.iter().find(|step| step.name == name);
    run_apart(shell, step.with_context(|| format!("no step is called {name}"))?)
}

/// A caller that names a step is not served by skipping it, so a skip fails.
fn run_apart(shell: &Shell, step: &'static Step) -> Result<ExitCode> {
    println!("== {}", step.name);
    let done = run_step(shell, step);
    let skipped = matches!(done.1, Outcome::Skipped(_));
    let took = done.2;
    let code = summary(&[done], took);
    Ok(if skipped { ExitCode::FAILURE } else { code })
}

type Done = (&'static str, Outcome, Duration);

/// Steps that mostly wait run on a thread beside those that follow them, one after the other; their output comes last.
fn run_steps(shell: &Shell, steps: &'static [Step], quick: bool) -> Vec<Done> {
    thread::scope(|scope| {
        let (give, given) = mpsc::channel();
        let beside =
            scope.spawn(move || given.iter().map(|step| run_beside(shell, step)).collect::<Vec<_>>());
        let mut results = Vec::new();
        for step in steps {
            if step.slow && quick {
                results.push((step.name, Outcome::Skipped("--quick"), Duration::ZERO));
            } else if step.beside {
                println!("== {}: beside the next steps", step.name);
                give.send(step).expect("it takes steps until there are no more");
            } else {
                println!("== {}", step.name);
                results.push(run_step(shell, step));
            }
        }
        drop(give);
        for (log, done) in beside.join().expect("it runs steps as this thread does") {
            println!("== {}", done.0);
            print!("{log}");
            results.push(done);
        }
        results
    })
}

fn run_beside(shell: &Shell, step: &'static Step) -> (String, Done) {
    let log = shell.target(&format!("{}.log", step.name));
    let done = match shell.logging_to(log.clone()) {
        Ok(shell) => run_step(&shell, step),
        Err(error) => (step.name, Outcome::Failed(format!("{error:#}")), Duration::ZERO),
    };
    (fs::read_to_string(log).unwrap_or_default(), done)
}

fn run_step(shell: &Shell, step: &'static Step) -> Done {
    let start = Instant::now();
    let outcome = (step.run)(shell).unwrap_or_else(|error| Outcome::Failed(format!("{error:#}")));
    if let Outcome::Failed(reason) = &outcome {
        eprintln!("{}: {reason}", step.name);
    }
    (step.name, outcome, start.elapsed())
}

fn summary(results: &[Done], total: Duration) -> ExitCode {
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    println!("\n== summary");
    for (name, outcome, took) in results {
        let text = match outcome {
            Outcome::Passed => "passed".to_owned(),
            Outcome::PassedOn(what) => format!("passed on {what}"),
            Outcome::Failed(reason) => format!("FAILED: {}", reason.lines().next().unwrap_or_default()),
            Outcome::Skipped(why) => format!("skipped: {why}"),
        };
        println!("{:>7.1} s  {name:<28} {text}", took.as_secs_f64());
        match outcome {
            Outcome::Passed | Outcome::PassedOn(_) => passed += 1,
            Outcome::Failed(_) => failed += 1,
            Outcome::Skipped(_) => skipped += 1,
        }
    }
    println!("{:>7.1} s  in all", total.as_secs_f64());
    println!("steps: {passed} passed, {failed} failed, {skipped} skipped");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn passed(result: Result<()>) -> Result<Outcome> {
    result.map(|()| Outcome::Passed)
}

fn cargo(shell: &Shell, args: &[&str]) -> Result<Outcome> {
    passed(shell.run(shell.cargo().args(args)))
}

fn formatting(shell: &Shell) -> Result<Outcome> {
    cargo(shell, &["fmt", "--all", "--check"])
}

fn clippy(shell: &Shell) -> Result<Outcome> {
    cargo(shell, &["clippy", "--quiet", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"])
}

/// The step above does not see what is compiled for Wasm only. Flags, profile and folder are those of the build
/// of the guests, so that their dependencies are compiled once.
fn clippy_guests(shell: &Shell) -> Result<Outcome> {
    let mut command = shell.cargo();
    command.args([
        "clippy",
        "--quiet",
        "--locked",
        "--target",
        WASM_TARGET,
        "--lib",
        "--profile",
        "guest",
        "--target-dir",
    ]);
    command.arg(shell.target("guests")).env("RUSTFLAGS", "-C target-feature=+simd128");
    for policy in shell.policy_crates()? {
        command.args(["--package", &policy]);
    }
    for guest in shell.crates_in("tests/guests")? {
        command.args(["--package", &format!("guest-{guest}")]);
    }
    passed(shell.run(command.args(["--", "-D", "warnings"])))
}

/// Every library but those that `tests/simulation` and `tests/powercut` compile a second time, which have no tests there; `--lib` alone insists.
const LIBRARIES: [&str; 6] = ["--workspace", "--exclude", "*-simulated", "--exclude", "*-recorded", "--lib"];

/// Benches run in their test mode: each one once, at its smallest size.
fn unit_tests(shell: &Shell) -> Result<Outcome> {
    let mut tests = shell.cargo();
    tests.args(["test", "--locked"]).args(LIBRARIES).args(["--bins", "--benches", "--no-fail-fast"]);
    passed(shell.run(&mut tests))
}

/// Always the whole workspace, and tests only: another selection would unify features differently and build the
/// dependencies again. The binary that they start is built with them.
fn system_tests(shell: &Shell) -> Result<Outcome> {
    cargo(shell, &["test", "--locked", "--workspace", "--test", "*", "--no-fail-fast"])
}

/// What authors start from, in each language whose tools are here or can be installed.
fn templates(shell: &Shell, all: bool) -> Result<Outcome> {
    // Where everything is installed for it, a language that is left out is one that nobody tests.
    let all_wanted = all || std::env::var_os("KVASIR_CI").is_some();
    Ok(languages_tested(&languages::check(shell, all)?, all_wanted))
}

fn languages_tested(tested: &languages::Tested, all_wanted: bool) -> Outcome {
    let (languages, left_out) = (tested.languages.join(", "), tested.left_out.join(", "));
    match (left_out.is_empty(), languages.is_empty()) {
        (true, _) => Outcome::Passed,
        (false, _) if all_wanted => Outcome::Failed(format!("not tested: {left_out}")),
        (false, true) => {
            Outcome::Skipped("no language's tools can be had; `docs/policy-languages.md` lists them")
        }
        (false, false) => Outcome::PassedOn(format!("{languages}; not on {left_out}")),
    }
}

const NO_PYTHON: &str = "no Python 3.11, 3.12 or 3.13 with venv; in Debian's package `python3-venv`";

/// The Python package, and what of its tests needs no engine.
fn wheel(shell: &Shell) -> Result<Outcome> {
    let (pythons, absent) = python::interpreters(shell);
    if pythons.is_empty() {
        return Ok(Outcome::Skipped(NO_PYTHON));
    }
    python::check(shell, &pythons)?;
    if absent.is_empty() {
        return Ok(Outcome::Passed);
    }
    let tested: Vec<&str> = pythons.iter().map(|python| python.version).collect();
    Ok(Outcome::PassedOn(format!("Python {}, not on {}: absent here", tested.join(", "), absent.join(", "))))
}

fn real_engines(shell: &Shell) -> Result<Outcome> {
    match python::interpreters(shell).0.first() {
        Some(python) => passed(engines::check(shell, &python.path)),
        None => Ok(Outcome::Skipped(NO_PYTHON)),
    }
}

/// Prometheus' own checker reads the page of a host that has done some of everything.
fn metrics(shell: &Shell) -> Result<Outcome> {
    if !shell.works(Command::new("promtool").arg("--version")) {
        return Ok(Outcome::Skipped("promtool is missing; it is in Debian's package `prometheus`"));
    }
    cargo(shell, &["test", "--locked", "--workspace", "--test", "serve", "--", "--ignored", "promtool"])
}

/// Policies in a registry as others run it.
fn registry(shell: &Shell) -> Result<Outcome> {
    if !shell.works(Command::new("docker-registry").arg("--version")) {
        return Ok(Outcome::Skipped("docker-registry is missing; it is in Debian's package of that name"));
    }
    cargo(
        shell,
        &["test", "--locked", "--workspace", "--test", "serve", "--", "--ignored", "docker_registry"],
    )
}

/// Real verbs on emulated hardware, networks that lose, delay and part, and TLS in the kernel. Without such a machine the step is
/// skipped; once the machine is up, every error is a failure.
fn rdma(shell: &Shell) -> Result<Outcome> {
    let vm = shell.root().join("tests/rdma-vm");
    let mut probe = Command::new(vm.join("run-in-rdma-vm"));
    if shell.run(probe.args(["--timeout", "120", "--", "ibv_devices"])).is_err() {
        return Ok(Outcome::Skipped(
            "no virtual machine (reason above); it takes Debian on x86-64, apt and QEMU",
        ));
    }
    let run = |targets: &[&str], names: &[&str]| {
        let mut tests = shell.cargo();
        tests.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", vm.join("cargo-runner"));
        // One after the other: they share two devices and the processors, and some take a link down.
        tests.args(["test", "--locked"]).args(targets).args(["--", "--ignored", "--test-threads=1"]);
        shell.run(tests.args(names))
    };
    run(&["--workspace", "--test", "rdma", "--test", "netem"], &[])?;
    passed(run(&LIBRARIES, &["in_the_kernel"]))
}

/// What a real file system and block layer leave of the NVMe tier and of a database when the power goes; first with a bug,
/// which must be found. Skipped where there is no such machine; once it is up, every error is a failure.
fn power_cuts(shell: &Shell) -> Result<Outcome> {
    if shell.run(powercut::machine(shell, "120").args(["--", "true"])).is_err() {
        return Ok(Outcome::Skipped(
            "no virtual machine (reason above); it takes Debian on x86-64, apt and QEMU",
        ));
    }
    let planted =
        ["--plant", "answers-removal-unsynced", "--rounds", "1", "--points", "60", "--only", "answers"];
    shell.run(powercut::session(shell, "600")?.args(planted))?;
    passed(shell.run(powercut::session(shell, "600")?.args(["--points", "24", "--seconds", "40"])))
}

/// The tests in modules named `gpu`, which are ignored elsewhere; the client's are there because the wheel has it with `gpu`. Where there is no driver they run on `tests/cuda`, which
/// finds missing waits, and says nothing about a GPU.
fn gpu(shell: &Shell) -> Result<Outcome> {
    // The driver's device file; under Windows Subsystem for Linux it has another name.
    let device = ["/dev/nvidiactl", "/dev/dxg"].into_iter().any(|path| Path::new(path).exists());
    let mut tests = shell.cargo();
    // The daemon's own among the whole-system tests; the rest of those have none.
    tests.args(["test", "--locked"]).args(LIBRARIES).args(["--test", "serve"]);
    tests.args(["--", "--ignored", "--nocapture"]);
    if !device {
        println!("no CUDA device: there is no /dev/nvidiactl; the tests run on a software device");
        // For the tests alone: build scripts would run again in another environment.
        let library_path = format!("env LD_LIBRARY_PATH={}", software_device(shell)?.display());
        tests.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", library_path);
        // The speed of a software device says nothing.
        tests.args(["--skip", "::speed::"]);
    }
    // One after the other: they measure, and they take memory of one device.
    shell.run(tests.args(["--test-threads=1", "::gpu::"]))?;
    Ok(if device { Outcome::Passed } else { Outcome::PassedOn("a software device, not a GPU".to_owned()) })
}

/// Builds the library that stands in for the driver, and returns the folder in which it has its name.
pub(crate) fn software_device(shell: &Shell) -> Result<PathBuf> {
    let target = shell.target("software-cuda");
    let mut build = shell.cargo();
    build.args(["build", "--quiet", "--locked", "--package", "kvasir-software-cuda", "--target-dir"]);
    shell.run(build.arg(&target))?;
    let folder = target.join("lib");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let link = folder.join("libcuda.so.1");
    let _ = fs::remove_file(&link);
    symlink("../debug/libkvasir_software_cuda.so", &link)
        .with_context(|| format!("cannot create {}", link.display()))?;
    Ok(folder)
}

/// The code that hands out and fills memory, in an interpreter that detects undefined behaviour. Few cases, because it
/// is slow.
fn miri(shell: &Shell) -> Result<Outcome> {
    let nightly = || {
        let mut command = Command::new("rustup");
        command.current_dir(shell.root()).args(["run", "nightly", "cargo", "miri"]);
        command
    };
    if !shell.works(nightly().arg("--version")) {
        return Ok(Outcome::Skipped(
            "Miri is missing; `rustup toolchain install nightly --component miri,rust-src`",
        ));
    }
    let mut tests = nightly();
    tests.env("MIRIFLAGS", "-Zmiri-disable-isolation").env("PROPTEST_CASES", "8");
    tests.args(["test", "--locked", "--package", "kvasir-memory", "--lib", "--target-dir"]);
    tests.arg(shell.target("miri-run")).arg("--");
    tests.args(["extents", "buffer", "shared", "stream", "runs", "--skip", "a_mix_of"]);
    passed(shell.run(&mut tests))
}

/// The ring, the store and the shared-memory transport, with the standard library built for it as well. What it cannot see:
/// two ends that map the same memory at two addresses, and fences; `tests/interleavings` is for those.
fn tsan(shell: &Shell) -> Result<Outcome> {
    let nightly = || {
        let mut command = Command::new("rustup");
        command.current_dir(shell.root()).args(["run", "nightly"]);
        command
    };
    let mut source = nightly();
    source.args(["sh", "-c", "test -d \"$(rustc --print sysroot)/lib/rustlib/src/rust/library\""]);
    if !shell.works(&mut source) {
        return Ok(Outcome::Skipped(
            "the nightly toolchain with sources is missing; `rustup toolchain install nightly --component rust-src`",
        ));
    }
    let suppressions = shell.root().join("tests/tsan-suppressions.txt");
    let rooms: [(&str, &[&str]); 3] = [
        ("kvasir-protocol", &["stream"]),
        // What a single thread does, many times over.
        ("kvasir-store", &["--skip", "proptest", "--skip", "model"]),
        ("kvasir-net", &["transport::shm", "transport::loopback", "transport::grant"]),
    ];
    for (package, tests) in rooms {
        let mut command = nightly();
        command.env("RUSTFLAGS", "-Zsanitizer=thread").env("PROPTEST_CASES", "8");
        command.env("TSAN_OPTIONS", format!("suppressions={}", suppressions.display()));
        command.args(["cargo", "test", "--locked", "-Zbuild-std", "--target", "x86_64-unknown-linux-gnu"]);
        command.args(["--package", package, "--lib", "--target-dir"]).arg(shell.target("tsan"));
        shell.run(command.arg("--").args(tests))?;
    }
    Ok(Outcome::Passed)
}

fn doc_tests(shell: &Shell) -> Result<Outcome> {
    let [libraries @ .., _lib] = LIBRARIES;
    let mut tests = shell.cargo();
    passed(shell.run(tests.args(["test", "--locked", "--doc"]).args(libraries)))
}

fn docs(shell: &Shell) -> Result<Outcome> {
    let mut command = shell.cargo();
    command.args(["doc", "--quiet", "--locked", "--workspace", "--no-deps", "--lib"]);
    // For the project's own developers, who see private items too.
    passed(shell.run(command.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private-intra-doc-links")))
}

fn dependencies(shell: &Shell) -> Result<Outcome> {
    if !shell.works(shell.cargo().args(["deny", "--version"])) {
        return Ok(Outcome::Skipped("cargo-deny is missing; `cargo install --locked cargo-deny`"));
    }
    cargo(
        shell,
        &[
            "deny",
            "--log-level",
            "error",
            "--locked",
            "check",
            "--hide-inclusion-graph",
            "bans",
            "licenses",
            "sources",
        ],
    )
}

/// What an engine gets with the data half of the client: no asynchronous runtime, no gRPC, nothing of a daemon's, and CUDA only
/// where it is asked for. Another selection than the workspace, so in a folder of its own: in the usual one both would be
/// built again and again.
fn data_half_of_the_client(shell: &Shell) -> Result<Outcome> {
    const DAEMON: [&str; 12] = [
        "tonic",
        "tokio",
        "prost",
        "hyper",
        "tower",
        "sled",
        "io-uring",
        "object_store",
        "wasmtime",
        "kvasir-store",
        "kvasir-net",
        "kvasir-server",
    ];
    // As it comes, with gRPC.
    lacks(
        shell,
        &[],
        &["cudarc", "rustls", "sled", "io-uring", "object_store", "kvasir-store", "kvasir-net"],
    )?;
    for (feature, other) in [("tls", "cudarc"), ("gpu", "rustls")] {
        let alone = ["--no-default-features", "--features", feature];
        lacks(shell, &alone, &[&DAEMON[..], &[other]].concat())?;
        let mut check = shell.cargo();
        check
            .args(["check", "--quiet", "--locked", "--package", "kvasir-client"])
            .args(alone)
            .arg("--target-dir")
            .arg(shell.target("data-half"));
        shell.run(&mut check)?;
    }
    Ok(Outcome::Passed)
}

/// Checks the binary as it is released. With the whole workspace it has what only tests switch on, and would not tell that
/// it needs that.
fn binary_alone(shell: &Shell) -> Result<Outcome> {
    cargo(shell, &["check", "--quiet", "--locked", "--package", "kvasir", "--bin", "kvasir"])
}

/// Fails if the client with these features depends on any of `heavy`.
fn lacks(shell: &Shell, features: &[&str], heavy: &[&str]) -> Result<()> {
    let mut tree = shell.cargo();
    tree.args(["tree", "--locked", "--package", "kvasir-client", "--edges", "normal", "--prefix", "none"]);
    let listed = shell.output(tree.args(features))?;
    match listed.lines().find(|line| heavy.iter().any(|name| line.starts_with(name))) {
        Some(found) => bail!("kvasir-client with {features:?} depends on {found}"),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits for what the other one writes: both end only if they run at the same time.
    fn waits(shell: &Shell) -> Result<Outcome> {
        let script = "echo said beside; until [ -e \"$1\" ]; do sleep 0.01; done";
        let met = shell.target("test-of-steps");
        passed(shell.run(Command::new("sh").args(["-c", script, "sh"]).arg(met)))
    }

    fn writes(shell: &Shell) -> Result<Outcome> {
        fs::write(shell.target("test-of-steps"), "")?;
        bail!("this step fails")
    }

    const STEPS: &[Step] = &[
        Step { name: "waits", slow: false, beside: true, run: waits },
        Step { name: "slow", slow: true, beside: true, run: |_| bail!("is left out") },
        Step { name: "writes", slow: false, beside: false, run: writes },
    ];

    #[test]
    fn a_language_that_nobody_tests_fails_where_all_are_wanted() {
        let tested = |languages: &[&'static str], left_out: &[&str]| languages::Tested {
            languages: languages.into(),
            left_out: left_out.iter().map(|name| (*name).to_owned()).collect(),
        };
        for wanted in [false, true] {
            assert!(matches!(languages_tested(&tested(&["c"], &[]), wanted), Outcome::Passed));
        }
        let some = tested(&["c"], &["zig (no zig)"]);
        assert!(
            matches!(languages_tested(&some, false), Outcome::PassedOn(on) if on == "c; not on zig (no zig)")
        );
        assert!(
            matches!(languages_tested(&some, true), Outcome::Failed(why) if why == "not tested: zig (no zig)")
        );
        let none = tested(&[], &["c (no clang)"]);
        assert!(matches!(languages_tested(&none, false), Outcome::Skipped(_)));
        assert!(matches!(languages_tested(&none, true), Outcome::Failed(_)));
    }

    #[test]
    fn steps_run_beside_others_and_none_is_lost() {
        let shell = Shell::new().unwrap();
        let _ = fs::remove_file(shell.target("test-of-steps"));
        let results = run_steps(&shell, STEPS, true);
        let names: Vec<_> = results.iter().map(|(name, ..)| *name).collect();
        assert_eq!(names, ["slow", "writes", "waits"]);
        assert!(matches!(results[0].1, Outcome::Skipped("--quick")));
        assert!(matches!(&results[1].1, Outcome::Failed(why) if why == "this step fails"));
        assert!(matches!(results[2].1, Outcome::Passed));
        assert_eq!(fs::read_to_string(shell.target("waits.log")).unwrap(), "said beside\n");
        let _ = fs::remove_file(shell.target("test-of-steps"));
    }
}
