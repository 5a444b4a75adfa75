//! The journal: every event of the run, in order, on disk before anything that relies on it is seen outside.
//!
//! `<output_dir>/journal/<number of its first event, 12 digits>.log` holds records of
//! `u32 length, u32 crc32 of the body, body`, little-endian; the body is msgpack of `(time, event)`.
//! One writer thread: a sync covers every event appended before it (group commit).

mod reader;
mod writer;

pub use reader::{Entry, ReadError, read};
pub use writer::{Journal, JournalError, Progress};

/// Bytes before the body: its length and its checksum.
const HEADER: usize = 8;
