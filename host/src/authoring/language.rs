//! The languages that the SDK has helpers and templates for.
//!
//! What a language needs beside its line here lies in `sdk`: `FOLDER/compile.sh DIR OUT.wasm`, which makes a core module or
//! a component of the policy in `DIR` by the language's own tools, and a template for each slot in `templates/NAME`.

use super::Error;
use crate::text::printable;
use std::path::{Path, PathBuf};

/// A language that policies are written in.
#[derive(Debug, PartialEq, Eq)]
pub struct Language {
    /// As `--lang` and manifests name it, and the folder of its templates.
    pub name: &'static str,
    /// Its folder in `sdk`.
    pub folder: &'static str,
    /// What `compile.sh` starts.
    tools: &'static [Tool],
    /// Its runtime insists on WASI, and gets `sdk/wasi-stub.wat`, which grants nothing.
    pub(super) stub_wasi: bool,
}

/// A language whose projects are those of another one but for some names and words.
#[derive(Debug, PartialEq, Eq)]
pub struct Dialect {
    /// As `--lang` names it.
    pub name: &'static str,
    language: &'static str,
    /// What stands in the templates of that language, and what in projects of this one; the source first.
    pub(super) renames: &'static [[&'static str; 2]],
}

/// All that are known.
pub static DIALECTS: [Dialect; 2] = [
    Dialect {
        name: "c++",
        language: "c",
        renames: &[
            ["policy.c", "policy.cpp"],
            ["test.c", "test.cpp"],
            ["cc -I", "c++ -I"],
            [" in C\n", " in C++\n"],
            ["--lang c ", "--lang c++ "],
        ],
    },
    Dialect {
        name: "typescript",
        language: "javascript",
        renames: &[
            ["policy.js", "policy.ts"],
            [" in JavaScript\n", " in TypeScript\n"],
            // Node runs TypeScript by itself from version 22.18 on.
            [
                "node --test\n",
                "esbuild test.mjs --bundle --platform=node --outfile=test.cjs && node --test test.cjs\n",
            ],
            ["--lang javascript ", "--lang typescript "],
        ],
    },
];

#[derive(Debug, PartialEq, Eq)]
struct Tool {
    /// Any of these will do.
    programs: &'static [&'static str],
    /// Names another program instead.
    variable: &'static str,
    /// How to get it.
    get: &'static str,
}

/// A program that a language needs and that is not here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingTool {
    pub program: &'static str,
    /// How to get it.
    pub get: &'static str,
    /// Environment variable that may name another one.
    pub variable: &'static str,
}

const fn tool(programs: &'static [&'static str], variable: &'static str, get: &'static str) -> Tool {
    Tool { programs, variable, get }
}

const CLANG: &str = "apt-get install clang lld";
const ASC: &str = "npm install --prefix sdk/assemblyscript";
const NPM_JS: &str = "npm install --prefix sdk/js";

/// All known languages, by name.
pub static LANGUAGES: [Language; 7] = [
    Language {
        name: "assemblyscript",
        folder: "assemblyscript",
        tools: &[tool(&["asc"], "ASC", ASC)],
        stub_wasi: false,
    },
    Language {
        name: "c",
        folder: "c",
        tools: &[tool(&["clang"], "CC", CLANG), tool(&["wasm-ld"], "WASM_LD", CLANG)],
        stub_wasi: false,
    },
    Language {
        name: "go",
        folder: "go",
        tools: &[tool(&["go"], "GO", "pip install -r sdk/go/requirements.txt")],
        stub_wasi: true,
    },
    Language {
        name: "javascript",
        folder: "js",
        tools: &[
            tool(&["esbuild"], "ESBUILD", NPM_JS),
            tool(&["componentize-qjs"], "COMPONENTIZE_QJS", NPM_JS),
        ],
        stub_wasi: false,
    },
    Language {
        name: "python",
        folder: "python",
        tools: &[tool(&["componentize-py"], "COMPONENTIZE_PY", "pip install -r sdk/python/requirements.txt")],
        stub_wasi: false,
    },
    Language {
        name: "rust",
        folder: "rust",
        tools: &[tool(&["cargo"], "CARGO", "https://rustup.rs")],
        stub_wasi: false,
    },
    Language {
        name: "zig",
        folder: "zig",
        tools: &[tool(&["zig", "python-zig"], "ZIG", "pip install -r sdk/zig/requirements.txt")],
        stub_wasi: false,
    },
];

impl Language {
    /// # Errors
    /// [`Error::Language`], which names those that are known.
    pub fn find(name: &str) -> Result<&'static Self, Error> {
        LANGUAGES.iter().find(|language| language.name == name).ok_or_else(|| {
            let dialects = DIALECTS.iter().map(|dialect| dialect.name);
            let known: Vec<_> = LANGUAGES.iter().map(|language| language.name).chain(dialects).collect();
            Error::Language { name: printable(name, 64), known: known.join(", ") }
        })
    }

    /// The same of a language or a dialect.
    ///
    /// # Errors
    /// As `find`.
    pub fn find_with_dialect(name: &str) -> Result<(&'static Self, Option<&'static Dialect>), Error> {
        let dialect = DIALECTS.iter().find(|dialect| dialect.name == name);
        Ok((Self::find(dialect.map_or(name, |dialect| dialect.language))?, dialect))
    }

    /// For tests: a project whose recipe is a script of the test's.
    #[cfg(test)]
    pub(super) const C_WITHOUT_TOOLS: Self = Self::without_tools("c", false);

    /// The same for a language whose runtime insists on WASI.
    #[cfg(test)]
    pub(super) const GO_WITHOUT_TOOLS: Self = Self::without_tools("go", true);

    #[cfg(test)]
    const fn without_tools(name: &'static str, stub_wasi: bool) -> Self {
        Self { name, folder: name, tools: &[], stub_wasi }
    }

    /// Where its tools are looked for: what npm installed for the SDK or for the project, then the `PATH`.
    pub(super) fn search_path(&self, sdk: &Path, project: &Path) -> Vec<PathBuf> {
        let bin = Path::new("node_modules/.bin");
        let mut folders = vec![sdk.join(self.folder).join(bin), project.join(bin)];
        folders.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
        folders
    }

    /// The first of its tools that is in none of these folders, nor named by its variable.
    pub(super) fn missing_tool(&self, search_path: &[PathBuf]) -> Option<MissingTool> {
        let missing = |tool: &&Tool| {
            std::env::var_os(tool.variable).is_none()
                && !search_path.iter().any(|folder| tool.programs.iter().any(|p| folder.join(p).is_file()))
        };
        let Tool { programs, variable, get } = self.tools.iter().find(missing)?;
        Some(MissingTool { program: programs.first()?, variable, get })
    }
}
