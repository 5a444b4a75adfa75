use super::super::play::{Moment, Observer, play};
use super::*;
use crate::testing::{Run, scenario};
use primerl_core::counters::Counters;
use primerl_core::testing::simulator::Scenario;

#[derive(Default)]
struct Tally {
    told: Counters,
    /// Rollouts of an evaluation that waited for their groups, and were started again with these.
    held_in_vain: u32,
    /// The first event after which the report differs from what the core counts.
    differs: Option<(u64, Counters, Counters)>,
}

fn ends(counters: &Counters) -> [u64; 6] {
    [
        counters.trained,
        counters.filtered,
        counters.stale,
        counters.failed,
        counters.cancelled,
        counters.evaluated,
    ]
}

impl Observer for Tally {
    fn saw(&mut self, moment: &Moment<'_>) {
        for fate in moment.ended {
            self.told.count(fate.end.ended());
            let is_voided = matches!(fate.end, End::Voided(_));
            self.held_in_vain += u32::from(is_voided && fate.life.evaluates.is_some());
        }
        let counted = moment.core.counters();
        if ends(&self.told) != ends(&counted) && self.differs.is_none() {
            self.differs = Some((moment.number, self.told, counted));
        }
    }
}

#[test]
fn a_rollout_that_ends_is_reported_when_it_counts() {
    let mut held_in_vain = 0;
    for seed in 0..8 {
        let run = Run::of(Scenario {
            whole_groups: seed % 3 > 0,
            ..scenario(seed)
        });
        let played = play(run.path(), |_| Tally::default()).expect("reads");
        assert_eq!(played.observer.differs, None, "seed {seed}");
        held_in_vain += played.observer.held_in_vain;
    }
    assert!(held_in_vain > 5, "{held_in_vain}");
}

#[test]
fn a_journal_that_begins_amid_held_rollouts_gives_the_same_result() {
    let mut began_amid = 0;
    for seed in 0..3 {
        let run = Run::of(Scenario {
            whole_groups: true,
            ..scenario(seed)
        });
        for keeps in (1..10).map(|tenth| run.events.len() * tenth / 10) {
            let (_, before) = run.prune(keeps);
            began_amid += before.held().count();
            let played = play(run.path(), |_| Tally {
                told: before.counters(),
                ..Tally::default()
            });
            let played = played.expect("reads");
            assert_eq!(played.observer.differs, None, "seed {seed}, {keeps}");
        }
    }
    assert!(began_amid > 0);
}
