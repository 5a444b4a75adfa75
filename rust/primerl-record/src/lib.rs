//! The files that a run writes, and how they are read again. Depends on the core and on files, not on servers.
//!
//! * [`journal`]: every event of the run, and the whole core from time to time.
//! * [`spool`], [`batch`]: batches as the trainer takes them.
//! * [`kept_state`]: the run's part of the trainer's checkpoints.
//! * [`inspect`]: what a journal tells, for people; [`page`]: the same for the page.

#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod batch;
pub mod inspect;
pub mod journal;
pub mod kept_state;
pub mod page;
pub mod spool;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
