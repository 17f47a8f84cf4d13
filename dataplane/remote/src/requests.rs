//! Requests to the remote store, with a bound on how many run at once and on how often each is tried.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Semaphore, watch};

use super::config::RemoteConfig;
use kvasir_store::store::Cancelled;

/// Bounds and counts requests.
pub(super) struct Requests {
    permits: Semaphore,
    attempts_max: u32,
    backoff: Duration,
    backoff_max: Duration,
    attempt_timeout: Duration,
    retries: AtomicU64,
    /// Set once the tier closes: requests under way end, no others begin.
    closed: watch::Sender<bool>,
}

/// How a request that brought nothing ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Failure {
    NotFound,
    /// It ended before the first attempt.
    Cancelled,
    Closed,
    /// There is no space left where the objects are.
    NoSpace,
    Failed {
        attempts: u32,
        reason: String,
        retryable: bool,
    },
}

impl Requests {
    pub(super) fn new(config: &RemoteConfig) -> Self {
        Self {
            permits: Semaphore::new(config.requests_max),
            attempts_max: config.attempts_max,
            backoff: config.backoff,
            backoff_max: config.backoff_max,
            attempt_timeout: config.attempt_timeout,
            retries: AtomicU64::new(0),
            closed: watch::Sender::new(false),
        }
    }

    /// Attempts beyond the first, of all requests.
    pub(super) fn retries(&self) -> u64 {
        self.retries.load(Ordering::Relaxed)
    }

    pub(super) fn close(&self) {
        self.closed.send_replace(true);
    }

    /// Makes a request until it succeeds, fails for good, or was made as often as allowed.
    pub(super) async fn run<T, F>(&self, cancelled: &Cancelled, request: impl Fn() -> F) -> Result<T, Failure>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let mut attempts = 0;
        loop {
            let result = {
                let permit = self.permits.acquire().await;
                if permit.is_err() || *self.closed.borrow() {
                    return Err(Failure::Closed);
                }
                if attempts == 0 && cancelled.is_set() {
                    return Err(Failure::Cancelled);
                }
                attempts += 1;
                tokio::time::timeout(self.attempt_timeout, request()).await
            };
            let failure = match result {
                Ok(Ok(found)) => return Ok(found),
                Ok(Err(error)) => judge(&error, attempts),
                Err(_) => {
                    let reason = format!("no answer within {:?}", self.attempt_timeout);
                    Failure::Failed { attempts, reason, retryable: true }
                }
            };
            let hopeless = !matches!(failure, Failure::Failed { retryable: true, .. });
            if hopeless || attempts >= self.attempts_max || cancelled.is_set() {
                return Err(failure);
            }
            self.retries.fetch_add(1, Ordering::Relaxed);
            self.pause(attempts).await;
        }
    }

    /// Waits before the next attempt, or until the tier closes.
    async fn pause(&self, attempts: u32) {
        let mut closed = self.closed.subscribe();
        let factor = 1u32.checked_shl(attempts - 1).unwrap_or(u32::MAX);
        let pause = self.backoff.saturating_mul(factor).min(self.backoff_max);
        // An error means that the sender is gone, which counts as closed.
        let _ = tokio::time::timeout(pause, closed.wait_for(|&closed| closed)).await;
    }
}

fn judge(error: &object_store::Error, attempts: u32) -> Failure {
    use object_store::Error::{Generic, JoinError, NotFound};
    let mut chain = std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    let no_space = |error: &std::io::Error| error.kind() == std::io::ErrorKind::StorageFull;
    if chain.any(|error| error.downcast_ref().is_some_and(no_space)) {
        return Failure::NoSpace;
    }
    match error {
        NotFound { .. } => Failure::NotFound,
        // Connections that break, and servers that are busy. Some refusals hide here as well; a few attempts more are
        // what that costs.
        Generic { .. } | JoinError { .. } => {
            Failure::Failed { attempts, reason: error.to_string(), retryable: true }
        }
        _ => Failure::Failed { attempts, reason: error.to_string(), retryable: false },
    }
}
