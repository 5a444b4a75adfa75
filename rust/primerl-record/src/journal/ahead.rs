//! Reading ahead: a separate thread reads and decodes records while the caller handles earlier events. Both take about
//! as long, so a replay takes half the time.

use super::reader::{Entry, ReadError, Tail, decode_from};
use std::path::Path;
use std::sync::mpsc;

/// Events sent at a time: waking the other thread for each one would cost more than the events do.
const CHUNK: usize = 256;
/// Chunks that may wait, so that one slow event does not stop the reader. Bounds the memory to some megabytes.
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
            // No thread could be started: read and handle in turn.
            return decode_from(folder, after, |entry| {
                take(entry);
                true
            });
        };
        // Ends when the reader does, in whatever way, because its half of the channel is dropped.
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
        // There is no receiver if `take` panicked.
        chunks.send(full).is_ok()
    });
    // Also before an error: a reader sees the run up to the damage.
    let _ = chunks.send(chunk);
    tail
}

#[cfg(test)]
mod tests;
