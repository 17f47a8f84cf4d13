//! `kvasir policy inspect`.

use super::registry::{Place, RegistryFlags};
use super::trust::TrustFlags;
use crate::policy::inspect::{CONTRACT, Inspection, inspect, inspect_component};
use crate::policy::trust::{Claim, Signature, TrustedKey, TrustedKeys, read_beside};
use crate::policy::{PolicyConfig, SlotKind};
use crate::replay::contender::builtins;
use crate::text::printable;
use clap::Args;
use serde_json::{Value, json};
use std::path::Path;
use std::process::ExitCode;

/// Tell what a component is to a host: slot, settings, digest, signatures, WIT, load time.
///
/// No host need run. Signatures are those in the registry, or in the file of its name with `.sig` behind it, held against the trust
/// file.
#[derive(Args, Debug)]
pub(super) struct InspectArgs {
    /// Name of a default policy, file of a component, or `oci://REGISTRY/REPOSITORY:TAG`.
    policy: Place,
    #[command(flatten)]
    registry: RegistryFlags,
    #[command(flatten)]
    trust: TrustFlags,
}

impl InspectArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { policy, registry, trust } = self;
        let config = PolicyConfig::default();
        let (found, signatures) = match &policy {
            Place::File(path) if let Some((name, component)) = built_in(path) => {
                (inspect_component(&config, name, component)?, Vec::new())
            }
            Place::File(path) => (inspect(&config, path)?, read_beside(path)?),
            Place::Registry(reference) => {
                let package = registry.open()?.pull(reference)?;
                let found = inspect_component(&config, &package.about.name, &package.component)?;
                (found, package.signatures)
            }
        };
        let keys = trust.path()?.as_deref().map(TrustedKeys::read).transpose()?;
        let signed: Vec<_> =
            signatures.iter().map(|signature| Signed::new(&found, signature, keys.as_ref())).collect();
        match trust.json {
            true => println!("{}", object(&found, &signed)),
            false => print(&found, &signed),
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The default policy of that name, unless a file has it.
fn built_in(path: &Path) -> Option<(&'static str, &'static [u8])> {
    let known = SlotKind::ALL.into_iter().flat_map(builtins);
    known.filter(|_| !path.exists()).find(|(name, _)| path.as_os_str() == *name)
}

/// A signature beside the component, and what is known of it.
struct Signed {
    /// What it says; `None`: nothing that a host understands.
    claim: Option<Claim>,
    /// Name and id of the trusted key that made it.
    key: Option<(String, String)>,
    /// Why a host with that trust file would not go by it. `None`: it would.
    refused: Option<String>,
}

impl Signed {
    fn new(found: &Inspection, signature: &Signature, keys: Option<&TrustedKeys>) -> Self {
        let claim = signature.says();
        let Some(keys) = keys else {
            return Self {
                claim,
                key: None,
                refused: Some("unchecked: no trust file is known; give --trust FILE".into()),
            };
        };
        let by = keys.0.iter().find(|key| signature.claim(&key.key).is_some());
        let key = by.map(|TrustedKey { name, key, .. }| (name.clone(), key.id().to_string()));
        let refused = keys.check(found.slot, found.digest, std::slice::from_ref(signature)).err();
        Self { claim, key, refused: refused.map(|reason| reason.to_string()) }
    }

    fn object(&self) -> Value {
        let claim = self.claim.as_ref();
        json!({
            "slot": claim.map(|claim| claim.slot.as_str()),
            "component": claim.map(|claim| claim.component.to_string()),
            "reference": claim.map(|claim| &claim.reference),
            "key": self.key.as_ref().map(|(name, _)| name),
            "key_id": self.key.as_ref().map(|(_, id)| id),
            "valid": self.refused.is_none(),
            "reason": self.refused,
        })
    }

    fn text(&self) -> String {
        let claim = match &self.claim {
            None => "says nothing that a host understands".to_owned(),
            Some(claim) => format!("as {} of {}", claim.slot, printable(&claim.reference, LINE_BYTES)),
        };
        let by = match &self.key {
            Some((name, id)) => format!("by `{name}` (key {id}), "),
            None => String::new(),
        };
        format!("{by}{claim}: {}", self.refused.as_deref().unwrap_or("valid"))
    }
}

/// The longest text of a policy on one line of a terminal.
const LINE_BYTES: usize = 200;
/// Lines of WIT on a terminal. Those of the contract take 150; a component may define what it likes.
const WIT_LINES: usize = 400;

fn object(found: &Inspection, signed: &[Signed]) -> Value {
    let about = &found.description;
    let setting = |s: &kvasir_policy::Setting| json!({ "name": s.name, "default": s.default, "doc": s.doc });
    json!({
        "slot": found.slot.as_str(), "name": about.name, "version": about.version,
        "contract": CONTRACT, "learns": found.learns, "digest": found.digest.to_string(), "bytes": found.bytes,
        "imports": found.imports, "exports": found.exports, "wit": found.wit, "unwrapped": found.is_unwrapped,
        "settings": about.settings.iter().map(setting).collect::<Vec<_>>(),
        "signatures": signed.iter().map(Signed::object).collect::<Vec<_>>(),
        "load_ms": found.load_time.as_secs_f64() * 1e3,
    })
}

fn print(found: &Inspection, signed: &[Signed]) {
    let about = &found.description;
    println!("{} {} {}", found.slot, about.name, about.version);
    println!("contract {CONTRACT}");
    println!("learns   {}", if found.learns { "yes" } else { "no" });
    println!("entered  {}", if found.is_unwrapped { "by its core module" } else { "as a component" });
    println!("digest   {}", found.digest);
    println!("size     {} B", found.bytes);
    println!("load     {:.1} ms, compiled anew", found.load_time.as_secs_f64() * 1e3);
    if signed.is_empty() {
        println!("signed   no");
    }
    signed.iter().for_each(|signature| println!("signed   {}", signature.text()));
    for (word, names) in [("imports", &found.imports), ("exports", &found.exports)] {
        names.iter().for_each(|name| println!("{word:<8} {}", printable(name, LINE_BYTES)));
    }
    for s in &about.settings {
        let [default, doc] = [&s.default, &s.doc].map(|text| printable(text, LINE_BYTES));
        println!("setting  {}={default}  {doc}", s.name);
    }
    let Some(wit) = &found.wit else { return println!("\nWIT: it has types that are not read here") };
    println!("\nWIT:");
    wit.lines().take(WIT_LINES).for_each(|line| println!("  {}", printable(line, LINE_BYTES)));
    if wit.lines().nth(WIT_LINES).is_some() {
        println!("  … more, in the JSON of --json");
    }
}
