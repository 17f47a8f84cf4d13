//! Who may come in.

use super::{Error, invalid};
use kvasir_dataplane::server::access::{Role, Roles};
use serde::{Deserialize, Serialize};

/// Who may come in over the Unix sockets, besides the daemon's own user and root. Over TCP a token is needed
/// (`kvasir token new`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Access {
    /// Other users and groups of this machine, one `[[access.allow]]` each. With any, the sockets can be opened by everyone,
    /// and who is not listed is turned away; `node.socket` and `node.control` must then be in a folder they can enter.
    pub allow: Vec<Allow>,
    /// Largest size of the audit log before it is rotated; one older file is kept.
    pub audit_bytes: super::Size,
}

impl Default for Access {
    fn default() -> Self {
        Self { allow: Vec::new(), audit_bytes: super::Size::mib(16) }
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
    /// What they may do: `engine`, `router`, `observer`, `policy`, `operator`.
    pub roles: Vec<String>,
    /// The tenant they act for. None: tenant 0.
    #[serde(default)]
    pub tenant: u16,
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

    pub(super) fn validate(&self) -> Result<(), Error> {
        if self.user.is_empty() == self.group.is_empty() {
            let why = "must name either a user or a group";
            return Err(invalid("access.allow", format!("{self:?}"), why));
        }
        if self.roles.is_empty() {
            let why = "has no roles; give at least one of engine, router, observer, policy, operator";
            return Err(invalid("access.allow", format!("{}{}", self.user, self.group), why));
        }
        self.roles().map(|_| ())
    }
}
