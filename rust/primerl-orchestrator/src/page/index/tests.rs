use super::*;
use crate::inspect::Following;
use crate::inspect::tests::Run;
use std::collections::BTreeMap;

/// The index of a simulated run, with all that can go wrong in one.
pub(crate) fn indexed(run: &Run) -> Index {
    let mut index = Index::default();
    let mut following =
        Following::begin(run.path(), |beginning| index = Index::begin(beginning)).expect("begins");
    while following
        .next(|moment, place| index.saw(moment, place))
        .expect("reads")
    {}
    index
}

#[test]
fn every_rollout_has_the_fate_that_the_core_counted() {
    for seed in 0..4 {
        let run = Run::new(seed);
        let index = indexed(&run);
        let mut fates: BTreeMap<String, u64> = BTreeMap::new();
        for record in &index.records {
            let name = crate::inspect::name_of(&record.fate);
            *fates.entry(name).or_default() += 1;
        }
        let counters = serde_json::json!(run.simulator.core.counters());
        for fate in [
            "trained",
            "filtered",
            "stale",
            "failed",
            "cancelled",
            "evaluated",
        ] {
            let counted = counters[fate].as_u64().unwrap_or_default();
            assert_eq!(
                fates.get(fate).copied().unwrap_or_default(),
                counted,
                "{fate}, seed {seed}"
            );
        }
        let all = counters["dispatched"].as_u64().unwrap_or_default();
        assert_eq!(fates.values().sum::<u64>(), all);
        for record in index
            .records
            .iter()
            .filter(|record| record.fate == Fate::Trained)
        {
            assert!(record.step.is_some() && record.given != Given::Nothing);
            assert!(
                record
                    .versions
                    .is_some_and(|(oldest, newest)| oldest <= newest)
            );
            let folder = run.path().join("journal");
            let events = index.places(record).into_iter().map(|place| {
                let crate::journal::Entry(_, event) =
                    crate::journal::read_at(&folder, place).expect("is there");
                event
            });
            let of = |event: &Event| match event {
                Event::TurnFinished { rollout, .. } => (*rollout, 1),
                Event::RolloutFinished { rollout, .. }
                | Event::SamplingStarted { rollout, .. }
                | Event::TurnFailed { rollout, .. } => (*rollout, 0),
                _ => panic!("an event of no rollout"),
            };
            let events: Vec<_> = events.map(|event| of(&event)).collect();
            assert!(events.iter().all(|(rollout, _)| *rollout == record.rollout));
            assert!(events.iter().map(|(_, turns)| turns).sum::<u32>() >= record.turns);
        }
    }
}

#[test]
fn a_list_is_narrowed_and_comes_in_pages() {
    let run = Run::new(0);
    let index = indexed(&run);
    let (all, matching) = index.list(&Filter::default(), usize::MAX);
    assert_eq!((all.len(), matching), (index.len(), index.len()));
    assert!(
        all.is_sorted_by(|a, b| a.rollout > b.rollout),
        "the newest first"
    );
    let filter = Filter {
        fate: Some(Fate::Trained),
        step: Some(2),
        environment: Some("train".into()),
        ..Filter::default()
    };
    let (trained, matching) = index.list(&filter, usize::MAX);
    assert!(matching >= 4 && matching == trained.len());
    assert!(trained.iter().all(|record| record.step == Some(2)));
    let (first, _) = index.list(&filter, 3);
    let next = Filter {
        cursor: first.last().map(|record| record.rollout.0),
        ..filter.clone()
    };
    let (second, of) = index.list(&next, usize::MAX);
    assert_eq!(of, matching);
    let pages: Vec<RolloutId> = first
        .iter()
        .chain(&second)
        .map(|record| record.rollout)
        .collect();
    assert_eq!(
        pages,
        trained
            .iter()
            .map(|record| record.rollout)
            .collect::<Vec<_>>()
    );
    let nobody = Filter {
        environment: Some("none".into()),
        ..Filter::default()
    };
    assert_eq!(index.list(&nobody, 9).1, 0);
}

#[test]
fn it_stays_small() {
    assert!(size_of::<Record>() <= 136, "{}", size_of::<Record>());
    let run = Run::new(1);
    let mut index = indexed(&run);
    let Some(pattern) = index
        .records
        .iter()
        .find(|record| record.ended_s.is_some() && record.places.len() <= HELD)
        .cloned()
    else {
        panic!("none ended");
    };
    let first = index.records.back().map_or(0, |record| record.rollout.0) + 1;
    for number in first..first + MOST_ROLLOUTS as u64 + 50 {
        index.insert(Record {
            rollout: RolloutId(number),
            ..pattern.clone()
        });
        index.forget();
    }
    assert_eq!(index.len(), MOST_ROLLOUTS);
    assert!(index.first() >= Some(RolloutId(first)), "the oldest went");
}
