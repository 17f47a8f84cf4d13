//! The languages that the SDK has helpers and templates for.
//!
//! What a language needs beside its line here lies in `sdk`: `FOLDER/compile.sh DIR OUT.wasm`, which makes a core module or
//! a component of the policy in `DIR` by the language's own tools, and a template for each slot in `templates/NAME`.

use super::Error;
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
}

#[derive(Debug, PartialEq, Eq)]
struct Tool {
    program: &'static str,
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

const fn tool(program: &'static str, variable: &'static str, get: &'static str) -> Tool {
    Tool { program, variable, get }
}

const CLANG: &str = "apt-get install clang lld";
const ASC: &str = "npm install --prefix sdk/assemblyscript";
const NPM_JS: &str = "npm install --prefix sdk/js";

/// All that are known, by name.
pub static LANGUAGES: [Language; 5] = [
    Language { name: "assemblyscript", folder: "assemblyscript", tools: &[tool("asc", "ASC", ASC)] },
    Language {
        name: "c",
        folder: "c",
        tools: &[tool("clang", "CC", CLANG), tool("wasm-ld", "WASM_LD", CLANG)],
    },
    Language {
        name: "javascript",
        folder: "js",
        tools: &[tool("esbuild", "ESBUILD", NPM_JS), tool("componentize-qjs", "COMPONENTIZE_QJS", NPM_JS)],
    },
    Language {
        name: "python",
        folder: "python",
        tools: &[tool("componentize-py", "COMPONENTIZE_PY", "pip install -r sdk/python/requirements.txt")],
    },
    Language { name: "rust", folder: "rust", tools: &[tool("cargo", "CARGO", "https://rustup.rs")] },
];

impl Language {
    /// # Errors
    /// [`Error::Language`], which names those that are known.
    pub fn find(name: &str) -> Result<&'static Self, Error> {
        LANGUAGES.iter().find(|language| language.name == name).ok_or_else(|| {
            let known: Vec<_> = LANGUAGES.iter().map(|language| language.name).collect();
            Error::Language { name: name.to_owned(), known: known.join(", ") }
        })
    }

    /// For tests: a project whose recipe is a script of the test's.
    #[cfg(test)]
    pub(super) const C_WITHOUT_TOOLS: Self = Self { name: "c", folder: "c", tools: &[] };

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
                && !search_path.iter().any(|folder| folder.join(tool.program).is_file())
        };
        let Tool { program, variable, get } = self.tools.iter().find(missing)?;
        Some(MissingTool { program, variable, get })
    }
}
