//! `kvasir policy trust`.

use crate::cli::{ConfigFlags, there};
use crate::package::Package;
use crate::policy::SlotKind;
use crate::policy::trust::{NAME_RULE, PublicKey, SecretKey, TrustedKey, TrustedKeys, is_name};
use anyhow::Context;
use clap::{Args, Subcommand};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Make keys, and say whose policies a host takes into which slot. Run it where the host's settings are.
#[derive(Args, Debug)]
pub(super) struct TrustArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Keygen(KeygenArgs),
    Add(AddArgs),
    List(ListArgs),
    Check(CheckArgs),
}

/// Make a pair of keys: NAME.key to sign with, which never leaves your hands, and NAME.pub for those who check.
#[derive(Args, Debug)]
struct KeygenArgs {
    /// What the files are called, perhaps in a folder.
    name: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Trust a key from the next load on, without a restart.
#[derive(Args, Debug)]
struct AddArgs {
    /// What the key is called in lists and errors.
    name: String,
    /// The public key, in PEM.
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
    /// A slot that it may sign for; may be given several times. Default: all.
    #[arg(long = "slot", value_name = "SLOT")]
    slots: Vec<SlotKind>,
    #[command(flatten)]
    file: TrustFlags,
}

/// List the trusted keys.
#[derive(Args, Debug)]
struct ListArgs {
    #[command(flatten)]
    file: TrustFlags,
}

/// Tell whether the host would take a component, for all that its signatures say. Exit code 1: it would not.
#[derive(Args, Debug)]
struct CheckArgs {
    component: PathBuf,
    /// The slot it is meant for. Default: the one it is made for.
    #[arg(long)]
    slot: Option<SlotKind>,
    #[command(flatten)]
    file: TrustFlags,
}

#[derive(Args, Debug)]
pub(super) struct TrustFlags {
    /// The trust file. Default: `policy.trust.file` of the settings.
    #[arg(long, value_name = "FILE")]
    trust: Option<PathBuf>,
    #[command(flatten)]
    settings: ConfigFlags,
    /// Print one JSON object.
    #[arg(long)]
    pub(super) json: bool,
}

impl TrustFlags {
    /// `None`: the settings name none, and everybody is trusted.
    pub(super) fn path(&self) -> anyhow::Result<Option<PathBuf>> {
        if self.trust.is_some() {
            return Ok(self.trust.clone());
        }
        let file = self.settings.load()?.policy.trust.file;
        Ok(Some(file).filter(|file| !file.as_os_str().is_empty()))
    }
}

const NO_FILE: &str = "the settings name no trust file, so components need no signature; set policy.trust.file, or give --trust FILE";

impl TrustArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Keygen(args) => args.run(),
            Command::Add(args) => args.run(),
            Command::List(args) => args.run(),
            Command::Check(args) => args.run(),
        }
    }
}

impl KeygenArgs {
    fn run(self) -> anyhow::Result<ExitCode> {
        let Self { name, json } = self;
        let file = |ending: &str| {
            let mut file = name.clone().into_os_string();
            file.push(ending);
            PathBuf::from(file)
        };
        let (secret, public) = (file(".key"), file(".pub"));
        let pair = SecretKey::generate()?;
        anyhow::ensure!(!public.exists(), "{} is there already; choose another name", public.display());
        write_new(&secret, 0o600, &pair.to_pem())?;
        write_new(&public, 0o644, &pair.public().to_pem())?;
        let id = pair.public().id();
        if json {
            let [secret, public] = [&secret, &public].map(|path| path.display().to_string());
            println!("{}", serde_json::json!({ "id": id.to_string(), "key": secret, "public_key": public }));
            return Ok(ExitCode::SUCCESS);
        }
        println!("id      {id}");
        println!("private {}, for `kvasir policy sign --key`; keep it to yourself", secret.display());
        println!("public  {}, for `kvasir policy trust add` on each host", public.display());
        Ok(ExitCode::SUCCESS)
    }
}

/// A key that is there is never overwritten: what it signed could not be signed again.
fn write_new(path: &Path, mode: u32, text: &str) -> anyhow::Result<()> {
    let open = std::fs::File::options().create_new(true).write(true).mode(mode).open(path);
    let write = open.and_then(|mut file| file.write_all(text.as_bytes()));
    write.with_context(|| format!("{} cannot be made; choose another name", path.display()))
}

impl AddArgs {
    fn run(self) -> anyhow::Result<ExitCode> {
        let Self { name, key, slots, file } = self;
        anyhow::ensure!(is_name(&name), "a key's name must be {NAME_RULE}");
        let key = PublicKey::read(&key)?;
        let path = file.path()?.context(NO_FILE)?;
        let slots = if slots.is_empty() { SlotKind::ALL.into() } else { slots };
        let keys = TrustedKeys::add(&path, TrustedKey { name, slots, key })?;
        print(&keys, &path, file.json);
        Ok(ExitCode::SUCCESS)
    }
}

impl ListArgs {
    fn run(self) -> anyhow::Result<ExitCode> {
        match self.file.path()? {
            Some(path) => print(&TrustedKeys::read(&path)?, &path, self.file.json),
            None if self.file.json => println!("{}", serde_json::json!({ "file": null, "keys": [] })),
            None => println!("{NO_FILE}"),
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl CheckArgs {
    fn run(self) -> anyhow::Result<ExitCode> {
        let package = Package::read(&self.component)?;
        let slot = self.slot.unwrap_or(package.about.slot);
        let path = self.file.path()?;
        let keys = path.as_deref().map(TrustedKeys::read).transpose()?;
        let answer =
            keys.as_ref().map(|keys| keys.check(slot, package.component_digest(), &package.signatures));
        let refused = answer.as_ref().and_then(|answer| answer.as_ref().err());
        if self.file.json {
            let key = answer.as_ref().and_then(|answer| answer.as_ref().ok());
            let reason = refused.map(ToString::to_string);
            let object = serde_json::json!({
                "slot": slot.as_str(), "trusted": refused.is_none(), "key": key, "reason": reason,
            });
            println!("{object}");
        } else {
            match &answer {
                None => println!("trusted: {NO_FILE}"),
                Some(Ok(key)) => println!("trusted as {slot}, by `{key}`"),
                Some(Err(reason)) => println!("not trusted as {slot}: {reason}"),
            }
        }
        Ok(there(refused.is_none()))
    }
}

fn print(keys: &TrustedKeys, path: &Path, json: bool) {
    let slots = |key: &TrustedKey| key.slots.iter().map(|slot| slot.as_str()).collect::<Vec<_>>();
    if json {
        let row = |key: &TrustedKey| serde_json::json!({ "name": key.name, "slots": slots(key), "id": key.key.id().to_string() });
        let rows: Vec<_> = keys.0.iter().map(row).collect();
        return println!("{}", serde_json::json!({ "file": path.display().to_string(), "keys": rows }));
    }
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["name", "slots", "id"]);
    for key in &keys.0 {
        table.add_row([key.name.clone(), slots(key).join(", "), key.key.id().to_string()]);
    }
    println!("{table}");
}
