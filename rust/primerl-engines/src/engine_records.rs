//! The engines that joined, and their addresses, on disk. With this file, an engine that returns under its name at
//! another address gets its old place also after the orchestrator was restarted, and an engine that joined just before
//! a restart is not forgotten.

use primerl_core::EngineId;
use primerl_service::files::{WriteError, write_whole};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// In the output folder.
const FILE: &str = "run/engines.json";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineRecord {
    pub engine: EngineId,
    pub url: String,
    pub name: Option<String>,
}

/// Blocks for the disk.
pub fn write(output_dir: &Path, records: &[EngineRecord]) -> Result<(), WriteError> {
    let bytes = serde_json::to_vec(records).unwrap_or_default();
    write_whole(&output_dir.join(FILE), &bytes)
}

/// The engines in the file, and those that only the journal knows (`known`), by number. If several have one address,
/// the result has the one that is there now: an engine of the file, with a name, that joined last.
pub fn read<'a>(
    output_dir: &Path,
    known: impl Iterator<Item = (EngineId, &'a str)>,
) -> Vec<EngineRecord> {
    let known = known.map(|(engine, url)| EngineRecord {
        engine,
        url: url.to_owned(),
        name: None,
    });
    let written = read_file(&output_dir.join(FILE));
    let those: BTreeSet<EngineId> = written.iter().map(|record| record.engine).collect();
    let records = known.chain(written).map(|record| (record.engine, record));
    let records: BTreeMap<EngineId, EngineRecord> = records.collect();
    one_at_each_address(records.into_values().collect(), &those)
}

fn read_file(path: &Path) -> Vec<EngineRecord> {
    match std::fs::read(path).map(|bytes| serde_json::from_slice(&bytes)) {
        Ok(Ok(records)) => return records,
        // A version that wrote none, or a run without engines.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Ok(Err(error)) => {
            tracing::warn!(
                path = %path.display(), %error,
                "cannot parse the engine records; restoring engines from the journal alone"
            )
        }
        Err(error) => {
            tracing::warn!(
                path = %path.display(), %error,
                "cannot read the engine records; restoring engines from the journal alone"
            )
        }
    }
    Vec::new()
}

/// Two supervisors would load their weights into one server. `records` are by number.
fn one_at_each_address(
    records: Vec<EngineRecord>,
    written: &BTreeSet<EngineId>,
) -> Vec<EngineRecord> {
    let rank = |record: &EngineRecord| {
        (
            written.contains(&record.engine),
            record.name.is_some(),
            record.engine,
        )
    };
    let mut best = BTreeMap::new();
    for record in &records {
        let best = best.entry(record.url.clone()).or_insert(rank(record));
        *best = rank(record).max(*best);
    }
    let is_best = |record: &EngineRecord| best.get(&record.url) == Some(&rank(record));
    records.into_iter().filter(is_best).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_knows_better_than_the_journal() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let journal = [(EngineId(0), "http://a:1"), (EngineId(1), "http://b:1")];
        let record = |engine, url: &str, name: Option<&str>| EngineRecord {
            engine: EngineId(engine),
            url: url.into(),
            name: name.map(str::to_owned),
        };
        let (first, second) = (record(0, "http://a:1", None), record(1, "http://b:1", None));
        assert_eq!(
            read(folder.path(), journal.into_iter()),
            [first.clone(), second]
        );
        let moved = [
            record(1, "http://b:2", Some("inference_1")),
            record(2, "http://c:1", None),
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
            let records = read(folder.path(), journal).into_iter();
            let records = records.map(|record| (record.engine.0, record.url));
            records.collect::<Vec<_>>()
        };
        let record = |engine, url: &str, name: Option<&str>| EngineRecord {
            engine: EngineId(engine),
            url: url.into(),
            name: name.map(str::to_owned),
        };
        let at = |engine, url: &str| (engine, url.to_owned());
        // The journal alone knows the one that joined last.
        assert_eq!(
            read(&[(0, "http://a"), (1, "http://b"), (2, "http://a")]),
            [at(1, "http://b"), at(2, "http://a")]
        );
        // 0 took the address of 1, which is no longer written.
        write(folder.path(), &[record(0, "http://a", Some("n"))]).expect("writes");
        assert_eq!(
            read(&[(0, "http://old"), (1, "http://a"), (2, "http://b")]),
            [at(0, "http://a"), at(2, "http://b")]
        );
        let both = [
            record(3, "http://c", Some("n")),
            record(4, "http://c", None),
        ];
        write(folder.path(), &both).expect("writes");
        assert_eq!(read(&[]), [at(3, "http://c")]);
    }
}
