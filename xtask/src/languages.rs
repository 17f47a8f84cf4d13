//! The templates of `sdk/templates`: their own tests, their components, and these under the host; and so with the learners of
//! `tests/learners`, which have no tests of their own.
//!
//! All of it happens below `target/languages`. A language whose tools cannot be had is left out, and named.

use crate::python::{self, Environment};
use crate::shell::Shell;
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const SLOTS: [&str; 4] = ["scheduler", "evictor", "admitter", "balancer"];

struct Language {
    /// As its folder in `sdk/templates` and its components are called.
    name: &'static str,
    /// Its folder in `sdk`.
    sdk: &'static str,
    /// Another name that `kvasir policy new` knows it by, with another source; that a new user writes in it once is enough.
    dialect: Option<&'static str>,
    /// Only with `--all-languages`: its components are slow to compile, or its tools large (Zig 400 MB, Go 250).
    opt_in: bool,
    /// Programs that must be there already.
    needs: &'static [&'static str],
    /// The test of a template, run in its folder; `$SDK` is the folder `sdk`, `$OUT` one to write to.
    test: &'static str,
}

const LANGUAGES: [Language; 7] = [
    Language {
        name: "rust",
        sdk: "rust",
        dialect: None,
        opt_in: false,
        needs: &[],
        test: "cargo test --quiet --locked",
    },
    Language {
        name: "c",
        sdk: "c",
        dialect: Some("c++"),
        opt_in: false,
        needs: &["cc", "c++", "clang", "wasm-ld"],
        test: "flags='-Wall -Wextra -Werror -I'$SDK/c
            cc -std=c11 $flags test.c -o $OUT/c-test && $OUT/c-test &&
            c++ -std=c++17 $flags -x c++ test.c -o $OUT/c++-test && $OUT/c++-test",
    },
    Language {
        name: "assemblyscript",
        sdk: "assemblyscript",
        dialect: None,
        opt_in: false,
        needs: &["node", "npm"],
        test: "node --test",
    },
    Language {
        name: "zig",
        sdk: "zig",
        dialect: None,
        opt_in: true,
        needs: &[],
        test: "python-zig test --dep kvasir -Mroot=test.zig -Mkvasir=$SDK/zig/kvasir.zig",
    },
    Language {
        name: "go",
        sdk: "go",
        dialect: None,
        opt_in: true,
        needs: &[],
        test: "GOTOOLCHAIN=local go test",
    },
    Language {
        name: "javascript",
        sdk: "js",
        dialect: Some("typescript"),
        opt_in: true,
        needs: &["node", "npm"],
        test: "node --test",
    },
    Language {
        name: "python",
        sdk: "python",
        dialect: None,
        opt_in: true,
        needs: &[],
        test: "PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$SDK/python python -m unittest",
    },
];

/// What was tested, and what was not and why.
pub(crate) struct Tested {
    pub(crate) languages: Vec<&'static str>,
    pub(crate) left_out: Vec<String>,
}

/// Tests, builds and runs the templates of each language whose tools can be had.
///
/// # Errors
/// A template's own test, its build or its component failed.
pub(crate) fn check(shell: &Shell, all: bool) -> Result<Tested> {
    let (tested, components) = components(shell, all)?;
    if !tested.languages.is_empty() {
        new_users(shell, &tested.languages, &shell.target("languages"))?;
        let mut host = shell.cargo();
        host.args(["test", "--locked", "--workspace", "--test", "languages"]);
        host.args(["--", "--ignored", "--nocapture"]).env("KVASIR_TEMPLATES", &components);
        shell.run(&mut host)?;
    }
    Ok(tested)
}

/// Measures the templates of each language whose tools can be had, in release.
///
/// # Errors
/// A template's own test or its build failed, or the bench did.
pub(crate) fn bench(shell: &Shell) -> Result<()> {
    let (tested, components) = components(shell, true)?;
    for language in tested.left_out {
        println!("not on {language}");
    }
    let mut bench = shell.cargo();
    bench.args(["bench", "--locked", "--package", "kvasir-benches", "--bench", "languages"]);
    shell.run(bench.env("KVASIR_TEMPLATES", &components))
}

/// Tests and builds the templates; the folder holds `LANGUAGE-SLOT.wasm`, and `LANGUAGE-learner.wasm`.
fn components(shell: &Shell, all: bool) -> Result<(Tested, PathBuf)> {
    let out = shell.target("languages");
    let components = out.join("components");
    if components.exists() {
        fs::remove_dir_all(&components).with_context(|| format!("cannot empty {}", components.display()))?;
    }
    fs::create_dir_all(&components).with_context(|| format!("cannot create {}", components.display()))?;
    let mut tested = Tested { languages: Vec::new(), left_out: Vec::new() };
    for language in LANGUAGES.iter().filter(|language| all || !language.opt_in) {
        match tools(shell, language, &out) {
            Ok(path) => {
                println!("-- {}", language.name);
                templates(shell, language, &path, &out)?;
                tested.languages.push(language.name);
            }
            Err(error) => tested.left_out.push(format!("{} ({error:#})", language.name)),
        }
    }
    Ok((tested, components))
}

