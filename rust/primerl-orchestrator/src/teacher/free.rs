//! Waits for a free place.

use std::pin::pin;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::timeout;

/// Returns the result of `take`: tries again when something is `free`, and when nothing was for `pause`, after `idle`.
pub(super) async fn take<T>(
    free: &Notify,
    pause: Duration,
    mut take: impl FnMut() -> Option<T>,
    mut idle: impl FnMut(),
) -> T {
    loop {
        let mut told = pin!(free.notified());
        // Before it tries: if two places come free between that and the wait, two waiters are woken.
        told.as_mut().enable();
        if let Some(taken) = take() {
            return taken;
        }
        if timeout(pause, told).await.is_err() {
            idle();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::cell::Cell;

    const LONG: Duration = Duration::from_secs(3600);

    #[tokio::test]
    async fn two_waiters_both_get_the_places_that_come_free_meanwhile() {
        let (free, places) = (Notify::new(), Cell::new(0));
        let try_one = || {
            let left = places.get();
            (left > 0).then(|| places.set(left - 1))
        };
        let (first_tried, second_tried) = (Cell::new(false), Cell::new(false));
        let mut second = pin!(take(
            &free,
            LONG,
            || {
                if second_tried.replace(true) {
                    return try_one();
                }
                places.set(2);
                free.notify_one();
                free.notify_one();
                None
            },
            || panic!("is woken"),
        ));
        let first = take(
            &free,
            LONG,
            || {
                if first_tried.replace(true) {
                    return try_one();
                }
                // The other one tries at the same moment.
                assert!(second.as_mut().now_or_never().is_some());
                None
            },
            || panic!("is woken"),
        );
        let both = timeout(Duration::from_secs(20), first).await;
        assert!(both.is_ok(), "one was not woken");
        assert_eq!(places.get(), 0);
    }
}
