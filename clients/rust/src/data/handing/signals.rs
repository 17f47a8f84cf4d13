//! What an engine says to a job while it runs.

use std::collections::VecDeque;
use std::sync::Arc;

use kvasir_os::time::Instant;

use super::HandingError;
use crate::data::Reconnecting;
use crate::sync::{Condvar, Mutex};

/// The signals of one job.
pub(super) struct Signals {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Layers whose bytes are final and that nobody has sent yet.
    ready: VecDeque<u32>,
    /// For each layer, whether a caller said that it is ready.
    said: Vec<bool>,
    /// Why it must end.
    end: Option<HandingError>,
    /// The connection on which it runs.
    link: Option<Arc<Reconnecting>>,
}

/// What a sender must do next.
pub(super) enum Next {
    Layer(u32),
    /// There was nothing until the given time.
    Nothing,
}

impl Signals {
    /// `layers` is how many layers can be said to be ready.
    pub(super) fn new(layers: u32) -> Self {
        let (ready, said) = (VecDeque::new(), vec![false; layers as usize]);
        Self { state: Mutex::new(State { ready, said, end: None, link: None }), changed: Condvar::new() }
    }

    /// Returns false if that is no news.
    pub(super) fn ready(&self, layer: u32) -> bool {
        let mut state = self.state.lock();
        let said = state.said.get_mut(layer as usize).map(|said| std::mem::replace(said, true));
        if said != Some(false) || state.end.is_some() {
            return false;
        }
        state.ready.push_back(layer);
        self.changed.notify_one();
        true
    }

    /// The job must end. One that receives waits at the host and does nothing else that matters, so its connection ends with it;
    /// one that sends is between two calls, or in one that ends soon, and tells the host that it writes no more.
    pub(super) fn end(&self, why: &HandingError) {
        let mut state = self.state.lock();
        state.end.get_or_insert_with(|| why.clone());
        self.changed.notify_one();
        let hangs_up = state.said.is_empty() || *why == HandingError::Closed;
        if let Some(client) = state.link.as_ref().filter(|_| hangs_up).and_then(|link| link.current()) {
            client.hang_up();
        }
    }

    /// # Errors
    /// It must end.
    pub(super) fn check(&self) -> Result<(), HandingError> {
        self.state.lock().end.clone().map_or(Ok(()), Err)
    }

    /// Notes that it runs on this connection from now on.
    pub(super) fn begin(&self, link: &Arc<Reconnecting>) {
        self.state.lock().link = Some(Arc::clone(link));
    }

    /// Notes that it runs no more. It must not end the next job on the connection.
    pub(super) fn leave(&self) {
        self.state.lock().link = None;
    }

    /// Waits for a layer that is ready, until `until`; not at all if that is `None`.
    ///
    /// # Errors
    /// It must end.
    pub(super) fn next(&self, until: Option<Instant>) -> Result<Next, HandingError> {
        let mut state = self.state.lock();
        loop {
            if let Some(end) = &state.end {
                return Err(end.clone());
            }
            if let Some(layer) = state.ready.pop_front() {
                return Ok(Next::Layer(layer));
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            match left.filter(|left| !left.is_zero()) {
                Some(left) => (state, _) = self.changed.wait_for(state, left),
                None => return Ok(Next::Nothing),
            }
        }
    }
}
