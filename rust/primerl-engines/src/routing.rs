//! Which engine gets a request: a pure choice among the candidates.

use primerl_core::{EngineId, PolicyVersion};
use std::cmp::Ordering;

/// An engine that has proved its weights and is well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    pub engine: EngineId,
    pub version: PolicyVersion,
    /// Requests it has now.
    pub running: u32,
    /// Requests it should have at a time.
    pub limit: u32,
    /// Whether it failed this very request before.
    pub failed: bool,
    /// Whether it is far slower than the others.
    pub slow: bool,
}

/// A slow engine counts as this many times as full as it is.
const SLOW_WEIGHT: u64 = 8;

/// Where the prefix of a conversation is in the KV cache: on this engine, while it serves that version (a prefix that
/// other weights computed is not reused).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    pub engine: EngineId,
    pub version: PolicyVersion,
}

impl Candidate {
    fn has_room(&self) -> bool {
        self.running < self.limit
    }

    /// By the share of its limit that would be used, so that a larger engine gets more.
    fn compare_load(&self, other: &Candidate) -> Ordering {
        let taken = |this: &Candidate, that: &Candidate| {
            let weight = if this.slow { SLOW_WEIGHT } else { 1 };
            (u64::from(this.running) + u64::from(this.slow)) * weight * u64::from(that.limit.max(1))
        };
        taken(self, other).cmp(&taken(other, self))
    }
}

/// Chooses among the engines at the newest version: one that has not failed the request; the one that holds its prefix,
/// unless that engine is at its limit, or slow; else the least loaded.
pub(super) fn choose(candidates: &[Candidate], resident: Option<Resident>) -> Option<EngineId> {
    let newest = candidates.iter().map(|candidate| candidate.version).max()?;
    let current = candidates
        .iter()
        .filter(|candidate| candidate.version == newest);
    let holds_prefix = |candidate: &Candidate| {
        let here = Resident {
            engine: candidate.engine,
            version: candidate.version,
        };
        candidate.has_room() && !candidate.slow && resident == Some(here)
    };
    let chosen = current.min_by(|a, b| {
        (a.failed.cmp(&b.failed))
            .then(holds_prefix(b).cmp(&holds_prefix(a)))
            .then(a.compare_load(b))
            .then(a.engine.cmp(&b.engine))
    })?;
    Some(chosen.engine)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(engine: u32, running: u32) -> Candidate {
        Candidate {
            engine: EngineId(engine),
            version: PolicyVersion(3),
            running,
            limit: 10,
            failed: false,
            slow: false,
        }
    }

    fn resident(engine: u32, version: u64) -> Option<Resident> {
        Some(Resident {
            engine: EngineId(engine),
            version: PolicyVersion(version),
        })
    }

    fn chosen(candidates: &[Candidate], resident: Option<Resident>) -> Option<u32> {
        choose(candidates, resident).map(|engine| engine.0)
    }

    #[test]
    fn the_least_loaded_gets_a_new_conversation() {
        let engines = [candidate(0, 4), candidate(1, 2), candidate(2, 2)];
        assert_eq!(chosen(&engines, None), Some(1));
        assert_eq!(chosen(&[], None), None);
        let larger = Candidate {
            limit: 100,
            ..candidate(2, 15)
        };
        assert_eq!(
            chosen(&[candidate(0, 4), candidate(1, 2), larger], None),
            Some(2)
        );
    }

    #[test]
    fn a_conversation_stays_where_its_prefix_is() {
        let engines = [candidate(0, 9), candidate(1, 0)];
        assert_eq!(chosen(&engines, resident(0, 3)), Some(0));
        assert_eq!(
            chosen(&engines, resident(0, 2)),
            Some(1),
            "other weights made it"
        );
        assert_eq!(chosen(&engines, resident(7, 3)), Some(1), "it left");
    }

    #[test]
    fn an_engine_at_its_limit_spills_to_the_least_loaded() {
        let engines = [candidate(0, 10), candidate(1, 3), candidate(2, 5)];
        assert_eq!(chosen(&engines, resident(0, 3)), Some(1));
        let all_full = [candidate(0, 10), candidate(1, 13)];
        assert_eq!(
            chosen(&all_full, resident(1, 3)),
            Some(0),
            "one of them has to"
        );
    }

    #[test]
    fn a_slow_engine_gets_little_while_others_are_not() {
        let slow = |engine, running| Candidate {
            slow: true,
            ..candidate(engine, running)
        };
        let resident = resident(0, 3);
        assert_eq!(chosen(&[slow(0, 0), candidate(1, 7)], resident), Some(1));
        assert_eq!(chosen(&[slow(0, 0), candidate(1, 9)], resident), Some(0));
        assert_eq!(chosen(&[slow(0, 1), candidate(1, 9)], resident), Some(1));
        assert_eq!(chosen(&[slow(0, 3), slow(1, 2)], resident), Some(1));
        assert_eq!(chosen(&[slow(0, 3)], resident), Some(0), "the only one");
    }

    #[test]
    fn the_newest_version_comes_first_and_a_failed_engine_last() {
        let newer = Candidate {
            version: PolicyVersion(4),
            ..candidate(1, 99)
        };
        assert_eq!(chosen(&[candidate(0, 0), newer], resident(0, 3)), Some(1));
        let failed = Candidate {
            failed: true,
            ..candidate(0, 0)
        };
        assert_eq!(chosen(&[failed, candidate(1, 9)], resident(0, 3)), Some(1));
        assert_eq!(chosen(&[failed], None), Some(0), "better than nothing");
    }
}
