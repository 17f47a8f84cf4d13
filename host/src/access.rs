//! What each caller may do: the gate of this host, its tokens, and the role that each call takes.
//!
//! On Unix sockets the kernel tells who the caller is; over TCP a token does. The data protocol's table is
//! [`required`](kvasir_dataplane::server::access::required); [`table`] has the one for gRPC and HTTP. A call that is in
//! neither is refused.

pub mod audit;
pub mod door;
pub mod table;
pub mod tokens;

use crate::config::{self, Access};
use audit::Audit;
use kvasir_dataplane::server::access::{Act, Gate, Identity, NO_TOKEN, OwnUser, Refused, Roles};
use kvasir_dataplane::stream::Stream;
use kvasir_tls::HostTls;
use std::fs::{self, File};
use std::io;
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;
use tokens::Tokens;

const NOT_LISTED: &str = "the certificate is of a known authority, but no name in it is listed; have the host's operator add one \
    under [[access.allow]] as `certificate`, or show a token";

const EXPIRED: &str = "the certificate has expired; renew it and connect again";

/// Decides who comes in. See the module text.
pub struct Keeper {
    allow: Vec<Rule>,
    tokens: Tokens,
    audit: Audit,
    /// `None` means that connections over TCP are not encrypted.
    tls: Option<Arc<HostTls>>,
}

struct Rule {
    who: Who,
    roles: Roles,
    tenant: u16,
    shared: Vec<u16>,
    in_place: bool,
}

enum Who {
    User(u32),
    Group(u32),
    /// A caller, by a name in its certificate.
    Certificate(String),
}

impl Keeper {
    /// A gate with the tokens of `data_dir`, which are read again when they change.
    ///
    /// # Errors
    /// A user or group that this machine does not know.
    pub fn new(access: &Access, data_dir: &Path, tls: Option<Arc<HostTls>>) -> Result<Self, config::Error> {
        let rule = |allow: &config::Allow| {
            let who = match (allow.user.as_str(), allow.group.as_str()) {
                ("", "") => Who::Certificate(allow.certificate.clone()),
                ("", group) => Who::Group(group_id(group)?),
                (user, _) => Who::User(user_id(user)?),
            };
            let shared = access.numbers(&allow.namespaces)?;
            let (tenant, in_place) = (allow.tenant, allow.in_place);
            Ok(Rule { who, roles: allow.roles()?, tenant, shared, in_place })
        };
        let allow = access.allow.iter().map(rule).collect::<Result<_, config::Error>>()?;
        let (tokens, audit) = (Tokens::in_folder(data_dir), Audit::in_folder(data_dir, access.audit_bytes.0));
        check_tokens(&tokens, access)?;
        Ok(Self { allow, tokens, audit, tls })
    }

    /// The mode of the sockets: closed to others unless some of them are let in.
    pub fn socket_mode(&self) -> u32 {
        let local = |rule: &Rule| !matches!(rule.who, Who::Certificate(_));
        if self.allow.iter().any(local) { 0o666 } else { 0o600 }
    }
}

impl Gate for Keeper {
    fn local(&self, uid: u32, gid: u32) -> Result<Identity, Refused> {
        OwnUser::default().local(uid, gid).or_else(|refused| {
            let listed = |rule: &&Rule| match rule.who {
                Who::User(user) => user == uid,
                Who::Group(group) => group == gid || groups_of(uid, gid).contains(&group),
                Who::Certificate(_) => false,
            };
            let rule = self.allow.iter().find(listed).ok_or(refused)?;
            Ok(rule.identity(format!("user {uid}")))
        })
    }

    fn bearer(&self, token: &str) -> Result<Identity, Refused> {
        if token.is_empty() {
            return Err(Refused(NO_TOKEN.into()));
        }
        self.tokens.identify(token, SystemTime::now())
    }

    fn certified(&self, certificate: &[u8]) -> Result<Identity, Refused> {
        // Checked in the handshake, too, but a connection may outlive that.
        if kvasir_tls::expires(certificate).is_none_or(|until| until < SystemTime::now()) {
            return Err(Refused(EXPIRED.into()));
        }
        let listed = self.allow.iter().find_map(|rule| match &rule.who {
            Who::Certificate(name) if kvasir_tls::is_for(certificate, name) => Some((rule, name)),
            _ => None,
        });
        let (rule, name) = listed.ok_or_else(|| Refused(NOT_LISTED.into()))?;
        Ok(rule.identity(format!("certificate {name}")))
    }

    fn note(&self, act: &Act<'_>) {
        self.audit.note(act);
    }

    fn dress(&self, stream: TcpStream) -> io::Result<Stream> {
        match &self.tls {
            None => Ok(Stream::Tcp(stream)),
            Some(tls) => kvasir_tls::host_stream(tls_config(tls), stream),
        }
    }
}

