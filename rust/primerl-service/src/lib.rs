//! Parts that all servers of a run share. The crate depends on the core's events and effects, but not on the code that sends
//! them.
//!
//! * [`http`]: connections and bodies within limits, errors in OpenAI's format, encodings.
//! * [`inbox`]: the channel to the thread that owns the core.
//! * [`waits`]: what the server's parts wait for, with deadlines.
//! * [`files`]: files that are complete or absent; [`secret`]: values that are not printed; [`tls`]: which servers clients trust.
//! * [`config_error`]: errors in settings; [`cpu`]: CPU time of this process.

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
