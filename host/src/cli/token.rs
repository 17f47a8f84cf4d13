//! `kvasir token`: who may come in over TCP.

use super::ConfigFlags;
use crate::access::audit::Audit;
use crate::access::tokens::{Token, Tokens};
use crate::config::Span;
use clap::{Args, Subcommand};
use comfy_table::{Table, presets};
use kvasir_dataplane::server::access::{Act, Role};
use std::time::{Duration, UNIX_EPOCH};

/// Make, list and revoke the tokens that callers over TCP show. Run it on the host, as the host's user; it counts at once.
#[derive(Args, Debug)]
pub(super) struct TokenArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    New(NewArgs),
    List(ListArgs),
    Revoke(RevokeArgs),
}

/// Make a token and print it. It is shown this once; the host keeps only its hash.
#[derive(Args, Debug)]
struct NewArgs {
    /// What its bearer may do: engine, router, observer, policy, operator; may be given several times.
    #[arg(long = "role", value_name = "ROLE", required = true)]
    roles: Vec<Role>,
    /// The tenant its bearer acts for.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    tenant: u16,
    /// A namespace of the settings that its bearer shares with other tenants; may be given several times.
    #[arg(long = "namespace", value_name = "NAME")]
    namespaces: Vec<String>,
    /// How long it is good for, such as `30d`. Default: until revoked.
    #[arg(long, value_name = "SPAN")]
    expires: Option<Span>,
    #[command(flatten)]
    settings: ConfigFlags,
}

/// List the tokens of the host, without their secrets.
#[derive(Args, Debug)]
struct ListArgs {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: ConfigFlags,
}

/// Revoke a token. Calls that have begun end; connections for data end at once.
#[derive(Args, Debug)]
struct RevokeArgs {
    /// Its id, as `kvasir token list` shows it.
    id: String,
    #[command(flatten)]
    settings: ConfigFlags,
}

impl TokenArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::New(args) => {
                let access = args.settings.load()?.access;
                let numbers = access.numbers(&args.namespaces)?;
                if let Some(name) = access.namespaces.iter().find(|name| name.number == args.tenant) {
                    anyhow::bail!(
                        "{} is the number of namespace {}, not of a tenant",
                        args.tenant,
                        name.name
                    );
                }
                let ttl = args.expires.map(|span| span.0);
                let token = tokens(&args.settings)?.create(&args.roles, args.tenant, &numbers, ttl)?;
                // `kvasir_ID_SECRET`
                let id = token.split('_').nth(1).unwrap_or_default();
                let roles: Vec<_> = args.roles.iter().map(|role| role.name()).collect();
                let on = format!("token {id}: {}, tenant {}", roles.join(", "), args.tenant);
                note(&args.settings, "token new", &on)?;
                println!("{token}");
            }
            Command::List(args) => list(&tokens(&args.settings)?.list()?, args.json),
            Command::Revoke(args) => {
                tokens(&args.settings)?.revoke(&args.id)?;
                note(&args.settings, "token revoke", &format!("token {}", args.id))?;
            }
        }
        Ok(())
    }
}

/// Writes to the audit log of the host, which alone rotates it.
fn note(settings: &ConfigFlags, what: &str, on: &str) -> anyhow::Result<()> {
    let audit = Audit::in_folder(&settings.load()?.node.data_dir, u64::MAX);
    let who = format!("user {}", rustix::process::getuid().as_raw());
    audit.note(&Act { who: &who, what, on, from: "command line", outcome: "done", refused: false });
    Ok(())
}

fn tokens(settings: &ConfigFlags) -> anyhow::Result<Tokens> {
    Ok(Tokens::in_folder(&settings.load()?.node.data_dir))
}

fn list(tokens: &[Token], json: bool) {
    let time = |at: u64| humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(at)).to_string();
    if json {
        let row = |token: &Token| {
            serde_json::json!({
                "id": token.id, "roles": token.roles, "tenant": token.tenant, "namespaces": token.namespaces,
                "created": time(token.created),
                "expires": token.expires.map(time),
            })
        };
        println!("{}", serde_json::json!({ "tokens": tokens.iter().map(row).collect::<Vec<_>>() }));
        return;
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["id", "roles", "tenant", "created", "expires"]);
    for token in tokens {
        let expires = token.expires.map_or("never".to_owned(), time);
        table.add_row([
            &token.id,
            &token.roles.join(", "),
            &token.tenant.to_string(),
            &time(token.created),
            &expires,
        ]);
    }
    println!("{table}");
}
