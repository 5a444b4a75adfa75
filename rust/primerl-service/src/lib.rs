//! Parts that all servers of a run share. It depends on the core's events and effects, but not on the code that sends
//! them.
//!
//! * [`http`]: connections and bodies within limits, errors in OpenAI's envelope, encodings.
//! * [`inbox`]: the way to the thread that owns the core.
//! * [`waits`]: what parts of the server wait for, with deadlines.
//! * [`files`]: files that are whole or absent; [`secret`]: values that are not printed; [`tls`]: what clients trust.
//! * [`config_error`]: how a setting is refused; [`cpu`]: CPU time of this process.

#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod config_error;
pub mod cpu;
pub mod files;
pub mod http;
pub mod inbox;
pub mod secret;
pub mod tls;
pub mod waits;
