//! What can go wrong: in one call ([`Fault`]), or in bringing a policy into service ([`Error`]).

use super::description::BadDescription;
use super::{SlotKind, trust};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The longest text of a policy that goes into an error or a log line.
pub(super) const TEXT_BYTES: usize = 1 << 10;

/// Why one call of a policy gave no usable answer. The caller decides natively and counts it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The component trapped (also by growing past its memory limit); its instance is gone.
    #[error("trapped: {0}")]
    Trap(String),
    /// The call used up its time and was interrupted; its instance is gone.
    #[error("ran past its deadline of {0:?}")]
    Deadline(Duration),
    /// The call was interrupted after a time in which it hardly ran; its instance is gone.
    #[error(
        "had no answer after {0:?}, though it ran for less than its deadline; this machine has no time for it"
    )]
    Starved(Duration),
    /// The component answered, but not within the contract.
    #[error("invalid answer: {0}")]
    Invalid(String),
    /// No instance is ready: the last one failed and its successor is being built.
    #[error("no instance ready")]
    NotReady,
    /// The tables changed under the decision more than once; no fault of the policy.
    #[error("overtaken by changes of the tables")]
    Overtaken,
    /// The policy rejected a request that had to run, and another policy has room for it; no fault of the policy.
    #[error("overruled: it rejected a request that must run")]
    Overruled,
}

/// Why a policy was not brought into service. The policy that serves is untouched.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no built-in {slot} is called `{name}`; built in: {known}{}", did_you_mean(.suggestion))]
    UnknownBuiltin { slot: SlotKind, name: String, known: String, suggestion: Option<String> },
    #[error("cannot read policy file {path}: {source}{}", pull_first(.path))]
    Read { path: PathBuf, source: std::io::Error },
    #[error(
        "policy `{name}` has {bytes} bytes, more than the {limit} allowed; raise policy.component_bytes_max or strip it"
    )]
    TooLarge { name: String, bytes: u64, limit: u64 },
    #[error("policy `{name}` is not a WebAssembly component: {reason}")]
    NotAComponent { name: String, reason: String },
    #[error("policy `{name}` does not compile: {reason}")]
    Compile { name: String, reason: String },
    #[error(
        "policy `{name}` imports `{import}`, which is not granted; a policy may import kvasir:policy/log@0.1.0 only"
    )]
    ImportNotGranted { name: String, import: String },
    #[error(
        "policy `{name}` exports {found}, this host speaks kvasir:policy@0.1.0; rebuild it against wit/policy-0.1"
    )]
    WrongVersion { name: String, found: String },
    #[error("policy `{name}` is no {slot}: it lacks the export `{missing}` (it exports {found})")]
    WrongWorld { name: String, slot: SlotKind, missing: String, found: String },
    #[error(
        "policy `{name}` serves no slot: it exports {found}; build it for one of the worlds in wit/policy-0.1"
    )]
    NoSlot { name: String, found: String },
    #[error("policy `{name}` says it is a `{described}`, but was loaded as {slot}")]
    WrongSlot { name: String, slot: SlotKind, described: String },
    #[error("policy `{name}` is refused for what it says about itself: {reason}")]
    Description { name: String, reason: BadDescription },
    #[error("policy `{name}` failed in `{step}`: {fault}")]
    Start { name: String, step: &'static str, fault: Fault },
    #[error("policy `{name}` refused its settings: {reason}")]
    Settings { name: String, reason: String },
    #[error(
        "no instance is free for policy `{name}`: {reason}; try again, end a trial, or set fewer conductor.workers"
    )]
    NoRoom { name: String, reason: String },
    #[error("cannot instantiate policy `{name}`: {reason}")]
    Instantiate { name: String, reason: String },
    #[error("policy `{name}` is not trusted as {slot}: {reason}")]
    Untrusted { name: String, slot: SlotKind, reason: trust::Refused },
    #[error(
        "policy `{name}` refused its settings: unknown setting `{setting}`{}; its settings: {known}",
        did_you_mean(.suggestion)
    )]
    UnknownSetting { name: String, setting: String, known: String, suggestion: Option<String> },
    #[error("chain `{name}`: {reason}")]
    Chain { name: String, reason: String },
    #[error("{0} has no previous policy to roll back to")]
    NoPrevious(SlotKind),
    #[error("{0} has no policy on trial; load one with --shadow or --canary first")]
    NoTrial(SlotKind),
    #[error("no canary in {slot}: {why}; load it with --shadow, then promote it")]
    NoCanary { slot: SlotKind, why: &'static str },
    #[error("a canary in {slot} takes 0.1% to 100% of the sessions, or one tenant")]
    Share { slot: SlotKind },
    #[error("{0} is paused: nothing is swapped by itself; resume it, or load the policy by hand")]
    Paused(SlotKind),
    #[error("{slot} has no setting `{setting}` that could be unset; set are: {set}")]
    NotSet { slot: SlotKind, setting: String, set: String },
    #[error(
        "the component in {0} is not kept: its file is another by now, or the host has no database; load it again with its settings"
    )]
    NotKept(SlotKind),
    #[error("policy state in {path} cannot be {action}: {reason}; the policy in service is unchanged")]
    State { path: PathBuf, action: &'static str, reason: String },
    #[error("{limit} policies are being loaded already; try again")]
    Busy { limit: usize },
    #[error("cannot start the policy engine: {0}")]
    Engine(String),
}

/// What to do where a place in a registry stands for a file.
fn pull_first(path: &Path) -> &'static str {
    let is_in_registry = path.as_os_str().as_encoded_bytes().starts_with(b"oci://");
    if is_in_registry { "; `kvasir policy pull` makes a file of what lies in a registry" } else { "" }
}

pub(super) fn did_you_mean(close: &Option<String>) -> String {
    close.as_ref().map(|c| format!(" (did you mean `{c}`?)")).unwrap_or_default()
}
