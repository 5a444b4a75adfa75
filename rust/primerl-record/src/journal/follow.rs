//! Follows a journal that grows: reads it event by event to the end of what is written, and continues from there later.
//! Each event comes with its place, from which it can be read again without the events before it.

use super::reader::{Entry, ReadError, Segment, listed};
use super::{MAGIC, SEGMENT, path_of};
use std::path::{Path, PathBuf};

/// Where an event is: its segment, and the bytes of it that are before the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub segment: u64,
    pub offset: u64,
}

/// A reader that stops at the end of what is written, and continues from there.
pub struct Follower {
    folder: PathBuf,
    /// Events before this number are skipped.
    after: u64,
    /// Events read, from the first of the run on.
    read: u64,
    open: Option<(u64, Segment)>,
}

impl Follower {
    /// Reads what follows the first `after` events.
    pub fn begin(folder: &Path, after: u64) -> Follower {
        Follower {
            folder: folder.to_owned(),
            after,
            read: after,
            open: None,
        }
    }

    /// Events read, from the first of the run on.
    pub fn read(&self) -> u64 {
        self.read
    }

    /// The next event; `None` if no more is written so far.
    ///
    /// # Errors
    /// A file cannot be read, is damaged, or was deleted before it was read: the caller has to start from the
    /// beginning.
    pub fn next_event(&mut self) -> Result<Option<(Place, Entry)>, ReadError> {
        loop {
            if self.open.is_none() && !self.open_next()? {
                return Ok(None);
            }
            let Some((number, segment)) = &mut self.open else {
                return Ok(None);
            };
            let mut next = segment.next_written()?;
            if next.is_none() {
                let segments = listed(&self.folder, SEGMENT)?;
                if segments.last().is_none_or(|(last, _)| *last <= *number) {
                    return Ok(None);
                }
                // A segment with a successor does not grow; until it had one, it may have.
                next = segment.next_written()?;
            }
            let Some((offset, body)) = next else {
                self.open = None;
                continue;
            };
            self.read += 1;
            if self.read > self.after {
                let place = Place {
                    segment: *number,
                    offset,
                };
                return Ok(Some((place, segment.decode(body)?)));
            }
        }
    }

    /// Opens the segment that has the next event; `false` if there is none yet.
    fn open_next(&mut self) -> Result<bool, ReadError> {
        let segments = listed(&self.folder, SEGMENT)?;
        let Some((found, path)) = segments
            .iter()
            .rfind(|(first, _)| *first <= self.read)
            .or(segments.first())
        else {
            return Ok(false);
        };
        // Only the first segment may begin before the first wanted event.
        if *found > self.read || (*found < self.read && self.read != self.after) {
            return Err(ReadError::Gap {
                path: path.clone(),
                found: *found,
                expected: self.read,
            });
        }
        // A segment that was only just created is empty.
        let is_begun = std::fs::metadata(path).is_ok_and(|file| file.len() >= MAGIC.len() as u64);
        if is_begun {
            self.read = *found;
            self.open = Some((*found, Segment::open(path.clone(), Vec::new())?));
        }
        Ok(is_begun)
    }
}

/// The event at a place that a [`Follower`] returned.
///
/// # Errors
/// Its file is gone, or damaged.
pub fn read_at(folder: &Path, place: Place) -> Result<Entry, ReadError> {
    let path = path_of(folder, place.segment, SEGMENT);
    let mut segment = Segment::open_at(path.clone(), place.offset)?;
    let cut = || ReadError::Cut {
        path,
        offset: place.offset,
    };
    let (_, body) = segment.next_written()?.ok_or_else(cut)?;
    segment.decode(body)
}

#[cfg(test)]
mod tests;
