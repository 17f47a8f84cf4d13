//! A connection that is made anew after it broke.

use std::sync::Arc;
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
}

impl Reconnecting {
    /// Connects when it is first asked for a client, so the host need not run yet.
    pub fn new(endpoint: Endpoint, options: Options) -> Self {
        Self { endpoint, options, current: Mutex::new(None) }
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

    /// Ends the connection, if there is one and none is being made: see [`Client::hang_up`].
    pub fn hang_up(&self) {
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
        match current.take().filter(|client| !client.is_over()) {
            Some(client) => Ok(Arc::clone(current.insert(client))),
            None => {
                let client = Client::connect_within(&self.endpoint, self.options.clone(), limit)?;
                Ok(Arc::clone(current.insert(Arc::new(client))))
            }
        }
    }
}
