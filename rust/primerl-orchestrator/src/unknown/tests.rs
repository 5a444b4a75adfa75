use super::*;
use bytes::Bytes;
use primerl_core::testing::config;
use primerl_core::{Event, PolicyVersion, Step};
use primerl_service::files::whole_lines;
use std::fs;

fn core_that_published(version: Option<u64>) -> Core {
    let mut core = Core::new(config()).expect("a valid config");
    if let Some(version) = version {
        let event = Event::WeightsPublished {
            version: PolicyVersion(version),
            manifest: "m".into(),
            digest: "d".into(),
        };
        core.handle(event, core.now());
        assert_eq!(core.published_version(), Some(PolicyVersion(version)));
    }
    core
}

fn begun(steps: u64) -> tempfile::TempDir {
    let place = tempfile::tempdir().expect("a temporary folder");
    let spool = Spool::new(place.path(), 1);
    let mut lines = [String::new(), String::new()];
    for step in 1..=steps {
        spool
            .write(Step(step), &[Bytes::from(vec![step as u8])])
            .expect("is written");
        lines[0] += &format!("{{\"step\": {step}}}\n");
        lines[1] += &format!("{{\"version\": {}}}\n", step - 1);
    }
    lines[1] += "{\"model\": \"m\", \"policy_at_the_time\": 9}\n";
    for (name, lines) in ["steps.jsonl", "evals.jsonl"].iter().zip(lines) {
        fs::write(place.path().join(name), lines).expect("is written");
    }
    place
}

fn count(place: &tempfile::TempDir, name: &str) -> usize {
    whole_lines(&place.path().join(name)).expect("reads").len()
}

#[test]
fn what_the_journal_does_not_know_is_moved_and_kept() {
    let place = begun(3);
    set_aside(place.path(), &core_that_published(Some(0))).expect("moves");
    let spool = Spool::new(place.path(), 1);
    assert!(spool.steps_from(Step(0)).expect("reads").is_empty());
    for step in 1..=3_u8 {
        let moved = format!("replaced_spool/step_{step}/rank_0.msgpack");
        assert_eq!(fs::read(place.path().join(moved)).expect("is kept"), [step]);
    }
    let names = ["steps.jsonl", "replaced_steps.jsonl"];
    assert_eq!(names.map(|name| count(&place, name)), [0, 3]);
    let names = ["evals.jsonl", "replaced_evals.jsonl"];
    assert_eq!(names.map(|name| count(&place, name)), [2, 2]);
    // The next time nothing is left to do.
    set_aside(place.path(), &core_that_published(Some(0))).expect("there is nothing to do");
    assert_eq!(names.map(|name| count(&place, name)), [2, 2]);
}

#[test]
fn what_is_measured_of_other_models_before_weights_are_published_stays() {
    let place = begun(2);
    set_aside(place.path(), &core_that_published(None)).expect("moves");
    assert_eq!(count(&place, "evals.jsonl"), 3);
}
