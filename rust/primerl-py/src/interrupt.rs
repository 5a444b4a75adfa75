//! Long work that Ctrl-C ends.

use crate::errors::PrimerlError;
use pyo3::prelude::*;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// How often a blocked call looks for signals.
pub const SIGNALS: Duration = Duration::from_millis(100);

/// Does `work` without the GIL, on a separate thread. A signal whose handler raises leaves it there, to end with the
/// process or by itself.
pub fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (sender, mut receiver) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("primerl-work".into())
        .spawn(move || {
            // A caller that was interrupted does not listen.
            let _ = sender.send(work());
        })?;
    loop {
        let received;
        (received, receiver) = py.detach(move || (receiver.recv_timeout(SIGNALS), receiver));
        match received {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PrimerlError::new_err("the work ended by a panic"));
            }
        }
    }
}
