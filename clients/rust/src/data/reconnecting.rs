//! A connection that is made again after it broke.

use std::sync::Arc;

use kvasir_os::time::Duration;

use super::{Client, ClientError, Endpoint, Options};
use crate::sync::Mutex;

/// Connections to one host, one at a time: the next begins when the last one broke.
///
/// A caller takes [`client`](Self::client) for what belongs together, and looks at [`Client::boot`] before it relies on what
/// it remembers from earlier. What an earlier connection was lent, or held, is void.
pub struct Reconnecting {
    endpoint: Endpoint,
    options: Options,
    /// Held while a connection is made.
    connecting: Mutex<()>,
    /// Never held while anything is waited for.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    current: Option<Arc<Client>>,
    closed: bool,
}

impl Reconnecting {
    /// Connects when it is first asked for a client, so the host need not run yet.
    pub fn new(endpoint: Endpoint, options: Options) -> Self {
        Self { endpoint, options, connecting: Mutex::default(), state: Mutex::default() }
    }

    /// The connection, made now if there is none or the last one broke. Every call tries once: how long to wait between
    /// tries is for the caller to say.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn client(&self) -> Result<Arc<Client>, ClientError> {
        self.client_within(self.options.timeout)
    }

    /// The connection, if there is one that works. Never waits.
    pub fn current(&self) -> Option<Arc<Client>> {
        let current = self.state.lock().current.clone();
        current.filter(|client| !client.is_over())
    }

    /// Ends the connection (see [`Client::hang_up`]) and makes no further one. One that is just being made is not waited for; it
    /// ends when it is there.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let last = state.current.take();
        drop(state);
        if let Some(client) = last {
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
        let _one_at_a_time = self.connecting.lock();
        if let Some(client) = self.current() {
            return Ok(client);
        }
        if self.state.lock().closed {
            return Err(self.closed());
        }
        let client = Arc::new(Client::connect_within(&self.endpoint, self.options.clone(), limit)?);
        let mut state = self.state.lock();
        // A caller that closed this meanwhile saw no connection to end.
        if state.closed {
            return Err(self.closed());
        }
        let _last = state.current.replace(Arc::clone(&client));
        drop(state);
        Ok(client)
    }

    fn closed(&self) -> ClientError {
        ClientError::Closed { endpoint: self.endpoint.clone() }
    }
}
