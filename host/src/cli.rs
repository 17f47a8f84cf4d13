//! The commands of the `kvasir` binary, one file each.
//!
//! Exit codes: 0 done; 1 something asked for is not there (`exists`, `get`, `rm`, `pin`, `stat` and so on); 2 an error,
//! reported in one line on standard error.

pub mod bench;
pub mod bench_engine;
pub mod bench_index;
pub mod bench_policy;
pub mod bench_rpc;
pub mod bench_store;
pub mod bench_tiers;
pub mod bench_transfer;
mod blocks;
mod cluster_flags;
mod config;
mod dev;
mod doctor;
mod explain;
mod man;
mod node;
mod policy;
mod push;
pub mod replay;
mod serve;
mod token;
mod topology;
pub mod trace;

use anyhow::Context;
use clap::{Args, CommandFactory, Parser, Subcommand};
use kvasir_client::control::{Control, ControlAddr, ControlError};
use kvasir_client::data::{Client, Endpoint, Options};
use kvasir_client::{ClientFiles, ClientTls};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

/// KV-cache daemon: native data plane, decisions as hot-swappable WebAssembly policies.
#[derive(Parser, Debug)]
#[command(
    name = "kvasir",
    version,
    max_term_width = 100,
    after_help = "Exit codes: 0 done, 1 not there, 2 error."
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Dev(dev::DevArgs),
    Serve(serve::ServeArgs),
    Put(blocks::PutArgs),
    Get(blocks::GetArgs),
    Exists(blocks::ExistsArgs),
    Rm(blocks::RmArgs),
    Pin(blocks::PinArgs),
    Unpin(blocks::UnpinArgs),
    Evict(blocks::EvictArgs),
    Ls(blocks::LsArgs),
    Stat(blocks::StatArgs),
    Policy(policy::PolicyArgs),
    Explain(explain::ExplainArgs),
    Bench(bench::BenchArgs),
    Replay(replay::ReplayArgs),
    Trace(trace::TraceArgs),
    Config(config::ConfigArgs),
    Doctor(doctor::DoctorArgs),
    Topology(topology::TopologyArgs),
    Node(node::NodeArgs),
    Push(push::PushArgs),
    Token(token::TokenArgs),
    Completions(CompletionsArgs),
    Man(man::ManArgs),
}

/// Print completions for a shell; for bash: `source <(kvasir completions bash)`.
#[derive(Args, Debug)]
struct CompletionsArgs {
    shell: clap_complete::Shell,
}

impl CompletionsArgs {
    fn run(self) {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "kvasir", &mut text);
        crate::print::bytes(&text);
    }
}

/// Where the settings come from.
#[derive(Args, Clone, Debug, Default)]
pub struct ConfigFlags {
    /// Settings file; without one the defaults apply.
    #[arg(long, value_name = "FILE", env = "KVASIR_CONFIG")]
    config: Option<PathBuf>,
    /// One setting, which overrides file and environment; may be given several times.
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    set: Vec<String>,
}

impl ConfigFlags {
    fn load(&self) -> Result<crate::config::Config, crate::config::Error> {
        let environment = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        crate::config::Config::load(self.config.as_deref(), environment, &self.set)
    }
}

/// Which host to talk to, and who we are.
#[derive(Args, Clone, Debug)]
struct HostFlags {
    /// Data plane of the host: unix:PATH or tcp:ADDRESS:PORT. Default: the socket in the settings.
    #[arg(long, value_name = "ENDPOINT", env = "KVASIR_HOST")]
    host: Option<String>,
    /// Control of the host: unix:PATH or HOST:PORT. Default: the control socket in the settings.
    #[arg(long, value_name = "ENDPOINT", env = "KVASIR_GRPC")]
    grpc: Option<String>,
    /// Token to show over TCP (`kvasir token new` makes one). Better in the variable than in the list of processes.
    #[arg(long, value_name = "TOKEN", env = "KVASIR_TOKEN", hide_env_values = true, default_value = "")]
    token: String,
    /// Number of the tenant, or of the shared namespace, whose blocks are meant. Default: the caller's own tenant.
    #[arg(long, value_name = "NUMBER", env = "KVASIR_TENANT", default_value_t = 0)]
    tenant: u16,
    /// Speak TLS over TCP, and trust hosts whose certificate is of an authority in this file.
    #[arg(long, value_name = "FILE", env = "KVASIR_TLS_CA")]
    tls_ca: Option<PathBuf>,
    /// Certificate to show to the host, with its key in `--tls-key`.
    #[arg(long, value_name = "FILE", env = "KVASIR_TLS_CERT", requires_all = ["tls_ca", "tls_key"])]
    tls_cert: Option<PathBuf>,
    /// Key of the certificate in `--tls-cert`.
    #[arg(long, value_name = "FILE", env = "KVASIR_TLS_KEY", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    #[command(flatten)]
    settings: ConfigFlags,
}

