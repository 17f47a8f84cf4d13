//! Signatures in a registry, where cosign keeps them: an artifact of its own under the tag `sha256-DIGEST.sig`, one layer a
//! signature.
//!
//! `cosign verify --key KEY.pub --insecure-ignore-tlog=true` finds and checks what is written here: a key signs, and nothing is
//! entered in a public log.

use super::Error;
use super::artifact::{Descriptor, Manifest, digest};
use crate::policy::Digest;
use crate::policy::trust::{PAYLOAD_BYTES_MAX, SIGNATURES_MAX, Signature};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

const LAYER: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
pub(super) const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const SIGNATURE: &str = "dev.cosignproject.cosign/signature";

/// The tag under which the signatures of a manifest are.
pub(super) fn tag(manifest: Digest) -> String {
    format!("sha256-{manifest}.sig")
}

/// A signature whose text must still be fetched.
pub(super) struct Layer {
    pub(super) payload: Digest,
    /// Bytes of the text.
    pub(super) size: u64,
    signature: Vec<u8>,
}

impl Layer {
    pub(super) fn with(self, payload: Vec<u8>) -> Signature {
        Signature { payload, signature: self.signature }
    }
}

/// The layers that could be ours: others keep other kinds of signatures there, which are none of our business.
///
/// # Errors
/// There are more than a component can have.
pub(super) fn layers(manifest: &Manifest) -> Result<Vec<Layer>, Error> {
    let layer = |layer: &Descriptor| {
        let signature = BASE64_STANDARD.decode(layer.annotations.get(SIGNATURE)?).ok()?;
        let ours =
            layer.media_type == LAYER && signature.len() == 64 && layer.size <= PAYLOAD_BYTES_MAX as u64;
        ours.then_some(Layer { payload: digest(&layer.digest)?, size: layer.size, signature })
    };
    let found: Vec<_> = manifest.layers.iter().filter_map(layer).collect();
    if found.len() > SIGNATURES_MAX {
        let reason = format!("{} signatures; at most {SIGNATURES_MAX}", found.len());
        return Err(Error::Malformed { what: "the manifest of signatures", reason });
    }
    Ok(found)
}

/// Config and manifest of signatures, with what was there before.
pub(super) fn image(before: Option<Manifest>, signatures: &[Signature]) -> (Vec<u8>, Vec<u8>) {
    let mut layers = before.map_or_else(Vec::new, |manifest| manifest.layers);
    for Signature { payload, signature } in signatures {
        let mut layer = Descriptor::of(LAYER, payload);
        layer.annotations.insert(SIGNATURE.to_owned(), BASE64_STANDARD.encode(signature));
        if !layers.contains(&layer) {
            layers.push(layer);
        }
    }
    let digests: Vec<_> = layers.iter().map(|layer| &layer.digest).collect();
    let config = serde_json::json!({
        "architecture": "", "os": "", "config": {}, "created": "0001-01-01T00:00:00Z",
        "rootfs": { "type": "layers", "diff_ids": digests },
    });
    let config = config.to_string().into_bytes();
    let manifest = Manifest::new(Descriptor::of(CONFIG, &config), layers);
    (config, manifest.to_bytes())
}
