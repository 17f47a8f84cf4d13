//! How a component is laid out in a registry, as `wkg` and `oci-wasm` have it: a config that says what kind of Wasm it is,
//! and one layer, the component.
//!
//! Config and manifest follow from the component alone, so that a person who signs a file signs the very manifest that pushing it
//! makes.

use super::{COMPONENT_BYTES_MAX, Error, check_digest};
use crate::policy::{Digest, SlotKind, description, inspect};
use crate::text::printable;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

pub(super) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.wasm.config.v0+json";
const LAYER: &str = "application/wasm";
const CONTRACT: &str = "0.1.0";

const SLOT: &str = "kvasir.policy.slot";
const NAME: &str = "kvasir.policy.name";
const VERSION: &str = "org.opencontainers.image.version";

/// Longest manifest or config that is read.
pub(super) const DOCUMENT_BYTES_MAX: u64 = 256 << 10;

/// One blob, named by what is in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Descriptor {
    pub(super) media_type: String,
    pub(super) digest: String,
    /// Bytes.
    pub(super) size: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) annotations: BTreeMap<String, String>,
}

impl Descriptor {
    pub(super) fn of(media_type: &str, bytes: &[u8]) -> Self {
        let digest = format!("sha256:{}", Digest::of(bytes));
        Self {
            media_type: media_type.to_owned(),
            digest,
            size: bytes.len() as u64,
            annotations: BTreeMap::new(),
        }
    }

    /// # Errors
    /// It is not SHA-256, or the blob is larger than `limit` bytes.
    pub(super) fn checked(&self, what: &'static str, limit: u64) -> Result<Digest, Error> {
        if self.size > limit {
            return Err(Error::TooLarge { what, bytes: self.size, limit });
        }
        digest(&self.digest).ok_or_else(|| Error::Malformed {
            what,
            reason: format!("its digest is `{}`, not sha256: and 64 digits", printable(&self.digest, 100)),
        })
    }
}

/// `sha256:` and 64 digits.
pub(super) fn digest(text: &str) -> Option<Digest> {
    text.strip_prefix("sha256:")?.parse().ok()
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Manifest {
    schema_version: u32,
    #[serde(default)]
    media_type: String,
    pub(super) config: Descriptor,
    pub(super) layers: Vec<Descriptor>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
}

impl Manifest {
    pub(super) fn new(config: Descriptor, layers: Vec<Descriptor>) -> Self {
        Self {
            schema_version: 2,
            media_type: MANIFEST.to_owned(),
            config,
            layers,
            annotations: BTreeMap::new(),
        }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a manifest is plain text and numbers")
    }

    /// # Errors
    /// It is no manifest.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let malformed = |reason: String| Error::Malformed { what: "the manifest", reason };
        if bytes.len() as u64 > DOCUMENT_BYTES_MAX {
            let (bytes, limit) = (bytes.len() as u64, DOCUMENT_BYTES_MAX);
            return Err(Error::TooLarge { what: "the manifest", bytes, limit });
        }
        let manifest: Self =
            serde_json::from_slice(bytes).map_err(|e| malformed(printable(&e.to_string(), 200)))?;
        if manifest.schema_version != 2 {
            return Err(malformed(format!("its schema is {}, not 2", manifest.schema_version)));
        }
        Ok(manifest)
    }

    /// The config and the component of a policy.
    ///
    /// # Errors
    /// It is the manifest of something else.
    pub(super) fn of_policy(&self) -> Result<(&Descriptor, &Descriptor), Error> {
        let foreign = |reason: String| Error::Malformed { what: "the manifest", reason };
        if self.config.media_type != CONFIG {
            let found = printable(&self.config.media_type, 100);
            return Err(foreign(format!("it is of `{found}`, not of a WebAssembly component")));
        }
        match self.layers.as_slice() {
            [layer] if layer.media_type == LAYER => Ok((&self.config, layer)),
            layers => Err(foreign(format!("it has {} layers; a policy has one, of {LAYER}", layers.len()))),
        }
    }
}

/// What `oci-wasm` says of a component. The time is always the same: it would make equal components unequal.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    created: &'static str,
    architecture: &'static str,
    os: &'static str,
    layer_digests: Vec<String>,
    component: Component,
}

#[derive(Serialize)]
struct Component {
    exports: Vec<String>,
    imports: Vec<String>,
    target: Option<String>,
}

/// What a package is, for people and for choosing: the slot as the component exports it, the names as its manifest has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    pub slot: SlotKind,
    pub name: String,
    pub version: String,
}

/// A component with what goes into a registry beside it.
pub(super) struct Artifact {
    pub(super) about: About,
    pub(super) config: Vec<u8>,
    pub(super) manifest: Vec<u8>,
}

impl Artifact {
    /// Loads the component as a host would, so that nothing is signed or pushed that no host takes.
    ///
    /// # Errors
    /// A host would refuse it.
    pub(super) fn of(name: &str, component: &[u8]) -> Result<Self, Error> {
        let found = inspect::inspect_component(&super::inspection(), name, component)?;
        let slot = found.slot;
        let config = Config {
            created: "1970-01-01T00:00:00Z",
            architecture: "wasm",
            os: "wasip2",
            layer_digests: vec![format!("sha256:{}", found.digest)],
            component: Component { exports: found.exports, imports: found.imports, target: None },
        };
        let config = serde_json::to_vec(&config).expect("a config is plain text");
        let about = About { slot, name: found.description.name, version: found.description.version };
        let layers = vec![Descriptor::of(LAYER, component)];
        let mut manifest = Manifest::new(Descriptor::of(CONFIG, &config), layers);
        manifest.annotations = [
            (SLOT, slot.as_str()),
            (NAME, &about.name),
            ("kvasir.policy.contract", CONTRACT),
            ("org.opencontainers.image.title", &about.name),
            (VERSION, &about.version),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into();
        Ok(Self { about, config, manifest: manifest.to_bytes() })
    }

    /// Checks what came from elsewhere. Nothing of the component is run.
    ///
    /// # Errors
    /// A part has another digest than its manifest says, or the component serves no slot, or another than its manifest says.
    pub(super) fn checked(manifest: Vec<u8>, config: Vec<u8>, component: &[u8]) -> Result<Self, Error> {
        let parsed = Manifest::parse(&manifest)?;
        let (config_wanted, layer) = parsed.of_policy()?;
        check_digest("the config", config_wanted.checked("the config", DOCUMENT_BYTES_MAX)?, &config)?;
        check_digest("the component", layer.checked("the component", COMPONENT_BYTES_MAX)?, component)?;
        let slot = inspect::slot_of("component", component)?;
        let said = |key: &str| parsed.annotations.get(key).map(String::as_str);
        if let Some(other) = said(SLOT).filter(|said| *said != slot.as_str()) {
            let reason = format!("it says `{}`, but the component is of {slot}", printable(other, 64));
            return Err(Error::Malformed { what: "the manifest", reason });
        }
        // What `wkg` pushed has no such annotations.
        let name = said(NAME).filter(|name| description::is_name(name)).unwrap_or(slot.as_str());
        let version = said(VERSION).filter(|version| description::is_version(version)).unwrap_or("0.0.0");
        let about = About { slot, name: name.to_owned(), version: version.to_owned() };
        Ok(Self { about, config, manifest })
    }
}
