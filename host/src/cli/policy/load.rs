//! `kvasir policy load`.

use super::{Target, slot, stage::StageFlags};
use crate::config::Assigned;
use anyhow::Context;
use clap::Args;
use kvasir_client::control::{Control, PolicySource};
use std::path::Path;
use std::process::ExitCode;

/// Put a policy into service or on trial; on any error the present one stays.
///
/// Traffic flows meanwhile. A second trial takes the place of the first.
#[derive(Args, Debug)]
pub(super) struct LoadArgs {
    /// scheduler, evictor, admitter or balancer.
    #[arg(value_parser = slot)]
    slot: String,
    /// Name of a default policy, or file of a component (contains `/` or ends in `.wasm`).
    source: String,
    /// A setting of the policy; may be given several times.
    #[arg(long = "setting", value_name = "NAME=VALUE", value_parser = crate::cli::setting)]
    settings: Vec<(String, String)>,
    #[command(flatten)]
    stage: StageFlags,
    #[command(flatten)]
    to: Target,
}

impl LoadArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { slot, source, settings, stage, to } = self;
        let source = policy_source(source)?;
        let load = async |mut control: Control| {
            control.load_policy_as(&slot, source, &settings, stage.stage()).await
        };
        to.print_policies(&[to.host.control(load)?]);
        Ok(ExitCode::SUCCESS)
    }
}

fn policy_source(source: String) -> anyhow::Result<PolicySource> {
    if !Assigned::is_path(&source) {
        return Ok(PolicySource::Builtin(source));
    }
    let bytes = std::fs::read(&source).with_context(|| format!("cannot read policy file {source}"))?;
    let name = Path::new(&source).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Ok(PolicySource::Component { name, bytes })
}
