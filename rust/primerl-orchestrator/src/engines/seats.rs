//! Who joined, from where, on disk: an engine that comes back under its name at another address takes its old place also
//! in an orchestrator that was restarted meanwhile, and one that joined in the last moment before that is not forgotten.

use primerl_core::EngineId;
use primerl_service::files::{WriteError, write_whole};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// In the output folder.
const FILE: &str = "run/engines.json";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    pub engine: EngineId,
    pub url: String,
    pub name: Option<String>,
}

/// Blocks for the disk.
pub(crate) fn write(output_dir: &Path, seats: &[Seat]) -> Result<(), WriteError> {
    let bytes = serde_json::to_vec(seats).unwrap_or_default();
    write_whole(&output_dir.join(FILE), &bytes)
}

/// Those of the file, and those that only the journal knows (`known`), by number; of several at one address the one
/// that is there: of the file, named, joined last.
pub(crate) fn read<'a>(
    output_dir: &Path,
    known: impl Iterator<Item = (EngineId, &'a str)>,
) -> Vec<Seat> {
    let mut seats: BTreeMap<EngineId, Seat> = known
        .map(|(engine, url)| (engine, url.to_owned()))
        .map(|(engine, url)| {
            (
                engine,
                Seat {
                    engine,
                    url,
                    name: None,
                },
            )
        })
        .collect();
    let path: PathBuf = output_dir.join(FILE);
    let mut written = BTreeSet::new();
    match std::fs::read(&path).map(|bytes| serde_json::from_slice::<Vec<Seat>>(&bytes)) {
        Ok(Ok(those)) => {
            written.extend(those.iter().map(|seat| seat.engine));
            seats.extend(those.into_iter().map(|seat| (seat.engine, seat)));
        }
        // Of a version that wrote none, or of a run without engines.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Ok(Err(error)) => {
            tracing::warn!(path = %path.display(), %error, "engines are looked for by the journal only")
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "engines are looked for by the journal only")
        }
    }
    one_at_each_address(seats.into_values().collect(), &written)
}

/// Two supervisors would load their weights into one server. `seats` are by number.
fn one_at_each_address(seats: Vec<Seat>, written: &BTreeSet<EngineId>) -> Vec<Seat> {
    let rank = |seat: &Seat| {
        (
            written.contains(&seat.engine),
            seat.name.is_some(),
            seat.engine,
        )
    };
    let mut best = BTreeMap::new();
    for seat in &seats {
        let best = best.entry(seat.url.clone()).or_insert(rank(seat));
        *best = rank(seat).max(*best);
    }
    let is_best = |seat: &Seat| best.get(&seat.url) == Some(&rank(seat));
    seats.into_iter().filter(is_best).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_knows_better_than_the_journal() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let journal = [(EngineId(0), "http://a:1"), (EngineId(1), "http://b:1")];
        let seat = |engine, url: &str, name: Option<&str>| Seat {
            engine: EngineId(engine),
            url: url.into(),
            name: name.map(str::to_owned),
        };
        let (first, second) = (seat(0, "http://a:1", None), seat(1, "http://b:1", None));
        assert_eq!(
            read(folder.path(), journal.into_iter()),
            [first.clone(), second]
        );
        let moved = [
            seat(1, "http://b:2", Some("inference_1")),
            seat(2, "http://c:1", None),
        ];
        write(folder.path(), &moved).expect("writes");
        let expected = [std::slice::from_ref(&first), &moved[..]].concat();
        assert_eq!(read(folder.path(), journal.into_iter()), expected);
        std::fs::write(folder.path().join(FILE), "[{").expect("writes");
        assert_eq!(read(folder.path(), journal.into_iter())[0], first);
    }

    #[test]
    fn an_address_has_one_engine() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let read = |journal: &[(u32, &'static str)]| {
            let journal = journal
                .iter()
                .map(|(engine, url)| (EngineId(*engine), *url));
            let seats = read(folder.path(), journal).into_iter();
            let seats = seats.map(|seat| (seat.engine.0, seat.url));
            seats.collect::<Vec<_>>()
        };
        let seat = |engine, url: &str, name: Option<&str>| Seat {
            engine: EngineId(engine),
            url: url.into(),
            name: name.map(str::to_owned),
        };
        let at = |engine, url: &str| (engine, url.to_owned());
        // Of the journal alone, the one that joined last.
        assert_eq!(
            read(&[(0, "http://a"), (1, "http://b"), (2, "http://a")]),
            [at(1, "http://b"), at(2, "http://a")]
        );
        // 0 took the address of 1, which is not written any more.
        write(folder.path(), &[seat(0, "http://a", Some("n"))]).expect("writes");
        assert_eq!(
            read(&[(0, "http://old"), (1, "http://a"), (2, "http://b")]),
            [at(0, "http://a"), at(2, "http://b")]
        );
        let both = [seat(3, "http://c", Some("n")), seat(4, "http://c", None)];
        write(folder.path(), &both).expect("writes");
        assert_eq!(read(&[]), [at(3, "http://c")]);
    }
}
