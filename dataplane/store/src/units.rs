//! Sizes and times as people write them: `8GiB`, `200ms`. A setting that is a plain number of bytes or a [`Duration`] in code
//! names [`size`], [`size_if_any`] or [`span`] in its `#[serde(with)]`.

use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};
use std::fmt;
use std::time::Duration;

/// Bytes. Written as a number with a unit (`64MiB`, `1.5GiB`, `4096`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

/// A span of time. Written as numbers with units (`200ms`, `10s`, `1m 30s`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(pub Duration);

impl Size {
    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }
}

impl Span {
    pub const fn ms(count: u64) -> Self {
        Self(Duration::from_millis(count))
    }

    pub const fn secs(count: u64) -> Self {
        Self(Duration::from_secs(count))
    }
}

impl fmt::Display for Size {
    /// The largest binary unit that divides it, so that reading it back gives the same number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")] {
            if self.0 != 0 && self.0.trailing_zeros() >= shift {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        write!(f, "{}B", self.0)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_duration(self.0).fmt(f)
    }
}

/// Text that is no value of a kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    #[error("`{0}` is not a size; write it like `64MiB` or `8GiB`")]
    Size(String),
    #[error("`{0}` is not a time; write it like `200ms` or `10s`")]
    Span(String),
}

impl std::str::FromStr for Size {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let size = text.parse::<bytesize::ByteSize>().map_err(|_| UnitError::Size(text.to_owned()))?;
        Ok(Self(size.as_u64()))
    }
}

impl std::str::FromStr for Span {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        humantime::parse_duration(text).map(Self).map_err(|_| UnitError::Span(text.to_owned()))
    }
}

macro_rules! as_text {
    ($($unit:ty),*) => {$(
        impl Serialize for $unit {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $unit {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
            }
        }
    )*};
}

as_text!(Size, Span);

/// A module for `#[serde(with)]`: a value of type `$plain` is written as `$written`.
macro_rules! written {
    ($name:ident: $plain:ty as $written:ty, $write:expr, $read:expr) => {
        pub mod $name {
            use super::*;

            pub fn serialize<S: Serializer>(value: &$plain, serializer: S) -> Result<S::Ok, S::Error> {
                ($write)(*value).serialize(serializer)
            }

            pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<$plain, D::Error> {
                <$written>::deserialize(deserializer).map($read)
            }
        }
    };
}

written!(size: u64 as Size, Size, |size| size.0);
written!(size_if_any: Option<u64> as Option<Size>, |bytes: Option<u64>| bytes.map(Size), |size| size.map(|size| size.0));
written!(span: Duration as Span, Span, |span| span.0);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_read_back() {
        for (text, bytes) in
            [("8GiB", 8 << 30), ("1.5GiB", 3 << 29), ("4096", 4096), ("1 MB", 1_000_000), ("0B", 0)]
        {
            let size: Size = text.parse().unwrap();
            assert_eq!(size, Size(bytes), "{text}");
            assert_eq!(size.to_string().parse(), Ok(size));
        }
        for (text, ms) in [("200ms", 200), ("10s", 10_000), ("1m 30s", 90_000), ("0s", 0)] {
            let span: Span = text.parse().unwrap();
            assert_eq!(span, Span::ms(ms), "{text}");
            assert_eq!(span.to_string().parse(), Ok(span));
        }
        for bad in ["", "eight", "-1GiB", "8GiBs", "NaN"] {
            assert!(bad.parse::<Size>().is_err(), "{bad}");
        }
        for bad in ["", "5", "-1s", "5 parsecs"] {
            assert!(bad.parse::<Span>().is_err(), "{bad}");
        }
    }
}
