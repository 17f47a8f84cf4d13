//! Where things are, and running commands with errors that say which.

use anyhow::{Context, Result, bail};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// The target for which policies are compiled.
pub(crate) const WASM_TARGET: &str = "wasm32-unknown-unknown";

/// The repository and its target directory.
pub(crate) struct Shell {
    root: PathBuf,
    target: PathBuf,
    /// Where the output of commands goes instead of ours.
    log: Option<PathBuf>,
}

impl Shell {
    pub(crate) fn new() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the repository folder")?;
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
        Ok(Self { root: root.into(), target, log: None })
    }

    /// The same for a thread beside ours: what its commands print goes to a file, which is emptied first.
    pub(crate) fn logging_to(&self, log: PathBuf) -> Result<Self> {
        File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        Ok(Self { root: self.root.clone(), target: self.target.clone(), log: Some(log) })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// A path below the target directory.
    pub(crate) fn target(&self, path: &str) -> PathBuf {
        self.target.join(path)
    }

    pub(crate) fn binary_path(&self) -> PathBuf {
        self.target("release/kvasir")
    }

    /// The release binary, run from the folder where the user is.
    pub(crate) fn binary(&self) -> Command {
        Command::new(self.binary_path())
    }

    /// The cargo that runs us, in the repository.
    pub(crate) fn cargo(&self) -> Command {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(&self.root);
        cargo
    }

    /// Every crate below `policies/` except the one that embeds the others.
    pub(crate) fn policy_crates(&self) -> Result<Vec<String>> {
        let crates = self.crates_in("policies")?;
        Ok(crates.into_iter().filter(|name| name != "defaults").collect())
    }

    /// Subfolders of `folder` that hold a crate, sorted.
    pub(crate) fn crates_in(&self, folder: &str) -> Result<Vec<String>> {
        let folder = self.root.join(folder);
        let mut names = Vec::new();
        let entries = folder.read_dir().with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            if path.join("Cargo.toml").exists() {
                names.extend(path.file_name().and_then(|name| name.to_str()).map(str::to_owned));
            }
        }
        names.sort();
        Ok(names)
    }

    /// Runs it to the end with our own input and output, or the log; an exit code other than 0 is an error.
    pub(crate) fn run(&self, command: &mut Command) -> Result<()> {
        let text = describe(command);
        if let Some(path) = &self.log {
            let log = File::options().append(true).open(path);
            let log = log.with_context(|| format!("cannot write {}", path.display()))?;
            command.stdout(log.try_clone().context("a log")?).stderr(log);
        }
        let status = command.status().with_context(|| format!("cannot start `{text}`"))?;
        if !status.success() {
            bail!("`{text}` failed: {status}");
        }
        Ok(())
    }

    /// Like `run`, but its exit code becomes ours.
    pub(crate) fn exec(&self, command: &mut Command) -> Result<ExitCode> {
        let text = describe(command);
        let status = command.status().with_context(|| format!("cannot start `{text}`"))?;
        let code = status.code().with_context(|| format!("`{text}` was ended: {status}"))?;
        Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
    }

    /// Whether the command starts and exits with 0; its output is dropped.
    pub(crate) fn works(&self, command: &mut Command) -> bool {
        command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    }

    /// Standard output of a command that must succeed.
    pub(crate) fn output(&self, command: &mut Command) -> Result<String> {
        let text = describe(command);
        let output = command.output().with_context(|| format!("cannot start `{text}`"))?;
        if !output.status.success() {
            bail!("`{text}` failed: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
        }
        String::from_utf8(output.stdout).with_context(|| format!("`{text}` printed something not UTF-8"))
    }

    /// Adds the Wasm target if it is missing.
    pub(crate) fn ensure_target(&self) -> Result<()> {
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let mut sysroot = Command::new(rustc);
        let sysroot = self.output(sysroot.current_dir(&self.root).args(["--print", "sysroot"]))?;
        if Path::new(sysroot.trim()).join("lib/rustlib").join(WASM_TARGET).join("lib").exists() {
            return Ok(());
        }
        self.rustup(&["target", "add", WASM_TARGET])
    }

    /// Like `ensure_target`, with everything else that the checks need.
    pub(crate) fn ensure_toolchain(&self) -> Result<()> {
        self.ensure_target()?;
        for (subcommand, component) in [("fmt", "rustfmt"), ("clippy", "clippy")] {
            if !self.works(self.cargo().args([subcommand, "--version"])) {
                self.rustup(&["component", "add", component])?;
            }
        }
        Ok(())
    }

    fn rustup(&self, args: &[&str]) -> Result<()> {
        self.run(Command::new("rustup").current_dir(&self.root).args(args)).with_context(|| {
            format!(
                "the toolchain of rust-toolchain.toml is incomplete; `rustup {}` would mend it",
                args.join(" ")
            )
        })
    }
}

fn describe(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
    let args = command.get_args().map(|arg| arg.to_string_lossy().into_owned());
    std::iter::once(name).chain(args).collect::<Vec<_>>().join(" ")
}
