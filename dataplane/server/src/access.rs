//! The identity of a caller, and what it allows.
//!
//! Every connection gets one [`Identity`] before its first request is served: on a Unix socket from the credentials that the
//! kernel tells, over TCP from a token. Every operation needs one [`Role`]; [`required`] is the table for the data
//! protocol, and because it matches on [`Op`] without a default, an operation that is not in it does not compile.

use std::fmt;
use std::io;
use std::str::FromStr;

use kvasir_os::net::TcpStream;
use kvasir_protocol::block::BlockKey;
use kvasir_protocol::stream::Stream;
use kvasir_protocol::wire::Op;

/// What a caller may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Role {
    /// Store and read blocks, pin them within the tenant's quota, register as an instance.
    Engine = 1,
    /// Ask where requests go, say what became of them, look prefixes up.
    Router = 2,
    /// Read how the host is: metrics, lists, states.
    Observer = 4,
    /// Load policies and roll them back.
    Policy = 8,
    /// Everything: also drain, evict and remove.
    Operator = 16,
}

impl Role {
    pub const ALL: [Self; 5] = [Self::Engine, Self::Router, Self::Observer, Self::Policy, Self::Operator];

    pub fn name(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Router => "router",
            Self::Observer => "observer",
            Self::Policy => "policy",
            Self::Operator => "operator",
        }
    }
}

/// Text that names no role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a role; the roles are engine, router, observer, policy and operator")]
pub struct NotARole(String);

impl FromStr for Role {
    type Err = NotARole;

    fn from_str(text: &str) -> Result<Self, NotARole> {
        let named = Self::ALL.into_iter().find(|role| role.name() == text);
        named.ok_or_else(|| NotARole(text.chars().take(64).collect()))
    }
}

/// A set of roles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Roles(u8);

impl Roles {
    pub const OPERATOR: Self = Self(Role::Operator as u8);

    /// Whether it allows what takes `role`. An operator may do everything.
    pub fn allow(self, role: Role) -> bool {
        self.0 & (role as u8 | Role::Operator as u8) != 0
    }
}

impl FromIterator<Role> for Roles {
    fn from_iter<I: IntoIterator<Item = Role>>(roles: I) -> Self {
        Self(roles.into_iter().fold(0, |set, role| set | role as u8))
    }
}

impl fmt::Display for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = Role::ALL.into_iter().filter(|&role| self.0 & role as u8 != 0);
        let names: Vec<_> = held.map(Role::name).collect();
        f.write_str(&if names.is_empty() { "none".to_owned() } else { names.join(", ") })
    }
}

/// A caller whose statement about itself was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its name in logs and refusals: `user 1000`, `token 3f2a`.
    pub name: String,
    pub roles: Roles,
    /// The tenant it acts for. `None` means any that it names, which only a caller of the daemon's own user may.
    pub tenant: Option<u16>,
    /// Namespaces that it shares with other tenants, by their numbers, which no tenant has.
    pub shared: Vec<u16>,
    /// Whether, on this machine, it maps the pool, to read and fill blocks in place. The pool is one for all, so such a caller can
    /// read and change the bytes of every tenant. Others' blocks travel through their sockets.
    pub in_place: bool,
}

impl Identity {
    /// The key under which a call of this caller finds a block, whatever tenant the caller wrote into it. A caller that may
    /// name any tenant, and one that names a namespace it shares, is taken at its word.
    pub fn key(&self, key: BlockKey) -> BlockKey {
        match self.tenant {
            Some(own) if !self.shared.contains(&key.tenant()) => key.of_tenant(own),
            _ => key,
        }
    }

    /// The one tenant that it is for, if there is one. Tenant 0 is the host's own: its callers serve all tenants.
    pub fn only_tenant(&self) -> Option<u16> {
        self.tenant.filter(|&tenant| tenant != 0)
    }

    /// Whether it may hear that there is a block under this key.
    pub fn may_see(&self, key: BlockKey) -> bool {
        let whose = key.tenant();
        self.only_tenant().is_none_or(|own| whose == own || self.shared.contains(&whose))
    }

