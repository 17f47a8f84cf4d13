//! Stands before every gRPC call and HTTP page: who is it, may they, and a line in the audit log.

use super::audit::{Act, Audit};
use super::table::{self, Needs};
use crate::rpc::sealed::Caller;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use kvasir_dataplane::server::access::{Gate, Identity, Refused};
use std::net::SocketAddr;
use std::sync::Arc;
use tonic::transport::server::{TcpConnectInfo, UdsConnectInfo};

/// What the doors of one host share.
#[derive(Clone)]
pub struct Door {
    pub gate: Arc<dyn Gate>,
    pub audit: Arc<Audit>,
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

/// Lets a request through, or answers it with why not.
pub async fn guard(State(door): State<Door>, request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let from = origin(&request);
    let grpc = request
        .headers()
        .get("content-type")
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    let sealed = request.extensions().get::<Caller>();
    let identity = match door.admit(
        &path,
        from,
        bearer(&request),
        sealed.and_then(|caller| caller.certificate.as_deref()),
    ) {
        Ok(identity) => identity,
        Err(refused) => {
            door.note(&path, "unknown", from, &refused.to_string());
            return refusal(&refused, grpc);
        }
    };
    let who = identity.as_ref().map_or("anyone", |identity| &identity.name).to_owned();
    let mut request = request;
    if let Some(identity) = identity {
        request.extensions_mut().insert(identity);
    }
    let response = next.run(request).await;
    door.note(&path, &who, from, &outcome(&response));
    response
}

impl Door {
    /// Who calls `path`; `None` where that is not asked.
    fn admit(
        &self,
        path: &str,
        from: Option<From>,
        token: &str,
        certificate: Option<&[u8]>,
    ) -> Result<Option<Identity>, Refused> {
        let unknown = || Refused(format!("{path} is not a call of this host"));
        let needs = table::needs(path).ok_or_else(unknown)?;
        if needs == Needs::Nothing {
            return Ok(None);
        }
        let identity = match from {
            Some(From::Unix { uid, gid }) => self.gate.local(uid, gid),
            _ => match certificate.filter(|_| token.is_empty()) {
                Some(certificate) => self.gate.certified(certificate),
                None => self.gate.bearer(token),
            },
        }?;
        if let Needs::Role(role) = needs {
            identity.may(role, path)?;
        }
        Ok(Some(identity))
    }

    fn note(&self, path: &str, who: &str, from: Option<From>, outcome: &str) {
        if table::is_administrative(path) {
            let from = from.map_or("unknown".to_owned(), |from| from.to_string());
            self.audit.note(&Act { who, what: path, from: &from, outcome });
        }
    }
}

/// What the listener noted.
fn origin(request: &Request) -> Option<From> {
    let extensions = request.extensions();
    let unix = extensions.get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
    let unix = unix.map(|peer| From::Unix { uid: peer.uid(), gid: peer.gid() });
    let clear = extensions.get::<TcpConnectInfo>().and_then(TcpConnectInfo::remote_addr);
    let sealed = extensions.get::<Caller>().and_then(|caller| caller.addr);
    unix.or(clear.or(sealed).map(From::Tcp))
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

/// What a call's status says; of a gRPC call it is in the headers where nothing else is sent.
fn outcome(response: &Response) -> String {
    match response.headers().get("grpc-status").and_then(|code| code.to_str().ok()) {
        None | Some("0") if response.status().is_success() => "done".to_owned(),
        Some(code) => {
            let text = response.headers().get("grpc-message").and_then(|text| text.to_str().ok());
            format!("grpc status {code}: {}", text.unwrap_or_default())
        }
        None => response.status().to_string(),
    }
}
