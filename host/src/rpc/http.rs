//! `/metrics`, `/livez`, `/readyz`.

use super::node::components;
use crate::host::Host;
use crate::metrics;
use axum::extract::{RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Extension, Router};
use kvasir_dataplane::server::access::{Identity, Role};
use std::fmt::Write;
use std::sync::Arc;

pub(super) fn pages(host: Arc<Host>) -> Router {
    Router::new()
        .route("/metrics", get(counts))
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .with_state(host)
}

async fn counts(State(host): State<Arc<Host>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], metrics::render(&host))
}

/// 200 when every component is ready, else 503; `?verbose` names them, and tells an observer more of each.
async fn readyz(
    State(host): State<Arc<Host>>,
    identity: Option<Extension<Identity>>,
    RawQuery(query): RawQuery,
) -> impl IntoResponse {
    let components = components(&host);
    let observes = identity.is_some_and(|Extension(identity)| identity.roles.allow(Role::Observer));
    let ready = components.iter().all(|c| c.ready);
    let mut text = String::new();
    if query
        .is_some_and(|query| query.split('&').any(|part| part == "verbose" || part.starts_with("verbose=")))
    {
        for c in &components {
            let _ = write!(text, "[{}] {}", if c.ready { '+' } else { '-' }, c.name);
            let _ = if observes { writeln!(text, ": {}", c.detail) } else { writeln!(text) };
        }
    }
    text += if ready { "ready\n" } else { "not ready\n" };
    (if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, text)
}
