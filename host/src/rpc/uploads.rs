//! Calls that carry a component. Each must be in memory as a whole before anything can look at it, so few are let in at once.

use crate::policy::{Error, LOADS_MAX};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tonic::Status;

const CALLS: [&str; 2] = ["/kvasir.v1.PolicyAdmin/Load", "/kvasir.v1.PolicyRollouts/Start"];

/// Places for such calls, over all ports of a host.
#[derive(Clone)]
pub(super) struct Uploads(Arc<Semaphore>);

impl Default for Uploads {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(LOADS_MAX)))
    }
}

/// Answers a call that finds no place, before its message is read. A place is free again when the call is answered, or its
/// caller is gone.
pub(super) async fn few(State(uploads): State<Uploads>, request: Request, next: Next) -> Response {
    if !CALLS.contains(&request.uri().path()) {
        return next.run(request).await;
    }
    let Ok(_place) = uploads.0.try_acquire() else {
        return Status::resource_exhausted(Error::Busy { limit: LOADS_MAX }.to_string()).into_http();
    };
    next.run(request).await
}
