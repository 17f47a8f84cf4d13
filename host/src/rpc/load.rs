//! What a `LoadRequest` asks for, wherever it comes from.

use super::policy_admin::convert;
use super::validate;
use crate::host::Host;
use crate::policy::chain::Role;
use crate::policy::history::acting_for;
use crate::policy::trust::Signature;
use crate::policy::{ChainPart, Error, PolicyHost, SlotKind, SlotStatus, Source, Stage, UnknownSlot};
use crate::text::printable;
use kvasir_proto::{self as proto, chain_part, load_request};
use prost::Message;
use tonic::Status;

/// Longest text of a status.
const STATUS_BYTES: usize = 2 << 10;

/// A policy that somebody wants in a slot.
pub(crate) struct Wanted {
    pub(crate) slot: SlotKind,
    pub(crate) source: Source,
    pub(crate) settings: Settings,
    pub(super) stage: Stage,
}

type Settings = Vec<(String, String)>;

/// # Errors
/// A status that names the field.
pub(crate) fn wanted(request: proto::LoadRequest) -> Result<Wanted, Status> {
    validate::load(&request)?;
    let proto::LoadRequest { slot, name, source, settings, stage, signatures } = request;
    let (slot, stage) = (slot_kind(&slot)?, convert::stage(stage)?);
    let name = if name.is_empty() { slot.to_string() } else { name };
    let source = match source {
        Some(load_request::Source::Builtin(name)) => Source::Builtin(name),
        Some(load_request::Source::Component(bytes)) => {
            Source::Signed { name, bytes: bytes.into(), signatures: signatures_in(signatures) }
        }
        Some(load_request::Source::Chain(chain)) => {
            let parts = chain.parts.into_iter().enumerate().map(|(i, of)| part(i, of));
            Source::Chain { name, parts: parts.collect::<Result<_, _>>()? }
        }
        None => {
            let why = "neither a built-in name nor a component nor a chain was given";
            return Err(validate::refuse("source", why));
        }
    };
    Ok(Wanted { slot, source, settings: settings_in(settings), stage })
}

/// The request that would bring it into that slot. A source that names a file asks for nothing.
pub(super) fn request(slot: SlotKind, source: Source, settings: Settings) -> proto::LoadRequest {
    let name = source.name().to_owned();
    let (source, signatures) = match source {
        Source::Builtin(name) | Source::Native(name) => {
            (Some(load_request::Source::Builtin(name)), Vec::new())
        }
        Source::Bytes { bytes, .. } => (Some(load_request::Source::Component(bytes.into())), Vec::new()),
        Source::Signed { bytes, signatures, .. } => {
            (Some(load_request::Source::Component(bytes.into())), signatures_out(signatures))
        }
        Source::Chain { parts, .. } => {
            let parts = parts.into_iter().map(part_out).collect();
            (Some(load_request::Source::Chain(proto::Chain { parts })), Vec::new())
        }
        Source::File(_) => (None, Vec::new()),
    };
    let (slot, settings) = (slot.to_string(), settings_out(settings));
    proto::LoadRequest { slot, name, source, settings, stage: None, signatures }
}

fn part_out(part: ChainPart) -> proto::ChainPart {
    let name = part.source.name().to_owned();
    let (source, signatures) = match part.source {
        Source::Builtin(name) | Source::Native(name) => (Some(chain_part::Source::Builtin(name)), Vec::new()),
        Source::Bytes { bytes, .. } => (Some(chain_part::Source::Component(bytes.into())), Vec::new()),
        Source::Signed { bytes, signatures, .. } => {
            (Some(chain_part::Source::Component(bytes.into())), signatures_out(signatures))
        }
        Source::File(_) | Source::Chain { .. } => (None, Vec::new()),
    };
    let role = match part.role {
        Role::Filter => chain_part::Role::Filter(chain_part::Filter {}),
        Role::Score { weight_permille } => chain_part::Role::WeightPermille(weight_permille),
        Role::Pick => chain_part::Role::Picker(chain_part::Picker {}),
    };
    proto::ChainPart { name, source, settings: settings_out(part.settings), role: Some(role), signatures }
}

fn part(place: usize, part: proto::ChainPart) -> Result<ChainPart, Status> {
    let refuse = |field: &str, why: &str| validate::refuse(&format!("chain.parts[{place}].{field}"), why);
    let source = match part.source {
        Some(chain_part::Source::Builtin(name)) => Source::Builtin(name),
        Some(chain_part::Source::Component(bytes)) => {
            let signatures = signatures_in(part.signatures);
            Source::Signed { name: part.name, bytes: bytes.into(), signatures }
        }
        None => return Err(refuse("source", "neither a built-in name nor a component was given")),
    };
    let role = match part.role {
        Some(chain_part::Role::Filter(_)) => Role::Filter,
        Some(chain_part::Role::WeightPermille(weight_permille)) => Role::Score { weight_permille },
        Some(chain_part::Role::Picker(_)) => Role::Pick,
        None => return Err(refuse("role", "neither filter nor weight nor picker")),
    };
    Ok(ChainPart { role, source, settings: settings_in(part.settings) })
}

fn signatures_in(signatures: Vec<proto::PolicySignature>) -> Vec<Signature> {
    let signature = |proto::PolicySignature { payload, signature }| Signature { payload, signature };
    signatures.into_iter().map(signature).collect()
}

fn signatures_out(signatures: Vec<Signature>) -> Vec<proto::PolicySignature> {
    let signature = |Signature { payload, signature }| proto::PolicySignature { payload, signature };
    signatures.into_iter().map(signature).collect()
}

fn settings_out(settings: Settings) -> Vec<proto::Setting> {
    settings.into_iter().map(|(name, value)| proto::Setting { name, value }).collect()
}

fn settings_in(settings: Vec<proto::Setting>) -> Settings {
    settings.into_iter().map(|s| (s.name, s.value)).collect()
}

impl Wanted {
    /// Brings it into the slot. Blocking.
    ///
    /// # Errors
    /// The host's; what served is untouched.
    pub(super) fn load(self, policies: &PolicyHost) -> Result<SlotStatus, Error> {
        policies.load_as(self.slot, self.source, self.settings, self.stage)
    }
}

/// Brings into service what another host encoded, for `who`.
///
/// # Errors
/// As text: it is no such request, or is refused.
pub(crate) fn load_encoded(host: &Host, request: &[u8], who: &str) -> Result<(), String> {
    let request = proto::LoadRequest::decode(request).map_err(|e| format!("no LoadRequest: {e}"))?;
    let wanted = wanted(request).map_err(|status| status.message().to_owned())?;
    let loaded = acting_for(who, || wanted.load(&host.policies));
    loaded.map(drop).map_err(|e| printable(&e.to_string(), STATUS_BYTES))
}

pub(super) fn slot_kind(name: &str) -> Result<SlotKind, Status> {
    let unknown = |error: UnknownSlot| printable(&error.to_string(), STATUS_BYTES);
    name.parse().map_err(|error| Status::invalid_argument(format!("slot: {}", unknown(error))))
}
