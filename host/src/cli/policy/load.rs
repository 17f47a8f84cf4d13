//! `kvasir policy load`.

use super::{Target, slot, stage::StageFlags};
use crate::config::Assigned;
use crate::policy::chain::{self, Role};
use crate::policy::{ChainPart, Source};
use anyhow::Context;
use clap::Args;
use kvasir_client::control::{Control, PolicySource};
use kvasir_proto as proto;
use kvasir_proto::chain_part::{self, Source as Of};
use std::path::Path;
use std::process::ExitCode;

/// Put a policy into service or on trial; on any error the present one stays.
///
/// Traffic flows meanwhile. A second trial takes the place of the first.
#[derive(Args, Debug)]
pub(super) struct LoadArgs {
    #[command(flatten)]
    policy: PolicyFlags,
    #[command(flatten)]
    stage: StageFlags,
    #[command(flatten)]
    to: Target,
}

/// A policy, and the slot it is for.
#[derive(Args, Debug)]
pub(super) struct PolicyFlags {
    /// scheduler, evictor, admitter or balancer.
    #[arg(value_parser = slot)]
    slot: String,
    /// Name of a default policy, or file of a component or a chain (contains `/` or ends in `.wasm` or `.toml`).
    source: String,
    /// A setting of the policy; may be given several times.
    #[arg(long = "setting", value_name = "NAME=VALUE", value_parser = crate::cli::setting)]
    settings: Vec<(String, String)>,
}

impl PolicyFlags {
    /// What the host is sent.
    pub(super) fn read(self) -> anyhow::Result<ReadPolicy> {
        let Self { slot, source, settings } = self;
        Ok(ReadPolicy { slot, source: policy_source(source)?, settings })
    }
}

/// A policy with its code.
pub(super) struct ReadPolicy {
    pub(super) slot: String,
    pub(super) source: PolicySource,
    pub(super) settings: Vec<(String, String)>,
}

impl LoadArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { policy, stage, to } = self;
        let ReadPolicy { slot, source, settings } = policy.read()?;
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
    if chain::is_chain(Path::new(&source)) {
        return chain_source(Path::new(&source));
    }
    let (name, bytes) = component(Path::new(&source))?;
    Ok(PolicySource::Component { name, bytes })
}

fn component(path: &Path) -> anyhow::Result<(String, Vec<u8>)> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read policy file {}", path.display()))?;
    Ok((path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), bytes))
}

fn chain_source(path: &Path) -> anyhow::Result<PolicySource> {
    let (name, parts) = chain::read(path)?;
    let parts = parts.into_iter().map(chain_part).collect::<anyhow::Result<_>>()?;
    Ok(PolicySource::Chain { name, parts })
}

fn chain_part(part: ChainPart) -> anyhow::Result<proto::ChainPart> {
    let (name, source) = match part.source {
        Source::File(path) => component(&path).map(|(name, bytes)| (name, Of::Component(bytes.into())))?,
        named => (String::new(), Of::Builtin(named.name().into())),
    };
    let role = match part.role {
        Role::Filter => chain_part::Role::Filter(chain_part::Filter {}),
        Role::Score { weight_permille } => chain_part::Role::WeightPermille(weight_permille),
        Role::Pick => chain_part::Role::Picker(chain_part::Picker {}),
    };
    let setting = |(name, value)| proto::Setting { name, value };
    let settings = part.settings.into_iter().map(setting).collect();
    Ok(proto::ChainPart { name, source: Some(source), settings, role: Some(role) })
}
