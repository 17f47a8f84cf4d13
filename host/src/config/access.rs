//! Settings that say which callers may come in.

use super::{Error, invalid};
use kvasir_dataplane::server::access::{Role, Roles};
use serde::{Deserialize, Serialize};

/// The users and groups that may come in over the Unix sockets, besides the daemon's own user and root, and the certificates that
/// count over TLS. Without one of these, a caller over TCP needs a token (`kvasir token new`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Access {
    /// Other users and groups of this machine, and names in certificates, one `[[access.allow]]` each. With a user or group, the sockets can be opened by everyone,
    /// and callers that are not listed are turned away; `node.socket` and `node.control` must then be in a folder they can enter.
    pub allow: Vec<Allow>,
    /// Blocks that tenants share on purpose, one `[[access.namespaces]]` each.
    pub namespaces: Vec<Namespace>,
    /// Largest size of the audit log before it is rotated; one older file is kept.
    pub audit_bytes: super::Size,
}

impl Default for Access {
    fn default() -> Self {
        Self { allow: Vec::new(), namespaces: Vec::new(), audit_bytes: super::Size::mib(16) }
    }
}

/// A user or a group, and what it may do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Allow {
    /// Name or number of a user; either this or `group`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub user: String,
    /// Name or number of a group; its members may come in, whether it is their first group or another.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub group: String,
    /// Or a DNS name (subject alternative name) in the certificate of a client over TLS, which an authority in
    /// `listen.tls.client_ca` has signed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub certificate: String,
    /// What they may do: `engine`, `router`, `observer`, `policy`, `operator`.
    pub roles: Vec<String>,
    /// The tenant they act for. `None` means tenant 0.
    #[serde(default)]
    pub tenant: u16,
    /// Names of the namespaces that they may use beside their tenant's own, as `[[access.namespaces]]` lists them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub namespaces: Vec<String>,
    /// Whether a user or group maps the pool and so reads and fills blocks without a copy. The pool is one for all tenants: a
    /// caller that has this can read and change the bytes of every one of them. Without it blocks travel through the socket.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_place: bool,
}

/// Blocks that several tenants may store and read, such as those of common system prompts. A client that wants them names the
/// number in its hello, where it would name its tenant. Every caller that may use a namespace sees all that is in it, so it is for
/// what may be known to all of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Namespace {
    /// What `access.allow` and `kvasir token new --namespace` call it.
    pub name: String,
    /// Stands in the keys of its blocks, where a tenant's number would. The same on all hosts; no tenant may have it. Its
    /// quota and floor are those that `[[store.tenants]]` gives to this number.
    pub number: u16,
}

impl Access {
    /// The numbers of the namespaces of these names.
    ///
    /// # Errors
    /// A name that is not listed.
    pub fn numbers(&self, names: &[String]) -> Result<Vec<u16>, Error> {
        let number = |name: &String| {
            let found = self.namespaces.iter().find(|namespace| namespace.name == *name);
            let unknown = || invalid("namespace", name, "is not listed; add it as [[access.namespaces]]");
            found.map(|namespace| namespace.number).ok_or_else(unknown)
        };
        names.iter().map(number).collect()
    }

    pub(super) fn validate(&self) -> Result<(), Error> {
        for (n, Namespace { name, number }) in self.namespaces.iter().enumerate() {
            let refuse = |why: &str| Err(invalid("access.namespaces", format!("{name} = {number}"), why));
            if name.is_empty() || *number == 0 {
                return refuse("needs a name, and a number that is not 0");
            }
            if self.namespaces[..n].iter().any(|other| other.name == *name || other.number == *number) {
                return refuse("has the name or the number of another namespace");
            }
            if self.allow.iter().any(|allow| allow.tenant == *number) {
                return refuse("has the number of a tenant in access.allow; choose one that no tenant has");
            }
        }
        self.allow.iter().try_for_each(|allow| {
            allow.validate()?;
            self.numbers(&allow.namespaces).map(drop)
        })
    }
}

impl Allow {
    /// # Errors
    /// A word that is not a role.
    pub fn roles(&self) -> Result<Roles, Error> {
        let parse = |role: &String| {
            role.parse::<Role>().map_err(|error| invalid("access.allow", role, &error.to_string()))
        };
        self.roles.iter().map(parse).collect()
    }

    fn validate(&self) -> Result<(), Error> {
        let named =
            [&self.user, &self.group, &self.certificate].iter().filter(|name| !name.is_empty()).count();
        if named != 1 {
            let why = "must name a user, a group or a certificate, and only one of them";
            return Err(invalid("access.allow", format!("{self:?}"), why));
        }
        if self.roles.is_empty() {
            let why = "has no roles; give at least one of engine, router, observer, policy, operator";
            return Err(invalid(
                "access.allow",
                format!("{}{}{}", self.user, self.group, self.certificate),
                why,
            ));
        }
        self.roles().map(|_| ())
    }
}
