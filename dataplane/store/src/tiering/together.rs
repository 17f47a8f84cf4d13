//! One load of a block for all callers that ask for it at the same time.

use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use super::Reach;
use super::onboard::{Onboarded, Read};
use kvasir_protocol::block::BlockKey;

/// The blocks that somebody is loading. A call that may ask peers finds more than one that may not: they share nothing.
#[derive(Default)]
pub(super) struct Together {
    pub(super) under_way: Mutex<HashMap<(BlockKey, Reach), Arc<Awaited>>>,
}

/// What a caller has to do about a block that it misses.
pub(super) enum Part {
    /// Load it, and tell the others.
    Lead(Lead),
    /// Wait until it is told.
    Follow(Arc<Awaited>),
    /// Nothing more.
    Done,
}

/// The duty to tell how a load ended. If dropped before, it tells that there is nothing.
pub(super) struct Lead {
    together: Arc<Together>,
    key: (BlockKey, Reach),
    awaited: Arc<Awaited>,
}

#[derive(Default)]
pub(super) struct Awaited {
    told: Mutex<Option<Told>>,
    changed: Condvar,
}

#[derive(Clone)]
enum Told {
    Block(Arc<Onboarded>),
    Missing,
    Throttled,
}

impl Together {
    pub(super) fn join(self: &Arc<Self>, keys: &[BlockKey], reach: Reach) -> Vec<Part> {
        let mut under_way = self.under_way.lock();
        let mut part = |&key| match under_way.entry((key, reach)) {
            Entry::Occupied(there) => Part::Follow(Arc::clone(there.get())),
            Entry::Vacant(place) => {
                let awaited = Arc::clone(place.insert(Arc::default()));
                Part::Lead(Lead { together: Arc::clone(self), key: (key, reach), awaited })
            }
        };
        keys.iter().map(&mut part).collect()
    }
}

impl Part {
    pub(super) fn is_lead(&self) -> bool {
        matches!(self, Self::Lead(_))
    }

    /// Tells the others what a leading caller has read, unless there is nothing yet and more tiers to ask.
    pub(super) fn tell_if_found(&mut self, read: &Read) {
        if let (Self::Lead(lead), Read::Onboarded(_) | Read::Throttled) = (&*self, read) {
            lead.awaited.tell(read);
            *self = Self::Done;
        }
    }
}

impl Awaited {
    fn tell(&self, read: &Read) {
        let told = match read {
            Read::Onboarded(block) => Told::Block(Arc::clone(block)),
            Read::Throttled => Told::Throttled,
            Read::Held(_) | Read::Missing => Told::Missing,
        };
        self.told.lock().get_or_insert(told);
        self.changed.notify_all();
    }

    /// The leading caller is bounded by the time that a lookup waits for each tier, and tells in any case.
    pub(super) fn wait(&self) -> Read {
        let mut told = self.told.lock();
        self.changed.wait_while(&mut told, |told| told.is_none());
        match told.clone() {
            Some(Told::Block(block)) => Read::Onboarded(block),
            Some(Told::Throttled) => Read::Throttled,
            Some(Told::Missing) | None => Read::Missing,
        }
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        self.together.under_way.lock().remove(&self.key);
        self.awaited.tell(&Read::Missing);
    }
}
