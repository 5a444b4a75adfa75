use super::*;
use crate::batch::encode;
use crate::spool::Spool;
use crate::testing::{Run, scenario};
use primerl_core::Core;
use primerl_core::counters::Ended;
use std::collections::BTreeMap;
use std::fs;

#[test]
fn reports_match_what_happened() {
    for seed in 0..6 {
        let run = Run::new(seed);
        let counters = run.simulator.core.counters();
        let report = check(run.path()).expect("reads");
        assert_eq!(report.broken, None, "seed {seed}");
        assert_eq!(
            (report.steps, report.rollouts_trained),
            (7, counters.trained)
        );
        assert_eq!(report.story.events, run.events.len() as u64);
        let kept = 8 - run.simulator.core.batches_kept_from().0;
        assert_eq!((report.batches_kept, report.batches_owed), (kept, 0));

        let summary = summary(run.path()).expect("reads");
        assert_eq!(summary.counters(), counters);
        assert_eq!(summary.evaluations, run.simulator.observer.evaluations);
        assert_eq!(summary.events.values().sum::<u64>(), report.story.events);

        let dropped = dropped(run.path()).expect("reads");
        assert_eq!(dropped.rollouts_ended, counters.ended());
        let mut by_end: BTreeMap<Ended, u64> = BTreeMap::new();
        for reason in &dropped.rollouts {
            *by_end.entry(reason.ended).or_default() += reason.count;
            let told = reason.last.len() as u64;
            assert_eq!(told, reason.count.min(5));
        }
        for (ended, count) in [
            (Ended::Filtered, counters.filtered),
            (Ended::Stale, counters.stale),
            (Ended::Failed, counters.failed),
            (Ended::Cancelled, counters.cancelled),
        ] {
            assert_eq!(by_end.get(&ended).copied().unwrap_or(0), count, "{ended:?}");
        }
        let losses = run.simulator.core.discards();
        for (reason, count) in &losses.voided {
            let told = dropped
                .rollouts
                .iter()
                .find(|told| told.ended == reason.ended() && told.reason == reason.name());
            // A stale rollout may also have been cancelled, under the same name.
            assert!(told.is_some_and(|told| told.count >= *count), "{reason:?}");
        }
        let groups: u64 = dropped.groups.iter().map(|told| told.count).sum();
        assert!(groups >= losses.groups_dropped);
    }
}

#[test]
fn a_trained_rollout_is_found_in_its_group_and_its_step() {
    let run = Run::new(2);
    for (id, batch) in &run.simulator.observer.batches {
        let story = step(run.path(), *id).expect("was cut");
        assert_eq!(story.loss_tokens, batch.loss_tokens);
        let staleness: BTreeMap<u64, u64> = (0..10)
            .filter_map(|lag| {
                let count = *batch.metrics.get(&format!("staleness/{lag}"))?;
                (count > 0.0).then_some((lag, count as u64))
            })
            .collect();
        assert_eq!(story.staleness, staleness);
        assert_eq!(story.groups.len(), 2);
        let told: Vec<RolloutId> = story
            .groups
            .iter()
            .flat_map(|group| group.rollouts.iter().map(|line| line.rollout))
            .collect();
        let mut trained = fates::rollouts_of(batch);
        let mut sorted = told.clone();
        sorted.sort();
        trained.sort();
        assert_eq!(sorted, trained);
        assert!(
            story
                .fetched
                .iter()
                .any(|fetched| fetched.fetched_s.is_some())
        );
        assert!(story.published_s.iter().all(|at| *at >= story.cut_s));
        assert!(story.overtaken || !story.proved.is_empty());

        let line = &story.groups[0].rollouts[0];
        let group = group(run.path(), line.group).expect("is known");
        assert_eq!((group.step, group.cut_s), (Some(*id), Some(story.cut_s)));
        let good = group
            .rollouts
            .iter()
            .filter(|line| line.ended == Some(Ended::Trained));
        assert_eq!(good.count(), story.groups[0].rollouts.len());
        assert!(group.complete_s <= group.cut_s && group.complete_s.is_some());

        check_trained(&run, line, *id);
    }
}

