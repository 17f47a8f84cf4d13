//! `kvasir policy verify`.

use super::registry::{self, Place, RegistryFlags};
use crate::policy::SlotKind;
use crate::policy::trust::{PublicKey, TrustedKeys};
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

/// Tell whether a component is signed for its slot, by a key or by any of a trust file. Exit code 1: it is not.
#[derive(Args, Debug)]
pub(super) struct VerifyArgs {
    /// File of a component, or `oci://REGISTRY/REPOSITORY:TAG`.
    policy: Place,
    /// Ed25519 key in PEM (SPKI) by which it must be signed.
    #[arg(long, value_name = "FILE", required_unless_present = "trust")]
    key: Option<PathBuf>,
    /// Trust file, one of whose keys must have signed it.
    #[arg(long, value_name = "FILE", conflicts_with = "key")]
    trust: Option<PathBuf>,
    /// The slot that it must be signed for. Default: the one it is made for.
    #[arg(long)]
    slot: Option<SlotKind>,
    #[command(flatten)]
    registry: RegistryFlags,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl VerifyArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { policy, key, trust, slot, registry, json } = self;
        let keys = match (key, trust) {
            (Some(key), _) => TrustedKeys::only(PublicKey::read(&key)?),
            (None, Some(trust)) => TrustedKeys::read(&trust)?,
            (None, None) => anyhow::bail!("give --key or --trust"),
        };
        let package = policy.fetch(&registry.open()?)?;
        let slot = slot.unwrap_or(package.about.slot);
        let answer = keys.check(slot, package.component_digest(), &package.signatures);
        if json {
            let mut row = registry::row(&package);
            row["verified"] = answer.is_ok().into();
            row["reason"] = answer.as_ref().err().map(ToString::to_string).into();
            println!("{row}");
        } else {
            registry::print(&package);
            match &answer {
                Ok(key) => println!("verified   for {slot}, by {key}"),
                Err(reason) => println!("not so     {reason}"),
            }
        }
        Ok(crate::cli::there(answer.is_ok()))
    }
}
