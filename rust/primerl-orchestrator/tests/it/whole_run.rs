//! Whole runs over loopback.

use crate::common::engine::{Engine, expected_logprobs};
use crate::common::session::Session;
use crate::common::trainer::{self, Batch};
use crate::common::worker::Worker;
use crate::common::{Orchestrator, Place, prepared, read_lines};
use primerl_core::Event;
use primerl_engine_server::mock::MockConfig;
use primerl_orchestrator::Config;
use primerl_orchestrator::envs::wire::WorkerRole;
use primerl_record::journal;
use std::collections::BTreeSet;
use std::time::Duration;

const EVALUATION: &str = r#"
[[eval.env]]
id = "task"
num_examples = 6
[eval.env.sampling]
temperature = 0.0
"#;

/// Every trained token has the id, log-probability and version the engine sampled it with.
fn check_tokens(batches: &[Batch]) {
    let mut rollouts = BTreeSet::new();
    for batch in batches {
        let mut trained = 0;
        for sequence in batch.sequences() {
            let expected = expected_logprobs(&sequence.ids, &sequence.versions);
            assert_eq!(
                sequence.logprobs, expected,
                "step {}, rollout {}",
                batch.step, sequence.rollout
            );
            for (mask, version) in sequence.mask.iter().zip(&sequence.versions) {
                assert_eq!(*mask == 1, *version >= 0);
                assert!(
                    *version < batch.step as i32,
                    "step {} trains tokens of version {version}",
                    batch.step
                );
            }
            trained += sequence
                .mask
                .iter()
                .map(|mask| u64::from(*mask))
                .sum::<u64>();
            rollouts.insert(sequence.rollout);
        }
        assert_eq!(trained, batch.loss_tokens);
    }
    assert_eq!(
        rollouts.len(),
        batches.len() * 8,
        "every rollout is trained once"
    );
}

async fn whole_run(turns: usize, extra: &str) {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config(extra, EVALUATION)).await;
    let mut engines = Vec::new();
    for _ in 0..2 {
        let mock = MockConfig {
            step_latency: Duration::from_millis(1),
            ..MockConfig::default()
        };
        let engine = Engine::start(mock).await;
        orchestrator.join(&engine.url).await;
        engines.push(engine);
    }
    let mut workers = Vec::new();
    for (environment, role, name) in [
        ("task", WorkerRole::Train, "a"),
        ("task", WorkerRole::Train, "b"),
        ("task-eval", WorkerRole::Eval, "c"),
    ] {
        let worker = Worker::register(&orchestrator.url, environment, role, name).await;
        workers.push(tokio::spawn(worker.work(turns)));
    }
    let training = tokio::spawn(trainer::train(orchestrator.url.clone(), place.output()));
    let reason = orchestrator.end().await.unwrap();
    assert!(reason.0.contains("all 4 steps"), "{}", reason.0);
    for worker in workers {
        worker.await.unwrap();
    }
    let batches = training.await.unwrap();
    assert_eq!(
        batches.iter().map(|batch| batch.step).collect::<Vec<_>>(),
        [1, 2, 3, 4]
    );
    check_tokens(&batches);

    let steps = read_lines(&place.output().join("steps.jsonl"));
    assert_eq!(steps.len(), 4);
    assert!(steps[0]["metrics"]["reward/all/mean"].as_f64().unwrap() > 0.0);
    for (batch, line) in batches.iter().zip(&steps) {
        check_metrics(batch, &line["metrics"]);
    }
    let evaluations = read_lines(&place.output().join("evals.jsonl"));
    let versions: Vec<_> = evaluations
        .iter()
        .map(|line| line["version"].as_u64().unwrap())
        .collect();
    assert_eq!(versions, [0, 4]);
    assert_eq!(evaluations[1]["environment"], "task-eval");
    assert_eq!(evaluations[1]["rollouts"], 6);
    assert_eq!(evaluations[1]["failed"], 0);
    evaluations
        .iter()
        .for_each(|line| check_examples(line, &place.output()));

    let mut entries = Vec::new();
    let folder = place.output().join("journal");
    journal::read_from(&folder, 0, |_, entry| entries.push(entry)).unwrap();
    let trained: BTreeSet<u64> = batches
        .iter()
        .flat_map(|batch| batch.sequences())
        .map(|sequence| sequence.rollout)
        .collect();
    let reported: BTreeSet<u64> = entries
        .iter()
        .filter_map(|journal::Entry(_, event)| match event {
            Event::RolloutFinished { rollout, .. } => Some(rollout.0),
            _ => None,
        })
        .collect();
    assert!(
        trained.is_subset(&reported),
        "every trained rollout is in the journal"
    );
    let times: Vec<_> = entries
        .iter()
        .map(|journal::Entry(time, _)| *time)
        .collect();
    assert!(times.is_sorted());
    for engine in engines {
        engine.stop().await;
    }
}