    /// # Errors
    /// The refusal says what `call` takes, what the caller has, and what to do.
    pub fn may(&self, role: Role, call: &str) -> Result<(), Refused> {
        if self.roles.allow(role) {
            return Ok(());
        }
        let (name, roles, role) = (&self.name, self.roles, role.name());
        Err(Refused(format!(
            "{name} may not call {call}: it takes role {role}, and the caller has: {roles}; use a token with that role \
             (`kvasir token new --role {role}`) or add the user under [[access.allow]]"
        )))
    }

    /// The tenant of a connection that asks to act for `wanted`.
    ///
    /// # Errors
    /// It may only act for another tenant.
    pub fn tenant_for(&self, wanted: u16) -> Result<u16, Refused> {
        match self.tenant {
            None => Ok(wanted),
            // A client that names no tenant says 0.
            Some(own) if wanted == 0 || wanted == own => Ok(own),
            Some(_) if self.shared.contains(&wanted) => Ok(wanted),
            Some(own) => Err(Refused(format!(
                "{} acts for tenant {own}, not for tenant {wanted}; leave the tenant out or use another token",
                self.name
            ))),
        }
    }
}

/// Why a caller is turned away, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// What a caller over TCP shows to say who it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shown {
    Token(String),
    /// In DER, over TLS; an authority that this host trusts has signed it.
    Certificate(Vec<u8>),
}

/// Something that changes the host for others.
#[derive(Clone, Copy, Debug)]
pub struct Act<'a> {
    pub who: &'a str,
    /// The call.
    pub what: &'a str,
    /// What it was done to, such as a slot or a block.
    pub on: &'a str,
    /// `unix`, or the address of the caller.
    pub from: &'a str,
    /// `done`, or why not.
    pub outcome: &'a str,
    /// The caller may not do that. Anybody can cause any number of these.
    pub refused: bool,
}

/// Decides which callers may come in.
pub trait Gate: Send + Sync {
    /// A process on this machine, by the user and group that the kernel says it has.
    ///
    /// # Errors
    /// No entry lets that user in.
    fn local(&self, uid: u32, gid: u32) -> Result<Identity, Refused>;

    /// A caller over TCP, by its token; an empty one is none.
    ///
    /// # Errors
    /// The token is missing, unknown, revoked or expired.
    fn bearer(&self, token: &str) -> Result<Identity, Refused>;

    /// A caller over TLS that shows no token, by its certificate in DER, which an authority that this host trusts has signed.
    ///
    /// # Errors
    /// No name in it is listed, or it has expired since.
    fn certified(&self, certificate: &[u8]) -> Result<Identity, Refused> {
        let _ = certificate;
        Err(Refused(NO_TOKEN.into()))
    }

    /// A caller over TCP, by what it shows.
    ///
    /// # Errors
    /// As [`bearer`](Self::bearer) and [`certified`](Self::certified).
    fn identify(&self, shown: &Shown) -> Result<Identity, Refused> {
        match shown {
            Shown::Token(token) => self.bearer(token),
            Shown::Certificate(certificate) => self.certified(certificate),
        }
    }

    /// An act was done or refused. A host that keeps an audit log writes it there.
    fn note(&self, act: &Act<'_>) {
        let _ = act;
    }

    /// A connection over TCP as this host wants it: encrypted or not. Nothing is exchanged yet.
    ///
    /// # Errors
    /// The system refuses it.
    fn dress(&self, stream: TcpStream) -> io::Result<Stream> {
        Ok(Stream::Tcp(stream))
    }
}

/// Lets in the user that this process runs as, root, who can become that user anyway, and callers with one fixed token.
#[derive(Clone, Debug, Default)]
pub struct OwnUser {
    /// `None` means that nobody comes in over TCP.
    pub token: Option<String>,
}

impl Gate for OwnUser {
    fn local(&self, uid: u32, _gid: u32) -> Result<Identity, Refused> {
        let own = rustix::process::geteuid().as_raw();
        if uid != own && uid != 0 {
            return Err(Refused(format!(
                "this host serves user {own} only, and the caller is user {uid}; run it as user {own}, or have \
                 its operator add the user under [[access.allow]]"
            )));
        }
        Ok(operator(format!("user {uid}")))
    }

