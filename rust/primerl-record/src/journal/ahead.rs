//! Reading ahead: records are read and decoded on a thread of their own while the events before them are handled. Each
//! takes about as long as the other, so a replay takes half as long as one after the other.

use super::reader::{Entry, ReadError, Tail, decode_from};
use std::path::Path;
use std::sync::mpsc;

/// Events handed over at a time: waking the other thread for each would cost more than they do.
const CHUNK: usize = 256;
/// Chunks that may wait, so that one slow event does not hold up the reader. A bound on memory: some megabytes.
const CHUNKS_AHEAD: usize = 16;

/// Gives all events after the first `after` to `take`, in order, each with its number (from 1).
///
/// # Errors
/// A file cannot be read, is damaged, or is missing; what comes before was given to `take`.
pub fn read_from(
    folder: &Path,
    after: u64,
    mut take: impl FnMut(u64, Entry),
) -> Result<Tail, ReadError> {
    let (chunks, waiting) = mpsc::sync_channel(CHUNKS_AHEAD);
    std::thread::scope(|scope| {
        let reader = std::thread::Builder::new()
            .name("journal-reader".into())
            .spawn_scoped(scope, move || send_all(folder, after, &chunks));
        let mut number = after;
        let mut take = |entry| {
            number += 1;
            take(number, entry);
        };
        let Ok(reader) = reader else {
            // No thread is to be had: then one after the other.
            return decode_from(folder, after, |entry| {
                take(entry);
                true
            });
        };
        // Ends when the reader does, in whatever way: its half of the channel goes with it.
        waiting.into_iter().flatten().for_each(&mut take);
        match reader.join() {
            Ok(tail) => tail,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn send_all(
    folder: &Path,
    after: u64,
    chunks: &mpsc::SyncSender<Vec<Entry>>,
) -> Result<Tail, ReadError> {
    let mut chunk = Vec::with_capacity(CHUNK);
    let tail = decode_from(folder, after, |entry| {
        chunk.push(entry);
        if chunk.len() < CHUNK {
            return true;
        }
        let full = std::mem::replace(&mut chunk, Vec::with_capacity(CHUNK));
        // Nobody listens where `take` panicked.
        chunks.send(full).is_ok()
    });
    // Also before an error: whoever follows the story sees it up to the damage.
    let _ = chunks.send(chunk);
    tail
}

#[cfg(test)]
mod tests;
