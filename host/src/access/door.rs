//! Stands before every gRPC call and HTTP page: asks who the caller is and whether it may, and writes the audit log.

use super::table::{self, Needs};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use kvasir_dataplane::server::access::{Act, Gate, Identity, Refused, Shown};
use parking_lot::Mutex;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What the doors of one host share.
#[derive(Clone)]
pub struct Door {
    pub gate: Arc<dyn Gate>,
}

/// What a call is about, for the audit log: its handler says so.
#[derive(Clone, Default)]
pub struct About(Arc<Mutex<String>>);

impl About {
    /// The caller of a request that came through [`guard`].
    pub fn of<T>(request: &tonic::Request<T>) -> Self {
        request.extensions().get::<Self>().cloned().unwrap_or_default()
    }

    pub fn set(&self, what: String) {
        *self.0.lock() = what;
    }
}

/// Where a call came from.
#[derive(Clone, Copy, Debug)]
pub enum From {
    /// User and group, by the kernel's word.
    Unix {
        uid: u32,
        gid: u32,
    },
    Tcp(SocketAddr),
}

impl std::fmt::Display for From {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix { .. } => f.write_str("unix"),
            Self::Tcp(addr) => addr.fmt(f),
        }
    }
}

/// The caller at the other end of a connection.
#[derive(Clone, Debug)]
pub struct Caller {
    pub from: Option<From>,
    /// In DER; one of an authority that the host trusts.
    pub certificate: Option<Vec<u8>>,
    /// Set once it has made a call that it may make: then nobody takes its place.
    pub known: Arc<AtomicBool>,
}

impl Caller {
    fn make_known(&self) {
        self.known.store(true, Ordering::Relaxed);
    }
}

/// Lets a request through, or answers it with why not.
pub async fn guard(State(door): State<Door>, request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let caller = request.extensions().get::<Caller>().cloned();
    let from = caller.as_ref().and_then(|caller| caller.from);
    let grpc = request
        .headers()
        .get("content-type")
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    let certificate = caller.as_ref().and_then(|caller| caller.certificate.as_deref());
    let about = About::default();
    let note = |who: &str, outcome: &str, refused| {
        if table::is_administrative(&path) {
            let from = from.map_or("unknown".to_owned(), |from| from.to_string());
            let (what, on) = (path.as_str(), about.0.lock());
            door.gate.note(&Act { who, what, on: &on, from: &from, outcome, refused });
        }
    };
    let identity = match door.identify(&path, from, bearer(&request), certificate) {
        Ok(identity) => identity,
        Err(refused) => {
            note("unknown", &refused.to_string(), true);
            return refusal(&refused, grpc);
        }
    };
    let who = identity.as_ref().map_or("anyone", |identity| &identity.name).to_owned();
    let mut request = request;
    if let Some(identity) = identity {
        if let Err(refused) = may(&identity, &path) {
            note(&who, &refused.to_string(), true);
            return refusal(&refused, grpc);
        }
        if let Some(caller) = &caller {
            caller.make_known();
        }
        request.extensions_mut().insert(identity);
    }
    request.extensions_mut().insert(about.clone());
    let response = next.run(request).await;
    note(&who, &outcome(&response), false);
    response
}

impl Door {
    /// The identity of the caller of `path`. `None` means an unknown caller, where the path lets one in.
    fn identify(
        &self,
        path: &str,
        from: Option<From>,
        token: &str,
        certificate: Option<&[u8]>,
    ) -> Result<Option<Identity>, Refused> {
        let unknown = || Refused(format!("{path} is not a call of this host"));
        let needs = table::needs(path).ok_or_else(unknown)?;
        let shows_nothing =
            token.is_empty() && certificate.is_none() && !matches!(from, Some(From::Unix { .. }));
        if needs == Needs::Nothing && shows_nothing {
            // A probe: no token is looked for.
            return Ok(None);
        }
        match (needs, self.who(from, token, certificate)) {
            (Needs::Nothing, known) => Ok(known.ok()),
            (_, known) => known.map(Some),
        }
    }

    fn who(&self, from: Option<From>, token: &str, certificate: Option<&[u8]>) -> Result<Identity, Refused> {
        if let Some(From::Unix { uid, gid }) = from {
            return self.gate.local(uid, gid);
        }
        let certificate = certificate.filter(|_| token.is_empty());
        let shown = certificate
            .map_or_else(|| Shown::Token(token.to_owned()), |shown| Shown::Certificate(shown.to_owned()));
        self.gate.identify(&shown)
    }
}

fn may(identity: &Identity, path: &str) -> Result<(), Refused> {
    match table::needs(path) {
        Some(Needs::Role(role)) => identity.may(role, path),
        _ => Ok(()),
    }
}

fn bearer(request: &Request) -> &str {
    let header = request.headers().get("authorization").and_then(|value| value.to_str().ok());
    header.and_then(|text| text.strip_prefix("Bearer ")).unwrap_or_default().trim()
}

fn refusal(refused: &Refused, grpc: bool) -> Response {
    if grpc {
        return tonic::Status::permission_denied(refused.to_string()).into_http();
    }
    (axum::http::StatusCode::FORBIDDEN, format!("{refused}\n")).into_response()
}

/// What a call's status says. A gRPC call has it in the headers if nothing else is sent.
fn outcome(response: &Response) -> String {
    match tonic::Status::from_header_map(response.headers()) {
        Some(status) if status.code() != tonic::Code::Ok => {
            format!("grpc status {}: {}", status.code() as i32, status.message())
        }
        _ if response.status().is_success() => "done".to_owned(),
        _ => response.status().to_string(),
    }
}
