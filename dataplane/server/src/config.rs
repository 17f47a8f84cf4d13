//! Settings of the data server.

use std::time::Duration;

use kvasir_store::config::{ConfigError, at_least_one, positive};
use kvasir_store::units;
use serde::{Deserialize, Serialize};

/// Settings of the data server. A file has them in the section `[store]`, beside those of the pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServerConfig {
    /// The most data connections at once over the socket, and as many over TCP; the next is refused with an error.
    pub connections_max: u32,
    /// How long a data peer may stall in the middle of a frame, and take to say hello.
    #[serde(with = "units::span")]
    pub stall_timeout: Duration,
    /// How long a data connection may be silent between frames.
    #[serde(with = "units::span")]
    pub idle_timeout: Duration,
    /// The most payload in one put or get.
    #[serde(with = "units::size")]
    pub payload_max: u64,
    /// How often expired leases and abandoned reservations are collected.
    #[serde(skip)]
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

impl ServerConfig {
    /// # Errors
    /// The first setting that makes no sense, with its value.
    pub fn validate(&self) -> Result<(), ConfigError> {
        at_least_one(&[
            ("store.connections_max", self.connections_max.into()),
            ("store.payload_max", self.payload_max),
        ])?;
        positive(&[("store.stall_timeout", self.stall_timeout), ("store.idle_timeout", self.idle_timeout)])
    }
}
