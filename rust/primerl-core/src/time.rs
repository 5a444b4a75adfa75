//! Time as the core sees it: microseconds since the shell started, passed in with every event.

use serde::{Deserialize, Serialize};
use std::ops::{Add, Sub};

/// A span, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Duration(pub u64);

impl Duration {
    pub const fn from_secs(secs: u64) -> Self {
        Duration(secs * 1_000_000)
    }

    pub fn from_secs_f64(secs: f64) -> Self {
        Duration((secs.max(0.0) * 1e6) as u64)
    }

    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e6
    }
}

impl From<Duration> for std::time::Duration {
    fn from(span: Duration) -> Self {
        std::time::Duration::from_micros(span.0)
    }
}

/// A point in time, in microseconds since an origin the shell chose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Time(pub u64);

impl Time {
    /// Time passed since `earlier`; zero if `earlier` is later.
    pub fn since(self, earlier: Time) -> Duration {
        Duration(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Time;
    fn add(self, span: Duration) -> Time {
        Time(self.0.saturating_add(span.0))
    }
}

impl Sub<Duration> for Time {
    type Output = Time;
    fn sub(self, span: Duration) -> Time {
        Time(self.0.saturating_sub(span.0))
    }
}
