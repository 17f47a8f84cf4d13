//! `kvasir policy load`.

use super::registry::RegistryFlags;
use super::{Target, slot, stage::StageFlags};
use crate::package::reference::SCHEME;
use crate::policy::chain::{self, Role};
use crate::policy::trust::{self, Signature};
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
    /// Name of a default policy, file of a component or a chain (contains `/` or ends in `.wasm` or `.toml`), or
    /// `oci://REGISTRY/REPOSITORY:TAG`, which is fetched here, not by the host. Signatures go along.
    source: String,
    /// A setting of the policy; may be given several times.
    #[arg(long = "setting", value_name = "NAME=VALUE", value_parser = crate::cli::setting)]
    settings: Vec<(String, String)>,
    #[command(flatten)]
    registry: RegistryFlags,
}

impl PolicyFlags {
    /// What the host is sent.
    pub(super) fn read(self) -> anyhow::Result<ReadPolicy> {
        let Self { slot, source, settings, registry } = self;
        Ok(ReadPolicy { slot, source: policy_source(source, registry)?, settings })
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
        to.seat(&slot, load)?;
        Ok(ExitCode::SUCCESS)
    }
}

fn policy_source(source: String, registry: RegistryFlags) -> anyhow::Result<PolicySource> {
    if source.starts_with(SCHEME) {
        let package = registry.open()?.pull(&source.parse()?)?;
        return Ok(source_of(package.about.name, package.component, &package.signatures));
    }
    if Path::new(&source).is_dir() {
        anyhow::bail!("{source} is a folder; name the component in it, as `kvasir policy build` has told it");
    }
    if !Source::is_path(&source) {
        let file = format!("{source}.wasm");
        if Path::new(&file).exists() {
            eprintln!(
                "kvasir: `{source}` is looked up among the built-in ones; for the file here write ./{file}"
            );
        }
        return Ok(PolicySource::Builtin(source));
    }
    if chain::is_chain(Path::new(&source)) {
        return chain_source(Path::new(&source));
    }
    let (name, bytes, signatures) = component(Path::new(&source))?;
    Ok(source_of(name, bytes, &signatures))
}

/// A component as a host takes it.
pub(super) fn source_of(name: String, bytes: Vec<u8>, signatures: &[Signature]) -> PolicySource {
    PolicySource::Signed { name, bytes, signatures: told(signatures) }
}

fn told(signatures: &[Signature]) -> Vec<proto::PolicySignature> {
    let told = |signature: &Signature| proto::PolicySignature {
        payload: signature.payload.clone(),
        signature: signature.signature.clone(),
    };
    signatures.iter().map(told).collect()
}

fn component(path: &Path) -> anyhow::Result<(String, Vec<u8>, Vec<Signature>)> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read policy file {}", path.display()))?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Ok((name, bytes, trust::read_beside(path)?))
}

fn chain_source(path: &Path) -> anyhow::Result<PolicySource> {
    let (name, parts) = chain::read(path)?;
    let parts = parts.into_iter().map(chain_part).collect::<anyhow::Result<_>>()?;
    Ok(PolicySource::Chain { name, parts })
}

fn chain_part(part: ChainPart) -> anyhow::Result<proto::ChainPart> {
    let (name, source, signatures) = match part.source {
        Source::File(path) => {
            let (name, bytes, signatures) = component(&path)?;
            (name, Of::Component(bytes.into()), told(&signatures))
        }
        named => (String::new(), Of::Builtin(named.name().into()), Vec::new()),
    };
    let role = match part.role {
        Role::Filter => chain_part::Role::Filter(chain_part::Filter {}),
        Role::Score { weight_permille } => chain_part::Role::WeightPermille(weight_permille),
        Role::Pick => chain_part::Role::Picker(chain_part::Picker {}),
    };
    let setting = |(name, value)| proto::Setting { name, value };
    let settings = part.settings.into_iter().map(setting).collect();
    Ok(proto::ChainPart { name, source: Some(source), settings, role: Some(role), signatures })
}
