//! `kvasir policy load`.

use super::Target;
use super::registry::RegistryFlags;
use crate::config::Assigned;
use crate::package::reference::SCHEME;
use crate::policy::trust::{self, Signature};
use anyhow::Context;
use clap::Args;
use kvasir_client::control::{Control, PolicySource};
use kvasir_proto as proto;
use std::path::Path;
use std::process::ExitCode;

/// Put a policy into service while traffic flows; on any error the present one stays.
#[derive(Args, Debug)]
pub(super) struct LoadArgs {
    /// scheduler, evictor, admitter or balancer.
    #[arg(value_parser = super::slot)]
    slot: String,
    /// Name of a default policy, file of a component (contains `/` or ends in `.wasm`), or `oci://REGISTRY/REPOSITORY:TAG`,
    /// which is fetched here, not by the host. Signatures go along.
    source: String,
    /// A setting of the policy; may be given several times.
    #[arg(long = "setting", value_name = "NAME=VALUE", value_parser = crate::cli::setting)]
    settings: Vec<(String, String)>,
    #[command(flatten)]
    registry: RegistryFlags,
    #[command(flatten)]
    to: Target,
}

impl LoadArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { slot, source, settings, registry, to } = self;
        let source = policy_source(source, registry)?;
        let load = async |mut control: Control| control.load_policy(&slot, source, &settings).await;
        to.print_policies(&[to.host.control(load)?]);
        Ok(ExitCode::SUCCESS)
    }
}

fn policy_source(source: String, registry: RegistryFlags) -> anyhow::Result<PolicySource> {
    if source.starts_with(SCHEME) {
        let package = registry.open()?.pull(&source.parse()?)?;
        return Ok(source_of(package.about.name, package.component, &package.signatures));
    }
    if !Assigned::is_path(&source) {
        return Ok(PolicySource::Builtin(source));
    }
    let bytes = std::fs::read(&source).with_context(|| format!("cannot read policy file {source}"))?;
    let name = Path::new(&source).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let signatures = trust::read_beside(Path::new(&source))?;
    Ok(source_of(name, bytes, &signatures))
}

/// A component as a host takes it.
pub(super) fn source_of(name: String, bytes: Vec<u8>, signatures: &[Signature]) -> PolicySource {
    let told = |signature: &Signature| proto::PolicySignature {
        payload: signature.payload.clone(),
        signature: signature.signature.clone(),
    };
    PolicySource::Signed { name, bytes, signatures: signatures.iter().map(told).collect() }
}
