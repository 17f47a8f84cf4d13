//! What a `LoadRequest` asks for, wherever it comes from.

use super::validate;
use crate::host::Host;
use crate::policy::history::Entry;
use crate::policy::{Error, SlotKind, SlotStatus, Source, UnknownSlot};
use crate::text::printable;
use kvasir_proto::{self as proto, load_request};
use prost::Message;
use tonic::Status;

/// Longest text of a status.
const STATUS_BYTES: usize = 2 << 10;

/// A policy that somebody wants in service.
pub(super) struct Wanted {
    pub(super) slot: SlotKind,
    pub(super) source: Source,
    pub(super) settings: Vec<(String, String)>,
}

/// # Errors
/// A status that names the field.
pub(super) fn wanted(request: proto::LoadRequest) -> Result<Wanted, Status> {
    validate::load(&request)?;
    let proto::LoadRequest { slot, name, source, settings } = request;
    let slot = slot_kind(&slot)?;
    let source = match source {
        Some(load_request::Source::Builtin(name)) => Source::Builtin(name),
        Some(load_request::Source::Component(bytes)) => {
            let name = if name.is_empty() { slot.to_string() } else { name };
            Source::Bytes { name, bytes: bytes.into() }
        }
        None => {
            return Err(validate::refuse("source", "neither a built-in name nor a component was given"));
        }
    };
    Ok(Wanted { slot, source, settings: settings.into_iter().map(|s| (s.name, s.value)).collect() })
}

impl Wanted {
    /// Brings it into service, and into the history as done by `who`. Blocking.
    ///
    /// # Errors
    /// The host's; what served is untouched.
    pub(super) fn load(self, host: &Host, who: &str) -> Result<SlotStatus, Error> {
        let Self { slot, source, settings } = self;
        let before = host.policies.status(slot);
        let loaded = host.policies.load(slot, source, settings)?;
        host.history.note(slot, Entry::now(who, "loaded", &loaded).in_place_of(&before));
        Ok(loaded)
    }
}

/// The same of a request that another host encoded.
///
/// # Errors
/// As text: it is no such request, or is refused.
pub(crate) fn load_encoded(host: &Host, request: &[u8], who: &str) -> Result<(), String> {
    let request = proto::LoadRequest::decode(request).map_err(|e| format!("no LoadRequest: {e}"))?;
    let wanted = wanted(request).map_err(|status| status.message().to_owned())?;
    wanted.load(host, who).map(drop).map_err(|e| printable(&e.to_string(), STATUS_BYTES))
}

pub(super) fn slot_kind(name: &str) -> Result<SlotKind, Status> {
    let unknown = |error: UnknownSlot| printable(&error.to_string(), STATUS_BYTES);
    name.parse().map_err(|error| Status::invalid_argument(format!("slot: {}", unknown(error))))
}
