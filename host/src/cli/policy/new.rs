//! `kvasir policy new`.

use crate::authoring::{Error, Language, Project, create};
use crate::policy::SlotKind;
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Make a folder with the smallest useful policy, its test and all it needs of the SDK. Needs no network.
#[derive(Args, Debug)]
pub(super) struct NewArgs {
    /// The policy's name: a-z 0-9 -, as `kvasir policy list` shows it.
    name: String,
    /// assemblyscript, c, c++, go, javascript, python, rust, typescript or zig.
    #[arg(long = "lang", value_name = "LANGUAGE")]
    language: String,
    /// scheduler, evictor, admitter or balancer.
    #[arg(long)]
    slot: SlotKind,
    /// Folder to make. Default: the name.
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl NewArgs {
    pub(super) fn run(self) -> ExitCode {
        match self.create() {
            Ok(project) => self.print(&project),
            Err(error) => return super::failed(&error),
        }
        ExitCode::SUCCESS
    }

    fn create(&self) -> Result<Project, Error> {
        let dir = self.dir.as_deref().unwrap_or(Path::new(&self.name));
        create(Language::find_with_dialect(&self.language)?, self.slot, &self.name, dir)
    }

    fn print(&self, project: &Project) {
        let (dir, language, missing) = (project.dir.display(), project.language.name, project.missing_tool());
        if self.json {
            let missing = missing.map(|tool| serde_json::json!({ "program": tool.program, "get": tool.get }));
            let object = serde_json::json!({
                "dir": project.dir, "name": project.name, "language": language, "slot": project.slot.as_str(),
                "missing_tool": missing,
            });
            return println!("{object}");
        }
        println!("made {dir}: {} {} in {}", article(project.slot), project.slot, self.language);
        println!("next:\n  cd {}", quoted(&project.dir));
        if let Some(tool) = missing {
            println!("  {}   # for `{}`, which is not on the PATH", tool.get, tool.program);
        }
        println!("  kvasir policy build\n  kvasir policy check");
    }
}

fn article(slot: SlotKind) -> &'static str {
    if slot.as_str().starts_with(['a', 'e']) { "an" } else { "a" }
}

/// As a shell takes it.
pub(super) fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    if text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}