    fn bearer(&self, token: &str) -> Result<Identity, Refused> {
        match &self.token {
            Some(own) if own == token => Ok(operator("the fixed token".into())),
            _ => Err(Refused(NO_TOKEN.into())),
        }
    }
}

fn operator(name: String) -> Identity {
    Identity { name, roles: Roles::OPERATOR, tenant: None, shared: Vec::new(), in_place: true }
}

/// The refusal for a caller without a good token.
pub const NO_TOKEN: &str = "a token is needed over TCP, and none that this host knows was given; make one on the host with \
     `kvasir token new --role ROLE` and pass it in KVASIR_TOKEN";

/// The role that an operation of the data protocol takes. `None` means that only hosts say it.
pub fn required(op: Op) -> Option<Role> {
    match op {
        Op::Error | Op::Refused => None,
        Op::Hello
        | Op::Exists
        | Op::Get
        | Op::Put
        | Op::Reserve
        | Op::Commit
        | Op::Abort
        | Op::Release
        | Op::Stat
        | Op::Verify
        | Op::Pin
        | Op::Unpin
        | Op::Hold
        | Op::EndHold
        | Op::Replicate
        | Op::HandOver
        | Op::LayerDone
        | Op::Finish
        | Op::DropHandOver
        | Op::Arrivals
        | Op::WaitArrival
        | Op::LeaveArrivals
        | Op::Place
        | Op::Removals => Some(Role::Engine),
        Op::Remove | Op::Evict => Some(Role::Operator),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use strum::VariantArray;

    fn identity(roles: &[Role], tenant: Option<u16>) -> Identity {
        let roles = roles.iter().copied().collect();
        Identity { name: "user 7".into(), roles, tenant, shared: vec![9], in_place: false }
    }

    #[test]
    fn each_role_allows_its_own_calls_and_an_operator_all() {
        for role in Role::ALL {
            for needed in Role::ALL {
                let allowed = identity(&[role], None).may(needed, "X").is_ok();
                assert_eq!(allowed, role == needed || role == Role::Operator, "{role:?} {needed:?}");
            }
            assert_eq!(role.name().parse(), Ok(role));
        }
        let refused = identity(&[Role::Router], None).may(Role::Policy, "Load").unwrap_err().to_string();
        assert!(refused.contains("takes role policy") && refused.contains("has: router"), "{refused}");
        assert!("boss".parse::<Role>().is_err());
    }

    #[test]
    fn removing_for_all_takes_an_operator_and_the_rest_an_engine() {
        for op in Op::VARIANTS.iter().copied() {
            let expected = match op.name() {
                "error" | "refused" => None,
                "remove" | "evict" => Some(Role::Operator),
                _ => Some(Role::Engine),
            };
            assert_eq!(required(op), expected, "{}", op.name());
        }
    }

    #[test]
    fn a_tenant_comes_from_the_identity() {
        assert_eq!(identity(&[], None).tenant_for(9), Ok(9));
        assert_eq!(identity(&[], Some(3)).tenant_for(0), Ok(3));
        assert_eq!(identity(&[], Some(3)).tenant_for(3), Ok(3));
        assert!(identity(&[], Some(3)).tenant_for(4).is_err());
        assert_eq!(identity(&[], Some(3)).tenant_for(9), Ok(9), "a namespace that it shares");
        let key = |tenant| BlockKey(7).of_tenant(tenant);
        let of = |own, named| identity(&[], own).key(key(named));
        assert_eq!([of(Some(3), 0), of(Some(3), 4), of(Some(3), 9)], [key(3), key(3), key(9)]);
        assert_eq!(of(None, 4), key(4));
    }

    #[test]
    fn only_the_own_user_and_the_token_are_let_in() {
        let own = rustix::process::geteuid().as_raw();
        let gate = OwnUser { token: Some("secret".into()) };
        assert!(gate.local(own, 0).is_ok() && gate.bearer("secret").is_ok());
        assert!(gate.local(own + 1, 0).is_err() && gate.bearer("").is_err() && gate.bearer("x").is_err());
        assert!(OwnUser::default().bearer("").is_err());
    }
}
