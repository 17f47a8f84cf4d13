//! What the verbs that know registries have in common.

use crate::package::reference::SCHEME;
use crate::package::registry::Credential;
use crate::package::{Package, Reference, Registry};
use clap::Args;
use std::io::Read;
use std::path::PathBuf;
use std::str::FromStr;

/// Longest password that is read.
const PASSWORD_BYTES_MAX: u64 = 64 << 10;

/// How to talk to a registry. Without a name, what `docker login` left is shown to it.
#[derive(Args, Clone, Debug)]
pub(super) struct RegistryFlags {
    /// Speak HTTP without TLS, which a registry on this machine may always do.
    #[arg(long)]
    plain_http: bool,
    /// Log in with this name, and the password from standard input.
    #[arg(long, value_name = "NAME", requires = "password_stdin")]
    username: Option<String>,
    /// Read the password for `--username` from standard input.
    #[arg(long, requires = "username")]
    password_stdin: bool,
}

/// The flags, with the password read.
pub(super) struct Registries {
    plain_http: bool,
    credential: Option<Credential>,
    runtime: tokio::runtime::Runtime,
}

impl RegistryFlags {
    /// Reads standard input if the flags say so: once, for however many references.
    pub(super) fn open(self) -> anyhow::Result<Registries> {
        let Self { plain_http, username, password_stdin: _ } = self;
        let credential = match username {
            None => None,
            Some(username) => {
                let mut password = String::new();
                std::io::stdin().take(PASSWORD_BYTES_MAX).read_to_string(&mut password)?;
                let end = password.trim_end_matches(['\r', '\n']).len();
                password.truncate(end);
                anyhow::ensure!(!password.is_empty(), "there is no password on standard input");
                Some(Credential { username, password })
            }
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Registries { plain_http, credential, runtime })
    }
}

impl Registries {
    fn of(&self, reference: &Reference) -> anyhow::Result<Registry> {
        let credential = match &self.credential {
            Some(credential) => Some(credential.clone()),
            None => Credential::of_docker(reference)?,
        };
        Ok(Registry::of(reference, credential, self.plain_http)?)
    }

    pub(super) fn pull(&self, from: &Reference) -> anyhow::Result<Package> {
        Ok(self.runtime.block_on(self.of(from)?.pull(&from.version))?)
    }

    pub(super) fn push(&self, to: &Reference, package: &Package) -> anyhow::Result<()> {
        Ok(self.runtime.block_on(self.of(to)?.push(&to.version, package))?)
    }

    pub(super) fn push_signatures(&self, to: &Reference, package: &Package) -> anyhow::Result<()> {
        let registry = self.of(to)?;
        let push = registry.push_signatures(package.manifest_digest(), &package.signatures);
        Ok(self.runtime.block_on(push)?)
    }
}

/// Where a policy is.
#[derive(Clone, Debug)]
pub(super) enum Place {
    File(PathBuf),
    Registry(Reference),
}

impl FromStr for Place {
    type Err = crate::package::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.starts_with(SCHEME) { text.parse().map(Self::Registry) } else { Ok(Self::File(text.into())) }
    }
}

impl Place {
    /// The policy there, with its signatures.
    pub(super) fn fetch(&self, registries: &Registries) -> anyhow::Result<Package> {
        match self {
            Self::Registry(reference) => registries.pull(reference),
            Self::File(path) => {
                let text = path.to_string_lossy();
                if !path.exists() && text.parse::<Reference>().is_ok() {
                    anyhow::bail!(
                        "there is no file {text}; a policy in a registry is written {SCHEME}{text}"
                    );
                }
                Ok(Package::read(path)?)
            }
        }
    }
}

/// What a package is, as one JSON object.
pub(super) fn row(package: &Package) -> serde_json::Value {
    serde_json::json!({
        "slot": package.about.slot.as_str(), "name": package.about.name, "version": package.about.version,
        "digest": package.component_digest().to_string(), "manifest": package.manifest_digest().to_string(),
        "bytes": package.component.len(), "signatures": package.signatures.len(),
    })
}

/// The same for people.
pub(super) fn print(package: &Package) {
    println!("{} {} {}", package.about.slot, package.about.name, package.about.version);
    println!("digest     {}", package.component_digest());
    println!("manifest   sha256:{}", package.manifest_digest());
    println!("size       {} B", package.component.len());
    println!("signatures {}", package.signatures.len());
}
