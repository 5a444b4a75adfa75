//! The client's notices for its owner, and a file descriptor that becomes readable when there is one.
//!
//! The owner is an event loop (asyncio's `add_reader`): it is woken once for any number of notices, and the client
//! never calls into the owner, so a busy owner delays only itself.

use super::Notice;
use parking_lot::Mutex;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

pub struct Mailbox {
    /// Written by the client's tasks, emptied by the owner.
    notices: Mutex<Vec<Notice>>,
    wake: UnixStream,
    woken: UnixStream,
}

impl Mailbox {
    pub fn new() -> std::io::Result<Self> {
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        Ok(Self {
            notices: Mutex::new(Vec::new()),
            wake,
            woken,
        })
    }

    /// Readable while notices wait.
    pub fn descriptor(&self) -> RawFd {
        self.woken.as_raw_fd()
    }

    pub fn put(&self, notice: Notice) {
        let was_empty = {
            let mut notices = self.notices.lock();
            notices.push(notice);
            notices.len() == 1
        };
        if was_empty {
            // A full socket buffer already wakes the reader, and an open socket pair gives no other error.
            let _ = (&self.wake).write(&[1]);
        }
    }

    /// All notices, oldest first; empty when there are none.
    pub fn take(&self) -> Vec<Notice> {
        // The wake-up is consumed before the notices: one that arrives in between wakes the owner once too often, never
        // too seldom.
        let mut bytes = [0; 64];
        loop {
            match (&self.woken).read(&mut bytes) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        std::mem::take(&mut *self.notices.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(mailbox: &Mailbox) -> bool {
        let mut byte = [0];
        (&mailbox.woken).read(&mut byte).is_ok()
    }

    #[test]
    fn wakes_once_for_many_and_again_after_a_take() {
        let mailbox = Mailbox::new().expect("socket pair");
        mailbox.put(Notice::LeasesVoid);
        mailbox.put(Notice::LeasesVoid);
        assert_eq!(mailbox.take().len(), 2);
        assert!(!readable(&mailbox));
        mailbox.put(Notice::LeasesVoid);
        assert!(readable(&mailbox));
        assert_eq!(mailbox.take().len(), 1);
        assert!(mailbox.take().is_empty());
    }
}
