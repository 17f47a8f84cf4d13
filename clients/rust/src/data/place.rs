//! Which host a put should go to.

use kvasir_protocol::wire::{Op, Reply, Request};

use super::{Client, ClientError, Endpoint, wrong};

/// The host that should take a put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its name; empty if the host that was asked knows no others.
    pub node: String,
    /// Where it takes puts; `None` means the host that was asked.
    pub endpoint: Option<Endpoint>,
}

impl Client {
    /// Asks the host which one should take `bytes` of blocks that `copies` hosts must hold: itself, unless it is
    /// short of space or clearly busier, and another one is not. The answer is a few hundred milliseconds old.
    pub fn place(&self, bytes: u64, copies: u8) -> Result<Place, ClientError> {
        match self.call(&Request::Place { bytes, copies })? {
            Reply::Place { node, data } => {
                let endpoint = if data.is_empty() { None } else { Some(data.parse()?) };
                Ok(Place { node, endpoint })
            }
            other => Err(wrong(&self.endpoint, Op::Place, other)),
        }
    }

    /// A client of the host that should take such a put: this one, or a new one with the same options. If that host
    /// cannot be reached from here, this one.
    pub fn primary(self, bytes: u64, copies: u8) -> Result<(Self, Place), ClientError> {
        let place = self.place(bytes, copies)?;
        let Some(endpoint) = &place.endpoint else { return Ok((self, place)) };
        match Self::connect(endpoint, self.options.clone()) {
            Ok(other) => Ok((other, place)),
            Err(_) => Ok((self, Place { endpoint: None, ..place })),
        }
    }
}