/// From nothing to a policy that serves, by the commands alone, in each language.
fn new_users(shell: &Shell, languages: &[&'static str], out: &Path) -> Result<()> {
    // As the system tests do, or features were unified differently and all dependencies built again.
    let mut binary = shell.cargo();
    binary.args(["test", "--locked", "--workspace", "--test", "languages", "--test", "serve", "--no-run"]);
    shell.run(&mut binary)?;
    for language in LANGUAGES.iter().filter(|language| languages.contains(&language.name)) {
        let path = tools(shell, language, out)?;
        new_user(shell, &[language.name], &path, out)?;
        if let Some(dialect) = language.dialect {
            new_user(shell, &[dialect, "balancer"], &path, out)?;
        }
    }
    Ok(())
}

fn new_user(shell: &Shell, arguments: &[&str], path: &OsString, out: &Path) -> Result<()> {
    let mut steps = Command::new(shell.root().join("tests/new-user.sh"));
    steps.args(arguments).env("KVASIR", shell.target("debug/kvasir"));
    ready(&mut steps, path, out);
    shell.run(&mut steps).with_context(|| format!("tests/new-user.sh {}", arguments.join(" ")))
}

/// The PATH on which the tools of a language are. Installs those that come from npm or PyPI.
fn tools(shell: &Shell, language: &Language, out: &Path) -> Result<OsString> {
    for program in language.needs {
        let found = shell.works(Command::new("sh").args(["-c", &format!("command -v {program}")]));
        anyhow::ensure!(found, "no `{program}`");
    }
    let sdk = shell.root().join("sdk").join(language.sdk);
    let environment = environment(shell, &sdk)?;
    let mut path = environment.search_path();
    if sdk.join("package.json").exists() {
        let modules = node_modules(shell, &sdk, &out.join("node").join(language.name))?;
        path = prepended(&modules.join(".bin"), path);
    }
    Ok(path)
}

/// One for all languages: their tools do not get in each other's way.
fn environment(shell: &Shell, sdk: &Path) -> Result<Environment> {
    let (pythons, _) = python::interpreters(shell);
    let python = pythons.first().context("no Python 3.11 or later with venv")?;
    let environment = Environment::make(shell, &python.path, "languages")?;
    for requirements in [shell.root().join("sdk/requirements.txt"), sdk.join("requirements.txt")] {
        if requirements.exists() {
            let mut pip = environment.pip(["--requirement"]);
            shell.run(pip.arg(&requirements)).context("not to be had from PyPI")?;
        }
    }
    Ok(environment)
}

fn node_modules(shell: &Shell, sdk: &Path, folder: &Path) -> Result<PathBuf> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    fs::copy(sdk.join("package.json"), folder.join("package.json")).context("package.json of the SDK")?;
    let mut npm = Command::new("npm");
    npm.current_dir(folder).args(["install", "--silent", "--no-audit", "--no-fund", "--prefer-offline"]);
    shell.run(&mut npm).context("not to be had from npm")?;
    Ok(folder.join("node_modules"))
}

fn templates(shell: &Shell, language: &Language, path: &OsString, out: &Path) -> Result<()> {
    let sdk = shell.root().join("sdk");
    for slot in SLOTS {
        let template = sdk.join("templates").join(language.name).join(slot);
        let mut test = Command::new("sh");
        test.args(["-ec", language.test]).env("SDK", &sdk).env("OUT", out).current_dir(&template);
        ready(&mut test, path, out);
        shell.run(&mut test).with_context(|| format!("the test of the {} {slot}", language.name))?;
        build(shell, language, &template, slot, path, out)?;
    }
    if language.name == "rust" {
        return Ok(()); // its learners are guests of the host's own tests
    }
    let learner = shell.root().join("tests/learners").join(language.name);
    build(shell, language, &learner, "learner", path, out)
}

/// Makes the component `LANGUAGE-NAME.wasm` of the policy in `folder`.
fn build(
    shell: &Shell,
    language: &Language,
    folder: &Path,
    name: &str,
    path: &OsString,
    out: &Path,
) -> Result<()> {
    let component = out.join("components").join(format!("{}-{name}.wasm", language.name));
    let mut build = Command::new(shell.root().join("sdk").join(language.sdk).join("build.sh"));
    ready(build.arg(".").arg(component).current_dir(folder), path, out);
    shell.run(&mut build).with_context(|| format!("the {} {name}", language.name))
}

/// With the tools of its language, and what compilers keep below our folder.
fn ready(command: &mut Command, path: &OsString, out: &Path) {
    command.env("PATH", path).env("CARGO_TARGET_DIR", out.join("rust"));
    for cache in ["ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR", "GOCACHE", "GOPATH"] {
        command.env(cache, out.join("cache").join(cache));
    }
}

fn prepended(folder: &Path, path: OsString) -> OsString {
    let mut longer = folder.as_os_str().to_owned();
    longer.push(":");
    longer.push(path);
    longer
}
