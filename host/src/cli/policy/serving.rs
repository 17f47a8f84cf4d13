//! What serves a slot of a running host, with its code.

use crate::cli::HostFlags;
use crate::policy::{Digest, SlotKind, Source};
use crate::replay::contender;
use crate::rpc::load::{self, Wanted};
use anyhow::{Context, bail, ensure};
use kvasir_client::control::Control;
use kvasir_proto as proto;

pub(super) struct Served {
    pub(super) source: Source,
    pub(super) settings: Vec<(String, String)>,
}

/// `builtins_as_components`: default policies come with their code, for the host's binary may have others than this one.
pub(super) fn fetch(
    host: &HostFlags,
    slot: SlotKind,
    builtins_as_components: bool,
) -> anyhow::Result<Served> {
    let request = proto::FetchPolicyRequest { slot: slot.to_string(), builtins_as_components };
    let fetch = async |mut control: Control| Ok(control.policy.fetch(request).await?.into_inner());
    let proto::FetchPolicyResponse { policy, digest, native } = host.control(fetch)?;
    let policy = policy.with_context(|| format!("the host does not say what serves {slot}"))?;
    let wanted = load::wanted(policy).map_err(|status| anyhow::anyhow!("{}", status.message()));
    let Wanted { slot: of, source, settings, .. } = wanted.context("the host sent no policy")?;
    ensure!(of == slot, "the host was asked what serves {slot}, and sent a policy for {of}");
    let source = match source {
        Source::Builtin(name) if native => contender::native(slot, &name).with_context(|| {
            format!("the host's own `{name}` decides natively, and this binary has none called so; replay with the host's")
        })?,
        Source::Signed { bytes, .. } if Digest::of(&bytes).to_string() != digest => {
            bail!("what came for {slot} is not {digest}, as the host says of it; ask again")
        }
        source => source,
    };
    Ok(Served { source, settings })
}
