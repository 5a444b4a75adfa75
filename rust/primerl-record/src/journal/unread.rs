//! The part of a journal that a restart does not read, since a newer snapshot covers it: the run continues without it,
//! but anyone who looks back, goes back or needs a snapshot in place of a damaged one will miss it.

use super::reader::{ReadError, Segment};
use super::{SEGMENT, SNAPSHOT, files, snapshot};
use std::io;
use std::path::{Path, PathBuf};

/// Checks the files that are only needed for events before number `after`; returns one message for each bad file.
/// `is_over`: the run has ended, so the result is no longer needed.
///
/// Reads all of them, which may take as long as the disk needs. A run in progress may delete its oldest files
/// meanwhile: a file that is gone by then is not missing.
pub fn check_unread(folder: &Path, after: u64, is_over: impl Fn() -> bool) -> Vec<String> {
    let listed = |extension| files(folder, extension).unwrap_or_default();
    let (segments, snapshots) = (listed(SEGMENT), listed(SNAPSHOT));
    let mut problems = Vec::new();
    for pair in segments.windows(2) {
        let [(first, path), (next, _)] = pair else {
            continue;
        };
        if *next > after || is_over() {
            break;
        }
        problems.extend(problem_of(path, next - first, &is_over));
    }
    for (_, path) in snapshots.iter().filter(|(number, _)| *number < after) {
        if is_over() {
            break;
        }
        if let Err(problem) = snapshot::check(path) {
            problems.push(format!("{}: {problem}", path.display()));
        }
    }
    problems
}

/// Why a segment is not the `expected` whole records that it should be.
fn problem_of(path: &Path, expected: u64, is_over: &impl Fn() -> bool) -> Option<String> {
    let count = || -> Result<u64, ReadError> {
        let mut segment = Segment::open(PathBuf::from(path), Vec::new())?;
        let mut found = 0;
        while !is_over() && segment.next_record(false)?.is_some() {
            found += 1;
        }
        Ok(found)
    };
    match count() {
        Err(ReadError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
        Err(error) => Some(error.to_string()),
        Ok(found) if found != expected && !is_over() => Some(format!(
            "{}: it has {found} events, and the next file of the journal begins after {expected}: one of them is missing or \
             was cut",
            path.display()
        )),
        Ok(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{Journal, path_of};
    use primerl_core::{Event, Time};
    use std::fs;

    /// A journal whose segments have these numbers of events; its folder and its files.
    fn journal_of_segments(lengths: &[u64]) -> (tempfile::TempDir, Vec<PathBuf>) {
        let place = tempfile::tempdir().expect("a temporary folder");
        let mut journal = Journal::create(place.path()).expect("creates");
        let (mut paths, mut before) = (Vec::new(), 0);
        for length in lengths {
            paths.push(path_of(place.path(), before, SEGMENT));
            before += length;
            for _ in 0..*length {
                journal.append(Time(0), &Event::Tick).expect("appends");
            }
            journal.end_segment().expect("ends");
        }
        drop(journal);
        (place, paths)
    }

    #[test]
    fn a_damaged_file_that_no_restart_needs_is_named() {
        let (place, segments) = journal_of_segments(&[3, 2, 4]);
        let folder = place.path();
        let told = |after| check_unread(folder, after, || false);
        assert_eq!(told(9), Vec::<String>::new());
        let whole = fs::read(&segments[0]).expect("reads");
        let mut damaged = whole.clone();
        let last = damaged.len() - 1;
        damaged[last] ^= 1;
        fs::write(&segments[0], &damaged).expect("writes");
        let problems = told(9);
        assert_eq!(problems.len(), 1, "{problems:?}");
        let named = segments[0].display().to_string();
        assert!(problems[0].contains(&named), "{problems:?}");
        assert!(problems[0].contains("does not match its checksum"));
        // A restart that reads the file reports it itself, and a run that is over reports nothing.
        assert_eq!(told(2), Vec::<String>::new());
        assert_eq!(check_unread(folder, 9, || true), Vec::<String>::new());

        // Cut at the end of a record, or gone: the next segment's name says how many there were.
        let record = (whole.len() - 8) / 3;
        fs::write(&segments[0], &whole[..whole.len() - record]).expect("writes");
        assert!(told(9)[0].contains("it has 2 events"), "{:?}", told(9));
        fs::write(&segments[0], &whole).expect("writes");
        fs::remove_file(&segments[1]).expect("removes");
        assert!(told(9)[0].contains("begins after 5"), "{:?}", told(9));
    }

    #[test]
    fn so_is_an_older_snapshot() {
        let (place, _) = journal_of_segments(&[3, 2]);
        let path = place.path().join("000000000002.snapshot");
        fs::write(&path, b"1234nothing").expect("writes");
        let problems = check_unread(place.path(), 4, || false);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].contains("000000000002.snapshot"));
        let none = check_unread(place.path(), 2, || false);
        assert_eq!(none, Vec::<String>::new(), "it is the one that is read");
    }
}
