//! Where a host listens, as people write it.

use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};
use std::fmt;
use std::net::SocketAddr;

/// Where to listen, if anywhere. Written as `ADDRESS:PORT`. Empty means nowhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Door(pub Option<SocketAddr>);

impl fmt::Display for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |addr| addr.fmt(f))
    }
}

impl Serialize for Door {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Door {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if text.is_empty() {
            return Ok(Self(None));
        }
        let wrong =
            |_| D::Error::custom(format!("{text:?} is no socket address; write ADDRESS:PORT, or nothing"));
        text.parse().map(|addr| Self(Some(addr))).map_err(wrong)
    }
}
