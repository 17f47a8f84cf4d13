//! The wheel `kvasir`: built, installed where nothing else is, and tested against the daemon of this workspace.
//!
//! All of it happens below `target/python`. What needs an engine skips itself there, and says so.

use crate::checks::software_device;
use crate::shell::Shell;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A wheel goes into every image of an engine.
const WHEEL_BYTES_MAX: u64 = 4 << 20;
/// pytest's exit code where a folder has no test for this machine.
const NOTHING_COLLECTED: i32 = 5;

/// The first Python here that can make an environment, 3.11 or later.
pub(crate) fn interpreter(shell: &Shell) -> Option<&'static str> {
    let fits = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))";
    ["python3", "python3.13", "python3.12", "python3.11"]
        .into_iter()
        .find(|python| shell.works(Command::new(python).args(["-c", fits])))
}

/// Builds the wheel, and fails with the first check that does.
pub(crate) fn check(shell: &Shell, python: &str) -> Result<()> {
    let package = shell.root().join("clients/python");
    let wheel = wheel(shell, python)?;
    let tools = Environment::make(shell, python, "tools")?;

    // Where nothing else is: whoever installs it gets no other package, and needs none.
    let bare = Environment::make(shell, python, "bare")?;
    shell.run(bare.pip(["--no-index", "--force-reinstall"]).arg(&wheel))?;
    shell.run(bare.command("python").args(["-c", "import kvasir; print('kvasir', kvasir.__version__)"]))?;

    shell.run(tools.pip(["--no-index", "--no-deps", "--force-reinstall"]).arg(&wheel))?;
    shell.run(tools.command("ruff").args(["check", "--quiet"]).arg(&package))?;
    shell.run(tools.command("python").args(["-m", "mypy.stubtest", "kvasir._core"]))?;
    tests(shell, &tools, &package)
}

/// Builds the wheel and returns where it lies.
pub(crate) fn wheel(shell: &Shell, python: &str) -> Result<PathBuf> {
    let package = shell.root().join("clients/python");
    let tools = Environment::make(shell, python, "tools")?;
    let needed = package.join("requirements-dev.txt");
    shell.run(tools.pip(["--requirement"]).arg(needed)).context("the tools that build a wheel")?;
    build(shell, &tools, &package)
}

fn build(shell: &Shell, tools: &Environment, package: &Path) -> Result<PathBuf> {
    let wheels = shell.target("python/wheels");
    // Those of earlier versions would be found as well.
    if wheels.exists() {
        std::fs::remove_dir_all(&wheels).with_context(|| format!("cannot empty {}", wheels.display()))?;
    }
    let mut maturin = tools.command("maturin");
    // Another selection of features than the workspace's, so in a folder of its own.
    maturin.args(["build", "--quiet", "--locked", "--target-dir"]).arg(shell.target("python/build"));
    maturin.arg("--manifest-path").arg(package.join("Cargo.toml")).arg("--out").arg(&wheels);
    shell.run(&mut maturin)?;
    let entries = wheels.read_dir().with_context(|| format!("cannot list {}", wheels.display()))?;
    let wheel =
        entries.flatten().map(|entry| entry.path()).find(|path| path.extension().is_some_and(|e| e == "whl"));
    let wheel = wheel.with_context(|| format!("maturin left no wheel in {}", wheels.display()))?;
    let bytes = wheel.metadata().with_context(|| format!("cannot look at {}", wheel.display()))?.len();
    println!("{bytes:>8} B  {}", wheel.display());
    if bytes > WHEEL_BYTES_MAX {
        bail!("the wheel has {bytes} B, and at most {WHEEL_BYTES_MAX} are wanted; see what it links");
    }
    Ok(wheel)
}

/// Folder by folder, since each has helpers of its own that may have the same names.
fn tests(shell: &Shell, tools: &Environment, package: &Path) -> Result<()> {
    daemon(shell)?;
    let cuda = software_device(shell)?;
    let tests = package.join("tests");
    let entries = tests.read_dir().with_context(|| format!("cannot list {}", tests.display()))?;
    let mut folders: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    for folder in folders {
        let mut pytest = pytest(shell, tools, &folder);
        pytest.env("KVASIR_SOFTWARE_CUDA", &cuda);
        let status = pytest.status().context("cannot start pytest")?;
        if !status.success() && status.code() != Some(NOTHING_COLLECTED) {
            bail!("the tests in {} failed: {status}", folder.display());
        }
    }
    Ok(())
}

/// Builds the daemon as the whole-system tests have it: another selection of packages would build dependencies again.
pub(crate) fn daemon(shell: &Shell) -> Result<()> {
    shell.run(shell.cargo().args(["test", "--quiet", "--locked", "--workspace", "--test", "*", "--no-run"]))
}

/// The tests in a folder, with the daemon of this workspace.
pub(crate) fn pytest(shell: &Shell, environment: &Environment, folder: &Path) -> Command {
    let mut pytest = environment.command("python");
    pytest.args(["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]).arg(folder);
    pytest.current_dir(shell.root().join("clients/python"));
    pytest.env("KVASIR_BIN", shell.target("debug/kvasir")).env("PYTHONDONTWRITEBYTECODE", "1");
    pytest
}

/// A virtual environment below the target folder.
pub(crate) struct Environment(PathBuf);

impl Environment {
    /// Makes it, unless it is there.
    pub(crate) fn make(shell: &Shell, python: &str, name: &str) -> Result<Self> {
        let folder = shell.target("python").join(name);
        if !shell.works(Command::new(folder.join("bin/python")).args(["-m", "pip", "--version"])) {
            shell.run(Command::new(python).args(["-m", "venv", "--clear"]).arg(&folder))?;
        }
        Ok(Self(folder))
    }

    /// Where a program of it lies.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join("bin").join(name)
    }

    fn command(&self, name: &str) -> Command {
        Command::new(self.path(name))
    }

    pub(crate) fn pip<const N: usize>(&self, options: [&str; N]) -> Command {
        let mut pip = self.command("python");
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(options);
        pip
    }
}
