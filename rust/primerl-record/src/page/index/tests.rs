use super::list::{Listed, Order};
use super::*;
use crate::inspect::Following;
use crate::testing::Run;
use std::collections::BTreeMap;

/// The index of a simulated run, with everything that can go wrong in one.
pub fn indexed(run: &Run) -> Index {
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
fn every_rollout_has_the_status_that_the_core_counted() {
    for seed in 0..4 {
        let run = Run::new(seed);
        let index = indexed(&run);
        let mut fates: BTreeMap<String, u64> = BTreeMap::new();
        for record in &index.records {
            let name = crate::inspect::name_of(&record.fate);
            *fates.entry(name).or_default() += 1;
        }
        let counters = serde_json::json!(run.simulator.core.counters());
        for name in [
            "trained",
            "filtered",
            "stale",
            "failed",
            "cancelled",
            "evaluated",
        ] {
            let counted = counters[name].as_u64().unwrap_or_default();
            assert_eq!(
                fates.get(name).copied().unwrap_or_default(),
                counted,
                "{name}, seed {seed}"
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

/// Numbers of the rollouts on a page.
fn numbers(listed: &Listed<'_>) -> Vec<u64> {
    let rollouts = listed.rollouts.iter();
    rollouts.map(|record| record.rollout.0).collect()
}

/// All pages from the first on, and then back: the numbers on them.
fn walked(index: &Index, filter: &Filter, limit: usize) -> [Vec<Vec<u64>>; 2] {
    let (mut on, mut back) = (Vec::new(), Vec::new());
    let mut at = filter.clone();
    loop {
        let listed = index.list(&at, limit);
        assert_eq!(listed.before, on.len() * limit);
        on.push(numbers(&listed));
        at.cursor = listed.next().map(|last| last.0);
        if at.cursor.is_none() {
            break;
        }
    }
    let last = on.last().and_then(|page| page.first().copied());
    let mut until = last.filter(|_| on.len() > 1);
    while let Some(first) = until {
        let at = Filter {
            until: Some(first),
            ..filter.clone()
        };
        let listed = index.list(&at, limit);
        back.push(numbers(&listed));
        until = listed.previous().map(|first| first.0);
    }
    [on, back]
}

#[test]
fn a_list_is_filtered() {
    let run = Run::new(0);
    let index = indexed(&run);
    let all = index.list(&Filter::default(), usize::MAX);
    assert_eq!(
        (all.rollouts.len(), all.matching),
        (index.count(), index.count())
    );
    let filter = Filter {
        fate: Some(Fate::Trained),
        step: Some(2),
        environment: Some("train".into()),
        ..Filter::default()
    };
    let trained = index.list(&filter, usize::MAX);
    assert!(trained.matching >= 4 && trained.matching == trained.rollouts.len());
    let of_step = |record: &&Record| record.step == Some(2);
    assert!(trained.rollouts.iter().all(of_step));
    let nobody = Filter {
        environment: Some("none".into()),
        ..Filter::default()
    };
    assert_eq!(index.list(&nobody, 9).matching, 0);
    let rewards: Vec<f32> = (index.records.iter()).filter_map(Record::reward).collect();
    assert!(rewards.len() < index.count(), "some have none");
    let (least, most) = (0.25, 0.75);
    let filter = Filter {
        min_reward: Some(least),
        max_reward: Some(most),
        ..Filter::default()
    };
    let within = |reward: &&f32| (least..=most).contains(*reward);
    let expected = rewards.iter().filter(within).count();
    assert!(expected > 0 && expected < rewards.len());
    assert_eq!(index.list(&filter, 0).matching, expected);
}

#[test]
fn a_list_is_walked_both_ways_in_every_order() {
    let run = Run::new(0);
    let index = indexed(&run);
    for order in [Order::Newest, Order::HighestReward, Order::LowestReward] {
        let filter = Filter {
            order,
            ..Filter::default()
        };
        let all = index.list(&filter, usize::MAX);
        assert_eq!((all.next(), all.previous()), (None, None));
        let rewards: Vec<_> = all.rollouts.iter().map(|one| one.reward()).collect();
        let is_in_order = |a: &Record, b: &Record| match (order, a.reward(), b.reward()) {
            (Order::Newest, _, _) => a.rollout > b.rollout,
            (Order::HighestReward, Some(a), Some(b)) if a != b => a > b,
            (Order::LowestReward, Some(a), Some(b)) if a != b => a < b,
            // Rollouts without a reward come last.
            (_, a_reward, b_reward) => {
                a_reward.is_some() && b_reward.is_none()
                    || a_reward == b_reward && a.rollout > b.rollout
            }
        };
        assert!(
            all.rollouts.is_sorted_by(|a, b| is_in_order(a, b)),
            "{order:?}: {rewards:?}"
        );
        for limit in [1, 7, 50] {
            let [on, mut back] = walked(&index, &filter, limit);
            assert_eq!(on.concat(), numbers(&all), "{order:?}");
            back.reverse();
            assert_eq!(back, on[..on.len() - 1], "{order:?}");
        }
    }
}

#[test]
fn a_page_before_another_is_full() {
    let run = Run::new(0);
    let index = indexed(&run);
    let newest = numbers(&index.list(&Filter::default(), 8));
    let before = |order, until| Filter {
        order,
        until: Some(until),
        ..Filter::default()
    };
    // Three are newer than the fourth.
    let page = index.list(&before(Order::Newest, newest[3]), 8);
    assert_eq!((numbers(&page), page.before), (newest, 0));
    // It is no longer kept: the list starts from the beginning.
    let page = index.list(&before(Order::LowestReward, u64::MAX), 8);
    assert_eq!((page.rollouts.len(), page.before), (8, 0));
}

#[test]
fn a_failed_rollout_has_no_reward() {
    let run = Run::new(0);
    let mut index = indexed(&run);
    let failed = index
        .records
        .iter_mut()
        .find(|one| one.fate == Fate::Failed);
    let failed = failed.expect("one failed");
    failed.reward = 0.5;
    assert_eq!(failed.reward(), None);
    failed.fate = Fate::Filtered;
    assert_eq!(failed.reward(), Some(0.5));
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
    assert_eq!(index.count(), MOST_ROLLOUTS);
    assert!(index.first() >= Some(RolloutId(first)), "the oldest went");
}
