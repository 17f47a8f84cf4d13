//! `kvasir policy inspect`.

use crate::policy::PolicyConfig;
use crate::policy::inspect::{Inspection, inspect};
use crate::text::printable;
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

/// Tell what a component is, as a host would find it: slot, settings, digest, load time.
///
/// No host need run.
#[derive(Args, Debug)]
pub(super) struct InspectArgs {
    file: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl InspectArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        print_inspection(&inspect(&PolicyConfig::default(), &self.file)?, self.json);
        Ok(ExitCode::SUCCESS)
    }
}

/// The longest text of a policy on one line of a terminal.
const LINE_BYTES: usize = 200;

fn print_inspection(found: &Inspection, json: bool) {
    let Inspection { slot, description, digest, bytes, imports, exports, load_time } = found;
    let setting = |s: &kvasir_policy::Setting| serde_json::json!({ "name": s.name, "default": s.default, "doc": s.doc });
    if json {
        let settings: Vec<_> = description.settings.iter().map(setting).collect();
        let object = serde_json::json!({
            "slot": slot.as_str(), "name": description.name, "version": description.version,
            "digest": digest.to_string(), "bytes": bytes, "imports": imports, "exports": exports,
            "settings": settings, "load_ms": load_time.as_secs_f64() * 1e3,
        });
        return println!("{object}");
    }
    println!("{slot} {} {}", description.name, description.version);
    println!("digest   {digest}");
    println!("size     {bytes} B");
    println!("load     {:.1} ms, compiled anew", load_time.as_secs_f64() * 1e3);
    for (word, names) in [("imports", imports), ("exports", exports)] {
        names.iter().for_each(|name| println!("{word:<8} {}", printable(name, LINE_BYTES)));
    }
    for s in &description.settings {
        let [default, doc] = [&s.default, &s.doc].map(|text| printable(text, LINE_BYTES));
        println!("setting  {}={default}  {doc}", s.name);
    }
}
