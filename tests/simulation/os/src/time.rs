//! Virtual time. It begins at 0, and a look at the clock takes a microsecond, so that a thread which polls gets somewhere.

use std::ops::{Add, AddAssign, Sub};

pub use std::time::Duration;

use crate::schedule;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(Duration);

impl Instant {
    pub fn now() -> Self {
        Self(Duration::from_nanos(schedule::look_at_clock()))
    }

    pub fn elapsed(&self) -> Duration {
        Self::now().duration_since(*self)
    }

    pub fn duration_since(&self, earlier: Self) -> Duration {
        self.saturating_duration_since(earlier)
    }

    pub fn saturating_duration_since(&self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    pub fn checked_duration_since(&self, earlier: Self) -> Option<Duration> {
        self.0.checked_sub(earlier.0)
    }

    pub fn checked_add(&self, time: Duration) -> Option<Self> {
        self.0.checked_add(time).map(Self)
    }

    pub fn checked_sub(&self, time: Duration) -> Option<Self> {
        self.0.checked_sub(time).map(Self)
    }

    pub(crate) fn nanos(self) -> u64 {
        self.0.as_nanos() as u64
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, time: Duration) -> Self {
        Self(self.0.saturating_add(time))
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, time: Duration) {
        *self = *self + time;
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;

    fn sub(self, time: Duration) -> Self {
        Self(self.0 - time)
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        self.duration_since(earlier)
    }
}

/// The clock on the wall. In half of all worlds each machine has one of its own, and they differ by up to 50 minutes;
/// and it may be set ([`set_clock`](crate::world::set_clock)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SystemTime(Duration);

pub const UNIX_EPOCH: SystemTime = SystemTime(Duration::ZERO);
/// When every world begins.
const BEGIN: Duration = Duration::from_secs(1_800_000_000);

impl SystemTime {
    pub fn now() -> Self {
        Self(BEGIN + schedule::clock_of_machine() + Instant::now().0)
    }

    /// # Errors
    /// It is later.
    pub fn duration_since(&self, earlier: Self) -> Result<Duration, Duration> {
        self.0.checked_sub(earlier.0).ok_or_else(|| earlier.0 - self.0)
    }
}