/// `line` is how its step shows it.
fn check_trained(run: &Run, line: &group::RolloutLine, step: Step) {
    let rollout = rollout(run.path(), line.rollout).expect("is known");
    let end = rollout.end.expect("it ended");
    assert_eq!((end.ended, end.step), (Ended::Trained, Some(step)));
    let player = rollout
        .reports
        .iter()
        .find(|trace| trace.session == "player");
    assert!(player.is_some_and(|trace| line.rewards.contains(&trace.reward)));
    assert_eq!(rollout.turns.len() as u32, line.turns);
    for turn in &rollout.turns {
        let sampled: u32 = turn.versions.iter().map(|(_, tokens)| tokens).sum();
        assert_eq!(u64::from(sampled), turn.sampled_tokens);
        assert!(turn.after_s.is_some_and(|after| after >= 0.0));
        assert!(
            rollout
                .sampling
                .first()
                .is_some_and(|(at, _)| Some(*at) <= turn.at_s)
        );
        if let Some(parent) = turn.parent {
            let parent = &rollout.turns[parent as usize];
            let before = parent.prompt_tokens + parent.sampled_tokens;
            assert_eq!(turn.prompt_tokens, before + turn.new_prompt_tokens);
        }
    }
}

#[test]
fn time_spent_adds_up_to_all_of_it() {
    for seed in 0..4 {
        let run = Run::new(seed);
        let report = idle(run.path()).expect("reads");
        assert!(report.seconds > 0.0 && report.mean_in_flight > 0.0);
        let adds_up = |states: &[spans::Share], whole: f64| {
            let seconds: f64 = states.iter().map(|share| share.seconds).sum();
            let shares: f64 = states.iter().map(|share| share.share).sum();
            assert!((seconds - whole).abs() < 1e-3, "{seconds} of {whole}");
            assert!((shares - 1.0).abs() < 1e-9);
        };
        adds_up(&report.trainer, report.seconds);
        assert!(
            report
                .trainer
                .iter()
                .any(|share| share.state == "waits/rollouts")
        );
        assert!(report.trainer.iter().any(|share| share.state == "busy"));
        assert_eq!(report.engines.len(), 2);
        for engine in &report.engines {
            adds_up(&engine.states, report.seconds);
            assert!(engine.states.iter().any(|share| share.state == "serves"));
        }
        assert_eq!(report.workers.len(), 2);
        for workers in &report.workers {
            adds_up(&workers.states, workers.worker_seconds);
        }
        let waits = &report.longest_waits;
        assert!(
            waits
                .windows(2)
                .all(|pair| pair[0].seconds >= pair[1].seconds)
        );
    }
}

#[test]
fn a_journal_without_its_beginning_starts_from_a_snapshot() {
    let run = Run::new(1);
    let (before, core) = run.prune(run.events.len().div_ceil(2));
    let first = core.next_step();
    let report = check(run.path()).expect("reads");
    assert_eq!(report.broken, None);
    assert_eq!((report.story.events_before, report.steps), (before, 7));
    assert_eq!(report.story.first_step, first);
    assert!(first > Step(1));
    let error = step(run.path(), Step(1)).expect_err("is gone").to_string();
    assert!(
        error.contains(&format!("it holds steps from {first} to 7"))
            && error.contains("is not kept"),
        "{error}"
    );
    let dropped = dropped(run.path()).expect("reads");
    assert!(dropped.rollouts_ended < run.simulator.core.counters().ended());
    idle(run.path()).expect("reads");
}

#[test]
fn a_batch_that_is_missing_or_another_is_named() {
    let run = Run::new(3);
    let kept_from = run.simulator.core.batches_kept_from();
    let file = run.path().join("spool/step_7/rank_1.msgpack");
    assert!(kept_from <= Step(7) && file.is_file());
    let bytes = fs::read(&file).expect("reads");
    fs::write(&file, &bytes[1..]).expect("writes");
    let broken = check(run.path()).expect("reads").broken.expect("is broken");
    assert!(broken.what.contains("step_7/rank_1.msgpack"), "{broken:?}");
    assert!(broken.event.is_some());
    fs::remove_file(&file).expect("removes");
    let broken = check(run.path()).expect("reads").broken.expect("is broken");
    assert!(
        broken.what.contains("the batch of step 7 is not in"),
        "{broken:?}"
    );
    // Killed when it was cut: the next start writes it.
    let cut = step(run.path(), Step(7)).expect("was cut").cut_s;
    let until = run
        .events
        .iter()
        .take_while(|(now, _)| seconds(*now) <= cut);
    let events: Vec<_> = until.cloned().collect();
    run.write_journal(&events, 0, Core::new(scenario(3).config).expect("valid"));
    for step in 1..=6 {
        let batch = &run.simulator.observer.batches[&Step(step)];
        let bodies = [0, 1].map(|rank| encode(batch, rank).expect("encodes"));
        Spool::new(run.path(), 2)
            .write(Step(step), &bodies)
            .expect("writes");
    }
    let report = check(run.path()).expect("reads");
    assert_eq!((report.broken, report.batches_owed), (None, 1));
}