/// Refuses a namespace that has the number of a token's tenant: its members would read what that tenant stored for itself.
fn check_tokens(tokens: &Tokens, access: &Access) -> Result<(), config::Error> {
    // A list that cannot be read lets nobody in, and says so when somebody tries.
    for token in tokens.list().unwrap_or_default() {
        let same = |namespace: &&config::Namespace| namespace.number == token.tenant;
        if let Some(namespace) = access.namespaces.iter().find(same) {
            let why = format!(
                "has the number of the tenant of token {}; choose another, or revoke the token (`kvasir token revoke {}`)",
                token.id, token.id
            );
            return Err(config::invalid("access.namespaces", &namespace.name, &why));
        }
    }
    Ok(())
}

impl Rule {
    fn identity(&self, name: String) -> Identity {
        let (tenant, shared) = (Some(self.tenant), self.shared.clone());
        Identity { name, roles: self.roles, tenant, shared, in_place: self.in_place }
    }
}

/// What TLS uses now. If changed files cannot be used, the log says so, and the old certificates stay in use.
pub fn tls_config(tls: &HostTls) -> Arc<kvasir_tls::ServerConfig> {
    tls.config(|error| tracing::error!(%error, "listen.tls has changed and cannot be used; the old certificates stay"))
}

fn user_id(user: &str) -> Result<u32, config::Error> {
    let known = user.parse().ok().or_else(|| uzers::get_user_by_name(user).map(|user| user.uid()));
    known.ok_or_else(|| config::invalid("access.allow", user, "is not a user of this machine"))
}

fn group_id(group: &str) -> Result<u32, config::Error> {
    let known = group.parse().ok().or_else(|| uzers::get_group_by_name(group).map(|group| group.gid()));
    known.ok_or_else(|| config::invalid("access.allow", group, "is not a group of this machine"))
}

/// All groups of a user, by the machine's user database.
fn groups_of(uid: u32, gid: u32) -> Vec<u32> {
    let user = uzers::get_user_by_uid(uid);
    let groups = user.and_then(|user| uzers::get_user_groups(user.name(), gid));
    groups.unwrap_or_default().iter().map(uzers::Group::gid).collect()
}

/// Gives a file to the owner of its folder, where root made it: the daemon, whose folder it is, must be able to read it.
fn give_to_daemon(file: &File, path: &Path) -> io::Result<()> {
    let folder = path.parent().map(fs::metadata).transpose()?;
    match folder.filter(|_| rustix::process::geteuid().is_root()) {
        Some(folder) => fchown(file, Some(folder.uid()), Some(folder.gid())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Allow;

    fn keeper(allow: Vec<Allow>) -> Keeper {
        let access = Access { allow, ..Access::default() };
        Keeper::new(&access, Path::new("/nowhere"), None).unwrap()
    }

    fn allow(user: &str, group: &str) -> Allow {
        Allow {
            user: user.into(),
            group: group.into(),
            certificate: String::new(),
            roles: vec!["engine".into()],
            tenant: 3,
            namespaces: vec![],
            in_place: false,
        }
    }

    #[test]
    fn listed_users_and_groups_come_in_and_nobody_else() {
        let own = rustix::process::geteuid().as_raw();
        let (user, group, other) = (own + 71, own + 72, own + 73);
        let keeper = keeper(vec![allow(&user.to_string(), ""), allow("", &group.to_string())]);
        let first = keeper.local(user, 0).unwrap();
        assert_eq!((first.tenant, first.roles.to_string().as_str()), (Some(3), "engine"));
        assert!(keeper.local(other, group).is_ok() && keeper.local(own, 0).is_ok());
        let refused = keeper.local(other, other).unwrap_err().to_string();
        assert!(refused.contains(&format!("the caller is user {other}")), "{refused}");
        assert_eq!((keeper.socket_mode(), self::keeper(vec![]).socket_mode()), (0o666, 0o600));
    }

    #[test]
    fn a_namespace_has_no_number_of_a_tenant_that_has_a_token() {
        let dir = tempfile::tempdir().unwrap();
        let token = Tokens::in_folder(dir.path())
            .create(&[kvasir_dataplane::server::access::Role::Engine], 7, &[], None)
            .unwrap();
        let namespace = |number| config::Namespace { name: "prompts".into(), number };
        let opened = |number| {
            let access = Access { namespaces: vec![namespace(number)], ..Access::default() };
            Keeper::new(&access, dir.path(), None).map(drop).map_err(|error| error.to_string())
        };
        let refused = opened(7).unwrap_err();
        assert!(
            refused.contains("prompts") && refused.contains(token.split('_').nth(1).unwrap()),
            "{refused}"
        );
        assert_eq!(opened(8), Ok(()));
    }

    #[test]
    fn unknown_names_are_refused_at_the_start() {
        let access = Access { allow: vec![allow("no-such-user-here", "")], ..Access::default() };
        let error = Keeper::new(&access, Path::new("/nowhere"), None).err().unwrap().to_string();
        assert!(error.contains("access.allow") && error.contains("no-such-user-here"), "{error}");
    }
}
