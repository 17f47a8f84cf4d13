//! Short questions to the host, from threads that must not wait: an engine's scheduler asks on every step.
//!
//! A question waits for at most its limit, connecting included. After one that failed the others fail at once, until it is time
//! to try again with a single one. So a host that is gone costs a scheduler microseconds a step, and one that hangs costs it one
//! limit a second.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvasir_client::data::{Client, ClientError, Reconnecting};
use kvasir_client::sync::{Condvar, Mutex};
use pyo3::prelude::*;

use crate::errors::{Refused, Unavailable, client_error};

/// Pause after a first failure; twice as long after each further one.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Limit for the host to let a client in. Another thread waits for that; the one that asks waits only as long as its question may take.
const CONNECT: Duration = Duration::from_secs(2);

pub(crate) struct Link {
    host: Reconnecting,
    limit: Duration,
    breaker: Mutex<Breaker>,
    connecting: Mutex<Connecting>,
    connected: Condvar,
}

#[derive(Default)]
struct Breaker {
    /// No question is asked before this. `None` while all goes well.
    until: Option<Instant>,
    pause: Duration,
    /// Why the last one failed, and whether the host itself refused.
    why: String,
    refused: bool,
    failed: u64,
    skipped: u64,
}

#[derive(Default)]
struct Connecting {
    under_way: bool,
    failed: Option<ClientError>,
}

/// Why a question has no answer.
enum Failure {
    Client(ClientError),
    StillConnecting,
    /// It was not asked.
    Open(PyErr),
}

impl Link {
    pub(crate) fn new(host: Reconnecting, limit: Duration) -> Arc<Self> {
        let (breaker, connecting, connected) = (Mutex::default(), Mutex::default(), Condvar::new());
        Arc::new(Self { host, limit, breaker, connecting, connected })
    }

    /// Asks `question`, which may be several calls: all of them within the limit. Call it without the GIL.
    pub(crate) fn ask<T>(
        self: &Arc<Self>,
        question: impl FnOnce(&Client) -> Result<T, ClientError>,
    ) -> PyResult<T> {
        self.answer(question).map_err(|(error, why)| {
            why.into_iter().for_each(|why| self.trip(why));
            error
        })
    }

    /// [`ask`](Self::ask) for what matters less: it is held up by earlier failures, and its own holds up no other question.
    pub(crate) fn ask_aside<T>(
        self: &Arc<Self>,
        question: impl FnOnce(&Client) -> Result<T, ClientError>,
    ) -> PyResult<T> {
        self.answer(question).map_err(|(error, _)| error)
    }

    /// The error, and why the next questions should not be asked, if it was asked itself.
    fn answer<T>(
        self: &Arc<Self>,
        question: impl FnOnce(&Client) -> Result<T, ClientError>,
    ) -> Result<T, (PyErr, Option<(String, bool)>)> {
        let until = Instant::now() + self.limit;
        let answer = self.admit().and_then(|()| self.client(until)).and_then(|client| {
            client.set_deadline(Some(until));
            question(&client).map_err(Failure::Client)
        });
        Err(match answer {
            Ok(answer) => {
                let mut breaker = self.breaker.lock();
                (breaker.until, breaker.pause) = (None, Duration::ZERO);
                return Ok(answer);
            }
            Err(Failure::Open(error)) => (error, None),
            Err(Failure::StillConnecting) => {
                let text = format!("the host did not let this client in within {:?}; ask later", self.limit);
                (Unavailable::new_err(text.clone()), Some((text, false)))
            }
            Err(Failure::Client(error)) => {
                let refused = matches!(error, ClientError::Refused { .. });
                (client_error(&error), Some((error.to_string(), refused)))
            }
        })
    }

    /// Questions that failed, and that were not asked because an earlier one had failed.
    pub(crate) fn failures(&self) -> (u64, u64) {
        let breaker = self.breaker.lock();
        (breaker.failed, breaker.skipped)
    }

    /// Closes it: nothing is asked any more.
    pub(crate) fn close(&self) {
        self.host.close();
    }

    fn admit(&self) -> Result<(), Failure> {
        let now = Instant::now();
        let mut breaker = self.breaker.lock();
        match breaker.until {
            Some(until) if now < until => {
                breaker.skipped += 1;
                let text = format!("not asked, as the last try failed just now: {}", breaker.why);
                let error = if breaker.refused { Refused::new_err(text) } else { Unavailable::new_err(text) };
                Err(Failure::Open(error))
            }
            // One caller tries; others that come meanwhile are told so.
            Some(_) => {
                breaker.until = Some(now + self.limit);
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn trip(&self, (why, refused): (String, bool)) {
        let mut breaker = self.breaker.lock();
        breaker.failed += 1;
        breaker.pause = (breaker.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
        breaker.until = Some(Instant::now() + breaker.pause);
        (breaker.why, breaker.refused) = (why, refused);
    }

    /// The connection. If there is none, another thread makes one, which is returned if it is there in time.
    fn client(self: &Arc<Self>, until: Instant) -> Result<Arc<Client>, Failure> {
        if let Some(client) = self.host.current() {
            return Ok(client);
        }
        let mut connecting = self.connecting.lock();
        if !connecting.under_way {
            connecting.failed = None;
            let this = Arc::clone(self);
            let connect = move || {
                let failed = this.host.client_within(CONNECT).err();
                *this.connecting.lock() = Connecting { under_way: false, failed };
                this.connected.notify_all();
            };
            // Without a thread there is no connection now; there may be one later.
            connecting.under_way =
                thread::Builder::new().name("kvasir-connect".into()).spawn(connect).is_ok();
        }
        while connecting.under_way {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::StillConnecting);
            }
            (connecting, _) = self.connected.wait_for(connecting, left);
        }
        match connecting.failed.take() {
            Some(error) => Err(Failure::Client(error)),
            None => self.host.current().ok_or(Failure::StillConnecting),
        }
    }
}
