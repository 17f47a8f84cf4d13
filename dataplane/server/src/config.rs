//! Settings of the data server.

use std::time::Duration;

/// Settings of the data server.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    /// The most connections at once, of each transport. Default 256; the next is refused with an error.
    pub connections_max: usize,
    /// How long a peer may stall in the middle of a frame, and take to say hello. Default 5 s.
    pub stall_timeout: Duration,
    /// How long a connection may be silent between frames. Default 10 min.
    pub idle_timeout: Duration,
    /// The most payload bytes in one frame, put or get. Default 256 MiB.
    pub payload_max: u64,
    /// How often expired leases and abandoned reservations are collected. Default 250 ms.
    pub sweep_every: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            connections_max: 256,
            stall_timeout: Duration::from_secs(5),
            idle_timeout: Duration::from_secs(600),
            payload_max: 256 << 20,
            sweep_every: Duration::from_millis(250),
        }
    }
}