/// The scores of single examples are those that the line has the mean of.
fn check_examples(line: &serde_json::Value, output: &std::path::Path) {
    let name = format!("evaluations/v{}/task-eval.json", line["version"]);
    let text = std::fs::read_to_string(output.join(name)).unwrap();
    let found: serde_json::Value = serde_json::from_str(&text).unwrap();
    for shared in ["rollouts", "mean_reward"] {
        assert_eq!(found[shared], line[shared]);
    }
    let scores = found["scores"].as_object().unwrap();
    assert!(scores.contains_key("pass@1"), "{scores:?}");
    let count = found["examples"].as_array().unwrap().len();
    assert_eq!(
        found["keys"].as_array().unwrap().len(),
        count,
        "these workers send none"
    );
    for (name, scores) in scores {
        let scores = scores.as_array().unwrap().iter();
        let scores: Vec<f64> = scores.map(|score| score.as_f64().unwrap()).collect();
        assert_eq!(scores.len(), count);
        let mean = scores.iter().sum::<f64>() / count as f64;
        assert!((mean - line[name].as_f64().unwrap()).abs() < 1e-12);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_turn_run_trains_what_was_sampled() {
    whole_run(1, "max_async_level = 2").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_multi_turn_run_trains_what_was_sampled() {
    whole_run(3, "max_async_level = 1").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_synchronous_run_is_on_policy() {
    let place = Place::new();
    let config = place.config("max_async_level = 0", "");
    let batches = crate::common::trained(&place, config, MockConfig::default(), 1).await;
    check_tokens(&batches);
    for batch in &batches {
        for sequence in batch.sequences() {
            assert!(
                sequence
                    .versions
                    .iter()
                    .all(|version| *version == -1 || *version == batch.step as i32 - 1)
            );
        }
    }
}

/// Every answer is longer than one character, so every example is easy: all return when none is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_filters_files_its_examples() {
    let place = Place::new();
    let buffer = "[buffer]\nonline_difficulty_filtering = true\nenv_ratios = [1.0]";
    let orchestrator = Orchestrator::start(place.config("", buffer)).await;
    let engine = Engine::start(MockConfig::default()).await;
    orchestrator.join(&engine.url).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "a").await;
    let status = orchestrator.status().await;
    let examples = status["buffer"][0]["pools"]["normal"].as_u64().unwrap();
    let worker = tokio::spawn(worker.work(1));
    let batches = trainer::train(orchestrator.url.clone(), place.output()).await;
    check_tokens(&batches);
    orchestrator.end().await.unwrap();
    worker.await.unwrap();
    engine.stop().await;
    let steps = read_lines(&place.output().join("steps.jsonl"));
    let of = |step: usize, name: &str| {
        let metric = &steps[step]["metrics"][format!("buffer/{name}/task")];
        metric.as_f64().unwrap()
    };
    for step in 0..4 {
        let pools: f64 = ["easy", "normal", "hard"]
            .map(|pool| of(step, pool))
            .iter()
            .sum();
        assert_eq!(pools as u64, examples);
    }
    let moved: f64 = (0..4).map(|step| of(step, "into_easy")).sum();
    assert!(moved >= 4.0, "{moved} examples were filed as easy");
}

/// The trainer gets the metrics of the batch, in total and by environment, as in `steps.jsonl`.
fn check_metrics(batch: &trainer::Batch, line: &serde_json::Value) {
    for (name, value) in &batch.metrics {
        assert_eq!(line[name].as_f64(), Some(*value), "{name}");
    }
    let sequences = batch.sequences();
    let rollouts: BTreeSet<u64> = sequences.iter().map(|sequence| sequence.rollout).collect();
    let tokens: usize = sequences.iter().map(|sequence| sequence.ids.len()).sum();
    for of in ["all", "task"] {
        let metric = |name: &str| batch.metrics[name];
        let mean = metric(&format!("seq_len/{of}/mean"));
        assert!((mean * rollouts.len() as f64 - tokens as f64).abs() < 1e-6);
        assert!(metric(&format!("seq_len/{of}/min")) <= mean);
        assert!(metric(&format!("seq_len/{of}/max")) >= mean);
        assert!(metric(&format!("num_turns/{of}/min")) >= 1.0);
        assert_eq!(metric(&format!("is_truncated/{of}/mean")), 0.0);
        for kind in ["empty", "errored"] {
            assert_eq!(metric(&format!("{kind}_rollouts/{of}/count")), 0.0);
        }
    }
    assert_eq!(batch.metrics["errored_rollouts/all/mean"], 0.0);
    assert!(batch.metrics["progress/epoch"] > 0.0);
}

/// In place of [`Worker::work`], which is answered by the tests themselves where it comes too late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_finished_run_tells_the_workers_that_ask() {
    let place = Place::new();
    let engine = Engine::start(MockConfig::default()).await;
    let settings = place
        .toml("max_steps = 1", "")
        .replace("long_poll_s = 2.0", "long_poll_s = 0.1");
    let config = Config::from_toml(&settings, "test").unwrap();
    let Session {
        orchestrator,
        worker,
    } = Session::start(prepared(config), &engine).await;
    let (url, output) = (orchestrator.url.clone(), place.output());
    trainer::publish(&url, &output, 0).await;
    trainer::batch_bytes(&url, 1, 0).await.expect("a batch");

    // Every rollout is sampled: this one is asked for again and again, until the run is over.
    let idle = Worker::register(&url, "task", WorkerRole::Train, "idle").await;
    let first = idle
        .lease_once()
        .await
        .unwrap()
        .expect("the run is not over");
    assert!(!first.finished);
    let asking = tokio::spawn(async move {
        while !idle
            .lease_once()
            .await
            .unwrap()
            .expect("the run's answer")
            .finished
        {}
        idle.leave().await;
    });
    trainer::publish(&url, &output, 1).await;
    orchestrator.end().await.unwrap();
    asking.await.unwrap();
    worker.await.unwrap();
}
