//! Eight runs that are ill, each in one way, and healthy ones.

use super::*;
use serde_json::{Map, json};

const SEED: u64 = 7;

/// Noise from -1 to 1, the same for a step in each run of the tests.
fn noise(step: usize) -> f64 {
    let mut state = (step as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ SEED;
    for _ in 0..3 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
    }
    (state >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
}

/// How far the run is, from 0 to 1.
fn far(step: usize, steps: usize) -> f64 {
    step as f64 / steps as f64
}

/// What a healthy run writes in a step.
fn healthy(step: usize, steps: usize) -> Map<String, serde_json::Value> {
    let rise = 0.35 + 0.6 * far(step, steps).powf(0.5) + 0.05 * noise(step);
    let values = json!({
        "step": step + 1,
        "reward/all/mean": rise,
        "advantage/all/std": 0.8 + 0.1 * noise(step),
        "errored_rollouts/all/mean": 0.01,
        "is_truncated/all/mean": 0.02,
        "mismatch_kl/all/mean": 1e-3,
        "entropy/all/mean": 1.0 - 0.9 * far(step, steps),
        "rollouts/stale": 1.0,
        "staleness/0": 20.0,
        "staleness/1": 44.0,
        "time/step": 10.0,
        "time/wait_for_batch": 3.0,
    });
    match values {
        serde_json::Value::Object(values) => values,
        _ => unreachable!("an object was written"),
    }
}

/// Rules that speak of a run whose steps differ from a healthy one's in what `change` sets.
fn rules(
    steps: usize,
    change: impl Fn(usize, &mut Map<String, serde_json::Value>),
) -> Vec<&'static str> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let lines = (0..steps).map(|step| {
        let mut values = healthy(step, steps);
        change(step, &mut values);
        serde_json::to_string(&values).expect("serializes") + "\n"
    });
    std::fs::write(
        folder.path().join("metrics.jsonl"),
        lines.collect::<String>(),
    )
    .expect("writes");
    let mut curves = Curves::new(folder.path());
    curves.refresh().expect("reads");
    findings(&curves)
        .iter()
        .map(|finding| finding.rule)
        .collect()
}

fn set(values: &mut Map<String, serde_json::Value>, name: &str, value: f64) {
    values.insert(name.to_owned(), json!(value));
}

#[test]
fn healthy_runs_are_quiet() {
    let none: Vec<&str> = Vec::new();
    assert_eq!(rules(60, |_, _| {}), none, "one that learns");
    assert_eq!(rules(4, |_, _| {}), none, "one that has begun");
    assert_eq!(rules(0, |_, _| {}), none, "one without a step");
    let good = |step: usize, values: &mut Map<_, _>| {
        set(values, "reward/all/mean", 0.97 + 0.02 * noise(step));
    };
    assert_eq!(rules(200, good), none, "one that was good from the start");
    let done = |step: usize, values: &mut Map<_, _>| {
        if step > 40 {
            set(values, "reward/all/mean", 1.0);
            set(values, "advantage/all/std", 0.0);
            set(values, "entropy/all/mean", 0.01);
        }
    };
    assert_eq!(rules(80, done), none, "one that has learnt all of it");
    let noisy = |step: usize, values: &mut Map<_, _>| {
        let reward = 0.2 + 0.5 * far(step, 100) + 0.15 * noise(step);
        set(values, "reward/all/mean", reward);
        set(values, "errored_rollouts/all/mean", 0.05);
        set(values, "rollouts/stale", 6.0);
        set(values, "time/wait_for_batch", 5.0);
    };
    assert_eq!(rules(100, noisy), none, "a noisy one");
    let recovered = |step: usize, values: &mut Map<_, _>| {
        if (20..30).contains(&step) {
            set(values, "errored_rollouts/all/mean", 1.0);
            set(values, "mismatch_kl/all/mean", 3.0);
        }
    };
    assert_eq!(rules(60, recovered), none, "one that has recovered");
}

#[test]
fn each_illness_is_named() {
    let flat = |step: usize, values: &mut Map<_, _>| {
        set(values, "reward/all/mean", 0.3 + 0.1 * noise(step));
        set(values, "entropy/all/mean", 1.0);
    };
    assert_eq!(rules(60, flat), ["reward_flat"]);
    let repeats = |step: usize, values: &mut Map<_, _>| {
        set(values, "reward/all/mean", 0.3 + 0.1 * noise(step));
        set(
            values,
            "entropy/all/mean",
            (0.9 - 0.05 * step as f64).max(0.001),
        );
    };
    assert_eq!(rules(30, repeats), ["entropy_collapse"]);
    let drifts = |step: usize, values: &mut Map<_, _>| {
        set(
            values,
            "mismatch_kl/all/mean",
            1e-3 * 1.15_f64.powi(step as i32),
        );
    };
    assert_eq!(rules(60, drifts), ["mismatch"]);
    let waits = |_: usize, values: &mut Map<_, _>| set(values, "time/wait_for_batch", 8.0);
    assert_eq!(rules(60, waits), ["trainer_idle"]);
    let cut = |step: usize, values: &mut Map<_, _>| {
        set(values, "is_truncated/all/mean", far(step, 60));
    };
    assert_eq!(rules(60, cut), ["truncation"]);
    let fails = |_: usize, values: &mut Map<_, _>| set(values, "errored_rollouts/all/mean", 0.4);
    assert_eq!(rules(60, fails), ["environment_errors"]);
    let equal = |_: usize, values: &mut Map<_, _>| {
        set(values, "reward/all/mean", 0.0);
        set(values, "advantage/all/std", 0.0);
    };
    assert_eq!(rules(60, equal), ["no_signal"]);
    let old = |_: usize, values: &mut Map<_, _>| set(values, "rollouts/stale", 40.0);
    assert_eq!(rules(60, old), ["too_stale"]);
    let falls = |step: usize, values: &mut Map<_, _>| {
        let reward = if step < 30 { 0.9 } else { 0.2 };
        set(values, "reward/all/mean", reward + 0.05 * noise(step));
    };
    assert_eq!(rules(60, falls), ["reward_falls"]);
}

#[test]
fn a_finding_has_its_numbers() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let lines = (0..20).map(|step| {
        json!({"step": step + 1, "errored_rollouts/all/mean": 0.25}).to_string() + "\n"
    });
    std::fs::write(folder.path().join("steps.jsonl"), lines.collect::<String>()).expect("writes");
    let mut curves = Curves::new(folder.path());
    curves.refresh().expect("reads");
    let found = findings(&curves);
    assert_eq!(found.len(), 1);
    assert_eq!(
        found[0].what,
        "25 % of the rollouts of the last 10 steps failed"
    );
    assert_eq!(found[0].curve, "errored_rollouts/all/mean");
}
