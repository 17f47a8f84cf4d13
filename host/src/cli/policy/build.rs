//! `kvasir policy build`.

use crate::authoring::{Built, Error, Project, build};
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

/// Make a component of a policy's sources, and load it once as a host would. No host need run.
///
/// It is compiled with the language's own tools, wrapped and stripped.
#[derive(Args, Debug)]
pub(super) struct BuildArgs {
    /// Folder of the policy.
    #[arg(default_value = ".")]
    dir: PathBuf,
    /// File to write. Default: NAME.wasm in that folder.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl BuildArgs {
    pub(super) fn run(self) -> ExitCode {
        match self.build() {
            Ok(built) => self.print(&built),
            Err(error) => return super::failed(&error),
        }
        ExitCode::SUCCESS
    }

    fn build(&self) -> Result<Built, Error> {
        let project = Project::open(&self.dir)?;
        build(&project, self.output.as_ref().unwrap_or(&project.component()))
    }

    fn print(&self, built: &Built) {
        let Built { path, found } = built;
        let (name, version, ms) =
            (&found.description.name, &found.description.version, found.load_time.as_secs_f64() * 1e3);
        if self.json {
            let object = serde_json::json!({
                "file": path, "slot": found.slot.as_str(), "name": name, "version": version,
                "digest": found.digest.to_string(), "bytes": found.bytes, "load_ms": ms,
            });
            return println!("{object}");
        }
        println!("{} {name} {version}", found.slot);
        println!("file     {}", path.display());
        println!("digest   {}", found.digest);
        println!("size     {} B", found.bytes);
        println!("load     {ms:.1} ms, compiled anew");
        match self.dir.to_str() {
            Some(".") => println!("next: kvasir policy check"),
            _ => println!("next: kvasir policy check {}", super::new::quoted(&self.dir)),
        }
    }
}