impl HostFlags {
    /// TLS for the host at `HOST:PORT`, whose certificate must name it so.
    fn tls(&self, to: &str) -> anyhow::Result<Option<ClientTls>> {
        let Some(authority) = self.tls_ca.clone() else { return Ok(None) };
        let identity = self.tls_cert.clone().zip(self.tls_key.clone());
        let name = to.rsplit_once(':').map_or(to, |(name, _)| name).trim_matches(['[', ']']);
        Ok(Some(ClientTls::read(&ClientFiles { authority, identity }, name)?))
    }

    /// A connection for bytes.
    fn data(&self) -> anyhow::Result<Client> {
        let (endpoint, tls) = match &self.host {
            Some(text) => {
                let text = text.strip_prefix("tcp:").unwrap_or(text);
                (text.parse()?, if text.starts_with("unix:") { None } else { self.tls(text)? })
            }
            None => (Endpoint::Unix(self.settings.load()?.node.socket), None),
        };
        Ok(Client::connect(
            &endpoint,
            Options { token: self.token.clone(), tenant: self.tenant, tls, ..Options::default() },
        )?)
    }

    /// Runs a control call to its end.
    fn control<R>(&self, call: impl AsyncFnOnce(Control) -> Result<R, ControlError>) -> anyhow::Result<R> {
        let addr = match &self.grpc {
            Some(text) => text.parse()?,
            None => ControlAddr::Unix(self.settings.load()?.node.control),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let tls = match &addr {
            ControlAddr::Tcp(to) => self.tls(to)?.map(|tls| (to, tls)),
            ControlAddr::Unix(_) => None,
        };
        Ok(runtime.block_on(async {
            let control = match &tls {
                Some((to, tls)) => Control::connect_tls(to, &self.token, tls).await?,
                None => Control::connect(&addr, &self.token).await?,
            };
            call(control).await
        })?)
    }
}

/// Logs of this process go to standard error; `RUST_LOG` sets the level, `info` by default.
fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    // A second call in one process keeps the first subscriber.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        // It would report to standard error that this cannot be written, and panic.
        .log_internal_errors(false)
        .try_init();
}

/// A setting of a policy, as flags give it.
fn setting(text: &str) -> anyhow::Result<(String, String)> {
    let (name, value) = text.split_once('=').with_context(|| format!("`{text}` is not NAME=VALUE"))?;
    Ok((name.to_owned(), value.to_owned()))
}

/// Exit code 0 if what was asked for is there, otherwise 1.
fn there(yes: bool) -> ExitCode {
    if yes { ExitCode::SUCCESS } else { ExitCode::from(1) }
}

/// Runs the command of this process.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    cli.run().unwrap_or_else(|error| {
        eprintln!("kvasir: {}", one_line(&error));
        ExitCode::from(2)
    })
}

impl Cli {
    fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Dev(args) => args.run().map(done),
            Command::Serve(args) => args.run().map(done),
            Command::Put(args) => args.run().map(done),
            Command::Get(args) => args.run(),
            Command::Exists(args) => args.run(),
            Command::Rm(args) => args.run(),
            Command::Pin(args) => args.run(),
            Command::Unpin(args) => args.run(),
            Command::Evict(args) => args.run(),
            Command::Ls(args) => args.run().map(done),
            Command::Stat(args) => args.run(),
            Command::Policy(args) => args.run(),
            Command::Explain(args) => args.run(),
            Command::Bench(args) => args.run().map(done),
            Command::Replay(args) => args.run().map(done),
            Command::Trace(args) => args.run().map(done),
            Command::Config(args) => args.run().map(done),
            Command::Doctor(args) => args.run(),
            Command::Topology(args) => args.run().map(done),
            Command::Node(args) => args.run().map(done),
            Command::Push(args) => args.run(),
            Command::Token(args) => args.run().map(done),
            Command::Completions(args) => {
                args.run();
                Ok(ExitCode::SUCCESS)
            }
            Command::Man(args) => args.run().map(done),
        }
    }
}

fn done((): ()) -> ExitCode {
    ExitCode::SUCCESS
}

/// The error and its causes, each one once.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !line.contains(&cause) {
            line += if line.is_empty() { "" } else { ": " };
            line += &cause;
        }
    }
    line.replace('\n', " ")
}
