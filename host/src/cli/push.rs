//! `kvasir push`: hand a request's blocks over to another host.

use super::{HostFlags, blocks, there};
use clap::Args;
use kvasir_proto::{self as proto, push_response::Outcome};
use std::collections::BTreeMap;
use std::process::ExitCode;

/// Write blocks into another host's pool, in order; exit code 1 unless all are there in the end.
#[derive(Args, Debug)]
pub(super) struct PushArgs {
    #[command(flatten)]
    host: HostFlags,
    /// Name of the peer.
    #[arg(long, value_name = "PEER")]
    to: String,
    /// Names of blocks, or 0x and 32 hexadecimal digits each.
    #[arg(required = true, value_name = "KEY", num_args = 1..=kvasir_dataplane::cluster::push::PUSH_MAX)]
    names: Vec<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl PushArgs {
    /// # Errors
    /// The host or the peer does not answer.
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let keys = blocks::keys(&self.names)?
            .iter()
            .map(|key| key.of_tenant(self.host.tenant).0.to_be_bytes().into())
            .collect();
        let request = proto::PushRequest { to: self.to.clone(), keys };
        let response =
            self.host.control(async |mut control| Ok(control.store.push(request).await?.into_inner()))?;
        let outcomes: Vec<Outcome> = response.outcomes().collect();
        let told = self.names.iter().zip(outcomes.iter().map(|outcome| word(*outcome)));
        if self.json {
            println!("{}", serde_json::to_string(&told.collect::<BTreeMap<_, _>>())?);
        } else {
            told.for_each(|(name, word)| println!("{name} {word}"));
        }
        Ok(there(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Done | Outcome::Had))))
    }
}

fn word(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Done => "pushed",
        Outcome::Had => "there already",
        Outcome::Missing => "missing",
        Outcome::NoRoom => "no room",
        Outcome::Failed | Outcome::Unspecified => "failed",
    }
}