#[test]
fn what_does_not_exist_is_named() {
    let run = Run::new(0);
    let of = |question| {
        answer(run.path(), question)
            .expect_err("is unknown")
            .to_string()
    };
    let last = run.simulator.observer.batches.len();
    assert_eq!(
        of(Question::Step(Step(99))),
        format!("there is no step 99 in the journal: it holds steps from 1 to {last}")
    );
    let rollout = of(Question::Rollout(RolloutId(u64::MAX)));
    assert!(rollout.contains("it holds rollouts from 0 to"), "{rollout}");
    let group = of(Question::Group(GroupId(u64::MAX)));
    assert!(group.contains("it holds groups from 0 to"), "{group}");
    let empty = tempfile::tempdir().expect("a temporary folder");
    let error = answer(empty.path(), Question::Summary)
        .expect_err("is empty")
        .to_string();
    assert!(error.contains("holds no journal"), "{error}");

    let segment = run.journal().join("000000000000.log");
    let mut bytes = fs::read(&segment).expect("reads");
    let whole = bytes.len();
    bytes.truncate(whole - 3);
    fs::write(&segment, &bytes).expect("writes");
    let torn = check(run.path()).expect("a torn tail is read over");
    assert_eq!(torn.broken, None);
    assert!(torn.story.torn_bytes > 0);
    bytes[whole / 2] ^= 1;
    fs::write(&segment, &bytes).expect("writes");
    let error = of(Question::Check);
    assert!(
        error.contains("000000000000.log") && error.contains("byte"),
        "{error}"
    );
}

#[test]
fn the_buffer_is_shown_with_an_example() {
    let run = Run::new(4);
    let shown = buffer(run.path(), Some(("train", ExampleIndex(3)))).expect("reads");
    assert_eq!(shown.report, run.simulator.core.buffer_report());
    assert!(shown.report.online_difficulty_filtering);
    let history = run
        .simulator
        .core
        .example_history(EnvironmentId(0), ExampleIndex(3));
    assert_eq!(shown.example, history);
    let wrong = |environment, example| {
        let asked = Some((environment, ExampleIndex(example)));
        buffer(run.path(), asked)
            .expect_err("is unknown")
            .to_string()
    };
    assert!(wrong("train", 20).contains("examples 0 to 19"));
    assert!(wrong("trian", 0).contains("there are: train"));
}

#[test]
fn samples_are_those_of_the_batch() {
    for seed in 0..3 {
        let run = Run::new(seed);
        let steps = [Step(1), Step(3), Step(1000)];
        let all = samples(run.path(), &steps, 1.0).expect("reads").steps;
        let some = samples(run.path(), &steps, 0.3).expect("reads").steps;
        assert_eq!(all.keys().copied().collect::<Vec<_>>(), [1, 3]);
        for (step, lines) in &all {
            let batch = &run.simulator.observer.batches[&Step(*step)];
            let sequences = batch.ranks.iter().flatten();
            let sequences = sequences.flat_map(|micro_batch| micro_batch.sequences());
            let mut packed: Vec<_> = sequences
                .map(|weighted| (weighted.sample.rollout, weighted.sample.token_ids()))
                .collect();
            let mut told: Vec<_> = lines
                .iter()
                .map(|line| {
                    let text = line.text.as_ref().expect("all are shown");
                    assert_eq!(text.learnt.len(), line.tokens);
                    let learnt: u64 = text.learnt.iter().map(|one| u64::from(*one)).sum();
                    assert_eq!(learnt, line.loss_tokens);
                    assert!(line.reward.is_some());
                    (line.rollout, text.token_ids.clone())
                })
                .collect();
            packed.sort();
            told.sort();
            assert_eq!(told, packed);
            // A smaller share is the first part of the same order.
            let shown = (lines.len() as f64 * 0.3).ceil() as usize;
            for (line, of_some) in lines.iter().zip(&some[step]) {
                assert_eq!(of_some.text.is_some(), of_some.place < shown);
                let text = of_some.text.clone().or(line.text.clone());
                assert_eq!(
                    *line,
                    SampleLine {
                        text,
                        ..of_some.clone()
                    }
                );
            }
        }
    }
}
