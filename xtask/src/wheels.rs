//! The wheels of a release: `cargo xtask wheels`.
//!
//! The client's is linked by zig against glibc 2.28 (Debian 10, RHEL 8 and later), as engines' images may be old. The daemon's is
//! what `cargo xtask build` builds, and needs the glibc that the linker here has. No step of `cargo xtask test`, which has no
//! release build and looks at the daemon's description only.

use crate::python::{self, Environment};
use crate::shell::Shell;
use anyhow::{Context, Result, bail};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

const CLIENT_PLATFORM: &str = "manylinux_2_28";
const HOST_BYTES_MAX: u64 = 40 << 20;

/// Builds `kvasir` and `kvasir-host`, then installs and uses them where nothing else is.
pub(crate) fn release(shell: &Shell) -> Result<()> {
    shell.ensure_target()?;
    let (pythons, _) = python::interpreters(shell);
    let python = &pythons.first().context("no Python 3.11, 3.12 or 3.13 with venv")?.path;
    let tools = Environment::make(shell, python, "release-tools")?;
    let needed = shell.root().join("clients/python/requirements-release.txt");
    shell.run(tools.pip(["--requirement"]).arg(needed)).context("the tools that build the wheels")?;
    let wheels = shell.target("wheels");
    // Wheels of earlier versions would be found as well.
    if wheels.exists() {
        fs::remove_dir_all(&wheels).with_context(|| format!("cannot empty {}", wheels.display()))?;
    }
    let mut client = maturin(shell, &tools, "clients/python", &wheels);
    client.args(["--zig", "--compatibility", CLIENT_PLATFORM, "--target-dir"]).arg(shell.target("zig"));
    shell.run(&mut client)?;
    let mut host = maturin(shell, &tools, "host", &wheels);
    shell.run(host.arg("--target-dir").arg(shell.target("")))?;
    python::the_wheel(&wheels, "kvasir-", python::CLIENT_BYTES_MAX)?;
    python::the_wheel(&wheels, "kvasir_host-", HOST_BYTES_MAX)?;
    use_them(shell, python, &wheels)
}

fn maturin(shell: &Shell, tools: &Environment, package: &str, wheels: &Path) -> Command {
    let mut maturin = tools.command("maturin");
    maturin.args(["build", "--locked", "--manifest-path"]).arg(shell.root().join(package).join("Cargo.toml"));
    // maturin asks the first Python on the PATH for zig.
    maturin.arg("--out").arg(wheels).env("PATH", tools.search_path());
    maturin
}

/// A new environment, both wheels and no index: the daemon starts, and a client finds it.
fn use_them(shell: &Shell, python: &Path, wheels: &Path) -> Result<()> {
    let bare = Environment::make(shell, python, "release")?;
    let fresh = ["--no-index", "--force-reinstall", "--find-links"];
    shell.run(bare.pip(fresh).arg(wheels).args(["kvasir", "kvasir-host"]))?;
    let folder = shell.target("python/release-host");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let mut serve = bare.command("kvasir");
    serve.args(["serve", "--json", "--set", "listen.http=127.0.0.1:0", "--set"]);
    serve.arg(format!("node.data_dir={}", folder.display())).stdout(Stdio::piped());
    let mut host = serve.spawn().context("cannot start the installed `kvasir`")?;
    let used = use_host(shell, &bare, &folder, host.stdout.take());
    host.kill().and_then(|()| host.wait()).context("cannot end the installed `kvasir`")?;
    used
}

fn use_host(
    shell: &Shell,
    bare: &Environment,
    folder: &Path,
    output: Option<impl std::io::Read>,
) -> Result<()> {
    let mut ready = String::new();
    BufReader::new(output.context("its output")?).read_line(&mut ready).context("what the daemon printed")?;
    if ready.is_empty() {
        bail!("the daemon of the wheel ended instead of getting ready; its errors are above");
    }
    let socket = format!("unix:{}", folder.join("kvasir.sock").display());
    let hello = "import sys, kvasir; client = kvasir.Client(sys.argv[1], namespace='wheels'); \
                 client.put('greeting', b'hello'); assert client.get('greeting') == b'hello'";
    shell.run(bare.command("python").args(["-c", hello, &socket]))?;
    shell.run(bare.command("python").args(["-m", "kvasir", "doctor", "--host", &socket]))?;
    let data = format!("node.data_dir={}", folder.display());
    shell.run(bare.command("kvasir").args(["stat", "--set", &data]))
}
