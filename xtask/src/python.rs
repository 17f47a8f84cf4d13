//! The wheel `kvasir`: built, installed where nothing else is, and tested against the daemon of this workspace under each Python.
//!
//! All of it happens below `target/python`. What needs an engine skips itself there, and says so.

use crate::checks::software_device;
use crate::shell::Shell;
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The client's wheel goes into every image of an engine.
pub(crate) const CLIENT_BYTES_MAX: u64 = 4 << 20;
/// pytest's exit code where a folder has no test for this machine.
const NOTHING_COLLECTED: i32 = 5;

/// What the wheel is for. One file serves all of them, as it uses only what they have in common.
const VERSIONS: [&str; 3] = ["3.11", "3.12", "3.13"];

/// A Python that can make environments.
pub(crate) struct Interpreter {
    pub(crate) version: &'static str,
    pub(crate) path: PathBuf,
}

/// The Pythons here, one of each of [`VERSIONS`], the oldest first; and the versions of which there is none.
pub(crate) fn interpreters(shell: &Shell) -> (Vec<Interpreter>, Vec<&'static str>) {
    let (mut found, mut absent) = (Vec::new(), Vec::new());
    for version in VERSIONS {
        match interpreter(shell, version) {
            Some(path) => found.push(Interpreter { version, path }),
            None => absent.push(version),
        }
    }
    (found, absent)
}

/// On the PATH, or installed by pyenv, which puts only one of its versions there.
fn interpreter(shell: &Shell, version: &str) -> Option<PathBuf> {
    let fits =
        format!("import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')");
    let mut candidates = vec![format!("python{version}").into(), PathBuf::from("python3")];
    if let Ok(prefix) = shell.output(Command::new("pyenv").args(["prefix", version]).stderr(Stdio::null())) {
        candidates.push(Path::new(prefix.trim()).join("bin/python3"));
    }
    candidates.into_iter().find(|python| shell.works(Command::new(python).args(["-c", &fits])))
}

/// Builds the wheel and tests it under every Python given. Fails with the first check that does.
pub(crate) fn check(shell: &Shell, pythons: &[Interpreter]) -> Result<()> {
    let first = pythons.first().context("a Python to build the wheel with")?;
    let package = shell.root().join("clients/python");
    let wheel = wheel(shell, &first.path)?;
    let tools = Environment::make(shell, &first.path, "tools")?;
    shell.run(tools.pip(["--no-index", "--no-deps", "--force-reinstall"]).arg(&wheel))?;
    shell.run(tools.command("ruff").args(["check", "--quiet"]).arg(&package))?;
    shell.run(tools.command("python").args(["-m", "mypy.stubtest", "kvasir._core"]))?;
    describe_host(shell, &tools)?;
    daemon(shell)?;
    for python in pythons {
        println!("-- Python {}", python.version);
        // An environment with nothing else: the wheel brings no other package, and needs none.
        let bare = Environment::make(shell, &python.path, &format!("bare-{}", python.version))?;
        shell.run(bare.pip(["--no-index", "--force-reinstall"]).arg(&wheel))?;
        shell
            .run(bare.command("python").args(["-c", "import kvasir; print('kvasir', kvasir.__version__)"]))?;

        let tested = Environment::make(shell, &python.path, &format!("tested-{}", python.version))?;
        shell.run(tested.pip(["--requirement"]).arg(package.join("requirements-test.txt")))?;
        shell.run(tested.pip(["--no-index", "--no-deps", "--force-reinstall"]).arg(&wheel))?;
        tests(shell, &tested, &package)?;
    }
    Ok(())
}

/// Builds the wheel and returns where it lies.
pub(crate) fn wheel(shell: &Shell, python: &Path) -> Result<PathBuf> {
    let package = shell.root().join("clients/python");
    let tools = Environment::make(shell, python, "tools")?;
    let needed = package.join("requirements-dev.txt");
    shell.run(tools.pip(["--requirement"]).arg(needed)).context("the tools that build a wheel")?;
    build(shell, &tools, &package)
}

fn build(shell: &Shell, tools: &Environment, package: &Path) -> Result<PathBuf> {
    let wheels = shell.target("python/wheels");
    // Wheels of earlier versions would be found as well.
    if wheels.exists() {
        std::fs::remove_dir_all(&wheels).with_context(|| format!("cannot empty {}", wheels.display()))?;
    }
    let mut maturin = tools.command("maturin");
    // Another selection of features than the workspace's, so in a folder of its own.
    maturin.args(["build", "--quiet", "--locked", "--target-dir"]).arg(shell.target("python/build"));
    maturin.arg("--manifest-path").arg(package.join("Cargo.toml")).arg("--out").arg(&wheels);
    shell.run(&mut maturin)?;
    the_wheel(&wheels, "kvasir-", CLIENT_BYTES_MAX)
}

/// The wheel in a folder whose name begins so, if it is no larger than that.
pub(crate) fn the_wheel(folder: &Path, name: &str, bytes_max: u64) -> Result<PathBuf> {
    let entries = folder.read_dir().with_context(|| format!("cannot list {}", folder.display()))?;
    let mut wheels = entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(name));
    let wheel =
        wheels.next().with_context(|| format!("maturin left no {name}*.whl in {}", folder.display()))?.path();
    let bytes = wheel.metadata().with_context(|| format!("cannot look at {}", wheel.display()))?.len();
    println!("{bytes:>8} B  {}", wheel.display());
    if bytes > bytes_max {
        bail!("the wheel has {bytes} B, and at most {bytes_max} are wanted; see what it links");
    }
    Ok(wheel)
}

/// The daemon's wheel takes ten minutes to build (`cargo xtask wheels`), its description a second.
fn describe_host(shell: &Shell, tools: &Environment) -> Result<()> {
    let mut maturin = tools.command("maturin");
    maturin.current_dir(shell.root().join("host")).args([
        "pep517",
        "write-dist-info",
        "--metadata-directory",
    ]);
    maturin.arg(shell.target("python/host-metadata")).arg("--interpreter").arg(tools.path("python"));
    shell.run(maturin.stdout(Stdio::null())).context("host/pyproject.toml")
}

/// Folder by folder, since each has helpers of its own that may have the same names.
fn tests(shell: &Shell, environment: &Environment, package: &Path) -> Result<()> {
    let cuda = software_device(shell)?;
    let tests = package.join("tests");
    let entries = tests.read_dir().with_context(|| format!("cannot list {}", tests.display()))?;
    let mut folders: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    for folder in folders {
        let mut pytest = pytest(shell, environment, &folder);
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
    // As in an environment that is activated: engines call programs of theirs, such as ninja, by name.
    pytest.env("PATH", environment.search_path());
    pytest
}

/// A virtual environment below the target folder.
pub(crate) struct Environment(PathBuf);

impl Environment {
    /// Makes it, unless it is there.
    pub(crate) fn make(shell: &Shell, python: &Path, name: &str) -> Result<Self> {
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

    /// A PATH on which its programs come first.
    pub(crate) fn search_path(&self) -> OsString {
        let mut path = self.0.join("bin").into_os_string();
        if let Some(rest) = std::env::var_os("PATH") {
            path.push(":");
            path.push(rest);
        }
        path
    }

    pub(crate) fn command(&self, name: &str) -> Command {
        Command::new(self.path(name))
    }

    pub(crate) fn pip<const N: usize>(&self, options: [&str; N]) -> Command {
        let mut pip = self.command("python");
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(options);
        pip
    }
}
