//! Hand-overs of one connection: those that its client makes, and those that it reads. They end with the connection.

use std::collections::{HashMap, VecDeque};

use super::Node;
use kvasir_cluster::handover::{self, Arrival, HandOverError, HandingOver, SourcePlace, Waited};
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::BlockMeta;
use kvasir_protocol::wire::{ArrivingBlock, HandOverCall, HandedPlace, Op, Outcome, Reply};
use kvasir_store::dram::OwnerId;

/// The most hand-overs that one connection makes, and reads, at once.
const OPEN_MAX: usize = 16;
/// The longest that a call waits; a client that wants to wait longer asks again.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// See the [module](self).
#[derive(Default)]
pub(super) struct HandOvers {
    making: HashMap<u64, HandingOver>,
    /// Reservations of those that broke off, until the client says that it has noticed and writes no more.
    broken: VecDeque<(u64, Vec<u64>)>,
    reading: HashMap<u64, Arrival>,
}

impl HandOvers {
    /// Called when the client is gone: gives everything back. Call it before the client's reservations are taken back, because
    /// some of them may be on their way to a peer.
    pub(super) fn end(&mut self) {
        self.making.clear();
        self.broken.clear();
        self.reading.clear();
    }

    /// `tenant` is the one for which the connection acts.
    pub(super) fn serve(&mut self, node: &Node, owner: OwnerId, tenant: u16, call: HandOverCall) -> Reply {
        let done = |op| move |()| Reply::Outcomes(op, vec![Outcome::Done]);
        let reply = match call {
            HandOverCall::Begin { request, layers, peer, blocks } => {
                self.begin(node, owner, request, layers, &peer, &blocks)
            }
            HandOverCall::LayerDone { request, layer } => {
                self.step(request, |handing| handing.layer_done(layer)).map(done(Op::LayerDone))
            }
            HandOverCall::Finish { request, checksums } => {
                let finished = self.step(request, |handing| handing.finish(&checksums));
                finished.map(|()| drop(self.making.remove(&request))).map(done(Op::Finish))
            }
            HandOverCall::Drop { request } => {
                let dropped = self.drop_handing(node, owner, request);
                dropped.map(done(Op::DropHandOver))
            }
            HandOverCall::Arrivals { request, wait_ms } => Ok(self.arrivals(node, tenant, request, wait_ms)),
            HandOverCall::Wait { request, layer, wait_ms } => Ok(self.wait(request, layer, wait_ms)),
            HandOverCall::Leave { request } => {
                self.reading.remove(&request);
                Ok(done(Op::LeaveArrivals)(()))
            }
        };
        reply.unwrap_or_else(|error| refused(error.retryable(), error.to_string()))
    }

    fn begin(
        &mut self,
        node: &Node,
        owner: OwnerId,
        request: u64,
        layers: u32,
        peer: &str,
        blocks: &[BlockMeta],
    ) -> Result<Reply, HandOverError> {
        if self.making.contains_key(&request) {
            return Err(HandOverError::Twice { request });
        }
        if self.making.len() >= OPEN_MAX {
            return Err(HandOverError::TooMany);
        }
        let handing = node.hand_over(owner, request, peer, blocks, layers)?;
        let time_ms = left_ms(handing.until());
        let place = |SourcePlace { offset, to_fill }| HandedPlace { offset, to_fill };
        let places = handing.places().into_iter().map(place).collect();
        self.making.insert(request, handing);
        Ok(Reply::HandOver { time_ms, places })
    }

    /// Goes on with a hand-over. If this ends it, it is dropped.
    fn step(
        &mut self,
        request: u64,
        step: impl FnOnce(&mut HandingOver) -> Result<(), HandOverError>,
    ) -> Result<(), HandOverError> {
        let handing = self.making.get_mut(&request).ok_or(HandOverError::Unknown { request })?;
        step(handing).inspect_err(|error| {
            if error.is_end()
                && let Some(handing) = self.making.remove(&request)
            {
                if self.broken.len() == OPEN_MAX {
                    // Its places stay away from others until the connection ends.
                    self.broken.pop_front();
                }
                self.broken.push_back((request, handing.reservations()));
            }
        })
    }

    /// The client gives a hand-over up, and no longer writes to its places.
    fn drop_handing(&mut self, node: &Node, owner: OwnerId, request: u64) -> Result<(), HandOverError> {
        let broken = self.broken.iter().position(|(of, _)| *of == request);
        let reservations = match broken.and_then(|at| self.broken.remove(at)) {
            Some((_, reservations)) => reservations,
            // Gives its places back, which takes the peer's answer, before they are aborted.
            None => self.making.remove(&request).ok_or(HandOverError::Unknown { request })?.reservations(),
        };
        let _ = node.abort(owner, &reservations);
        Ok(())
    }

    fn arrivals(&mut self, node: &Node, tenant: u16, request: u64, wait_ms: u32) -> Reply {
        if !self.reading.contains_key(&request) && self.reading.len() >= OPEN_MAX {
            let text =
                format!("this connection reads {OPEN_MAX} hand-overs, the most at once; leave one first");
            return refused(true, text);
        }
        match node.arrival(tenant, request, until(wait_ms)) {
            None => refused(false, HandOverError::Alone.to_string()),
            Some(Err(reason)) => refused(true, broken(request, &reason)),
            Some(Ok(None)) => Reply::Arrivals { time_ms: 0, layers: 0, blocks: Vec::new() },
            Some(Ok(Some(arrival))) => {
                let block = |&handover::ArrivingBlock { key, size, offset }| ArrivingBlock {
                    key: key.without_tenant(),
                    size,
                    offset,
                };
                let blocks = arrival.blocks().iter().map(block).collect();
                let (time_ms, layers) = (left_ms(arrival.until()), arrival.layers());
                self.reading.insert(request, arrival);
                Reply::Arrivals { time_ms, layers, blocks }
            }
        }
    }

    fn wait(&mut self, request: u64, layer: Option<u32>, wait_ms: u32) -> Reply {
        let Some(arrival) = self.reading.get(&request) else {
            return refused(false, format!("arrivals of request {request} are not read on this connection"));
        };
        let layers = arrival.layers();
        if let Some(layer) = layer.filter(|layer| *layer >= layers) {
            return refused(false, HandOverError::NoLayer { layer, layers }.to_string());
        }
        let outcome = match arrival.wait(layer, until(wait_ms)) {
            Waited::Here => Outcome::Done,
            Waited::NotYet => Outcome::InProgress,
            Waited::Failed(reason) => return refused(true, broken(request, &reason)),
        };
        Reply::Outcomes(Op::WaitArrival, vec![outcome])
    }
}

fn refused(retryable: bool, message: String) -> Reply {
    Reply::Refused { retryable, message }
}

fn broken(request: u64, reason: &str) -> String {
    format!("the hand-over of request {request} broke off: {reason}; have it begun again")
}

fn until(wait_ms: u32) -> Instant {
    Instant::now() + Duration::from_millis(wait_ms.into()).min(WAIT_MAX)
}

fn left_ms(until: Instant) -> u64 {
    until.saturating_duration_since(Instant::now()).as_millis() as u64
}
