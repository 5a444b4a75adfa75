//! Whether the owner moves: its event loop reports so about once a second, and a watcher thread reports where it is
//! held up.

use parking_lot::Mutex;
use primerl_core::RolloutId;
use primerl_core::event::BLOCKED_AFTER;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// An owner that has not moved for this long is still held up by what it was given up for.
const HELD_UP: Duration = Duration::from_secs(2);

pub(super) struct Pulse {
    /// Written by the owner's threads, read by the heartbeats; held for a moment.
    beat: Mutex<Beat>,
    /// There is something to report before the next heartbeat is due.
    changed: Notify,
}

struct Beat {
    turned: Instant,
    held: Held,
}

/// Where the owner is held up, and by which rollout, as far as that is known.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Held {
    pub at: Option<String>,
    pub by: Option<RolloutId>,
}

impl Pulse {
    /// Counts from the start: an owner that never reaches its first turn is held up as well.
    pub fn new() -> Pulse {
        Pulse {
            beat: Mutex::new(Beat {
                turned: Instant::now(),
                held: Held::default(),
            }),
            changed: Notify::new(),
        }
    }

    pub fn turned(&self) {
        let mut beat = self.beat.lock();
        let was_blocked = beat.turned.elapsed() >= Duration::from(BLOCKED_AFTER);
        *beat = Beat {
            turned: Instant::now(),
            held: Held::default(),
        };
        drop(beat);
        if was_blocked {
            self.changed.notify_one();
        }
    }

    pub fn held(&self, held: Held) {
        let is_news = std::mem::replace(&mut self.beat.lock().held, held.clone()) != held;
        if is_news {
            self.changed.notify_one();
        }
    }

    /// Since when it has not moved, and the cause if it is known.
    pub fn feel(&self) -> (Duration, Held) {
        let beat = self.beat.lock();
        (beat.turned.elapsed(), beat.held.clone())
    }

    pub fn is_held_up(&self) -> bool {
        self.feel().0 >= HELD_UP
    }

    /// Time until the next heartbeat: `interval`, or less if there is news, or if the owner is about to count as
    /// blocked.
    pub async fn pause(&self, interval: Duration) {
        let left = Duration::from(BLOCKED_AFTER).checked_sub(self.feel().0);
        let left = left.filter(|left| !left.is_zero());
        let pause = left.map_or(interval, |left| interval.min(left));
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = self.changed.notified() => {}
        }
    }
}
