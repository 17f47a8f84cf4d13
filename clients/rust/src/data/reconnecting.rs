//! A connection that is made anew after it broke.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::{Client, ClientError, Endpoint, Options};

/// Connections to one host, one at a time: the next begins when the last one broke.
///
/// A caller takes [`client`](Self::client) for what belongs together, and looks at [`Client::boot`] before it relies on what
/// it remembers from earlier. What an earlier connection was lent, or held, is void.
pub struct Reconnecting {
    endpoint: Endpoint,
    options: Options,
    current: Mutex<Option<Arc<Client>>>,
    closed: AtomicBool,
}

impl Reconnecting {
    /// Connects when it is first asked for a client, so the host need not run yet.
    pub fn new(endpoint: Endpoint, options: Options) -> Self {
        Self { endpoint, options, current: Mutex::new(None), closed: AtomicBool::new(false) }
    }

    /// The connection, made now if there is none or the last one broke. Every call tries once: how long to wait between
    /// tries is for the caller to say.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn client(&self) -> Result<Arc<Client>, ClientError> {
        self.client_within(self.options.timeout)
    }

    /// The connection, if there is one that works and none is being made. Never waits.
    pub fn current(&self) -> Option<Arc<Client>> {
        self.current.try_lock()?.clone().filter(|client| !client.is_over())
    }

    /// Ends the connection (see [`Client::hang_up`]) and makes no further one. One that is just being made is not waited for; it
    /// ends when it is there.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        if let Some(client) = self.current.try_lock().as_deref().and_then(Option::as_ref) {
            client.hang_up();
        }
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// [`client`](Self::client), without a longer wait than `limit` for the host to let one in.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn client_within(&self, limit: Duration) -> Result<Arc<Client>, ClientError> {
        let mut current = self.current.lock();
        let client = match current.take().filter(|client| !client.is_over()) {
            Some(client) => client,
            None if self.is_closed() => return Err(self.closed()),
            None => Arc::new(Client::connect_within(&self.endpoint, self.options.clone(), limit)?),
        };
        *current = Some(Arc::clone(&client));
        // Whoever closes this cannot hang up while the lock is held, so it looks for itself.
        if self.is_closed() {
            client.hang_up();
            return Err(self.closed());
        }
        Ok(client)
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    fn closed(&self) -> ClientError {
        ClientError::Closed { endpoint: self.endpoint.clone() }
    }
}
