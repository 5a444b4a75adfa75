//! A run that is over: how it ended, from its launcher's summary, and its counts, from the journal. The launcher last
//! asked for the status before the end, so its counts are not final; but rates and shares are only there.

use primerl_core::Status;
use serde_json::{Value, json};
use std::path::Path;

/// The launcher's `run/summary.json`; `null` if the launcher was killed, or there was none.
#[derive(Debug, Default)]
pub struct Summary {
    /// `{exit_code, reason, wall_s}`, if it is of the last session.
    pub end: Value,
    pub status: Value,
}

impl Summary {
    pub fn read(output_dir: &Path) -> Summary {
        let file = output_dir.join("run/summary.json");
        let content = std::fs::read(&file).unwrap_or_default();
        let mut summary: Value = serde_json::from_slice(&content).unwrap_or_default();
        if !summary.is_object() {
            return Summary::default();
        }
        let end = match is_of_the_last_session(output_dir, &file) {
            true => json!({
                "exit_code": summary["exit_code"],
                "reason": summary["reason"],
                "wall_s": summary["wall_s"],
            }),
            false => Value::Null,
        };
        let status = summary["status"].take();
        Summary { end, status }
    }
}

/// An orchestrator that was started later continues the run, or its launcher was killed.
fn is_of_the_last_session(output_dir: &Path, summary: &Path) -> bool {
    let changed = |file: &Path| std::fs::metadata(file).and_then(|found| found.modified());
    let started = changed(&output_dir.join("run/orchestrator.json"));
    match (changed(summary), started) {
        (Ok(written), Ok(started)) => written >= started,
        _ => true,
    }
}

/// `told`, the status that was seen last, corrected by what the journal knows better; `null` if there is neither.
pub fn status(told: Value, core: Option<&Status>, seconds: Option<f64>) -> Value {
    // A run that never answered its launcher has none.
    let is_one = told["run"].is_object();
    let mut status = if is_one { told } else { Value::Null };
    if let Some(core) = core {
        correct(&mut status, core, seconds);
    }
    if status.is_object() {
        // The trainer's last state; no process does or waits for anything any more.
        if let Some(trainer) = status["trainer"].as_object_mut() {
            trainer.insert("doing".into(), Value::Null);
        }
        status["waits"] = json!([]);
        status["evaluations"] = Value::Null;
    }
    status
}

/// Puts the journal's counts into a status.
fn correct(status: &mut Value, core: &Status, seconds: Option<f64>) {
    let elapsed_s = status["run"]["elapsed_s"].as_f64().or(seconds);
    status["run"] = json!({
        "step": core.run.next_step.0.saturating_sub(1),
        "max_steps": core.run.max_steps,
        "policy_version": core.run.policy_version,
        "published_version": core.run.published_version,
        "elapsed_s": elapsed_s,
        "finished": core.run.finished,
    });
    for (name, value) in [
        ("rollouts", json!(core.rollouts)),
        ("environments", json!(core.environments)),
        ("failures", json!(core.failures)),
        ("errors", json!(core.errors)),
        ("cancelled", json!(core.cancelled)),
        ("voided", json!(core.voided)),
        ("last_step", json!(core.last_step)),
    ] {
        status[name] = value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, SystemTime};

    #[test]
    fn the_end_is_shown_if_it_is_of_the_last_session() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let run = folder.path().join("run");
        std::fs::create_dir(&run).expect("is made");
        assert_eq!(Summary::read(folder.path()).end, Value::Null);
        std::fs::write(run.join("summary.json"), "[1]").expect("is written");
        assert_eq!(Summary::read(folder.path()).status, Value::Null);
        let content = r#"{"exit_code": 1, "reason": "it broke", "wall_s": 3.5, "status": {"tokens": {"sampled": 7}}}"#;
        std::fs::write(run.join("summary.json"), content).expect("is written");
        let found = Summary::read(folder.path());
        let end = json!({"exit_code": 1, "reason": "it broke", "wall_s": 3.5});
        assert_eq!(found.end, end);
        assert_eq!(found.status["tokens"]["sampled"], 7);
        // It was started again since.
        let orchestrator = std::fs::File::create(run.join("orchestrator.json")).expect("is made");
        let later = SystemTime::now() + Duration::from_secs(60);
        orchestrator.set_modified(later).expect("is set");
        assert_eq!(Summary::read(folder.path()).end, Value::Null);
    }

    #[test]
    fn counts_are_the_journals_and_no_process_is_active() {
        let run = crate::testing::Run::new(0);
        let core = run.simulator.core.status();
        let told = json!({
            "run": {"step": 1, "elapsed_s": 9.0},
            "rollouts": {"failed": 1},
            "trainer": {"doing": "loading the model (for 12 s)", "idle_share": 0.25},
            "waits": [{"who": "the monitor"}],
        });
        let status = status(told, Some(&core), Some(3.0));
        assert_eq!(status["rollouts"], json!(core.rollouts));
        assert_eq!(status["run"]["step"], core.run.next_step.0 - 1);
        assert_eq!(status["run"]["elapsed_s"], 9.0);
        assert_eq!(
            status["trainer"],
            json!({"doing": null, "idle_share": 0.25})
        );
        assert_eq!(status["waits"], json!([]));
        // Its launcher was killed.
        let status = super::status(Value::Null, Some(&core), Some(3.0));
        assert_eq!(status["run"]["elapsed_s"], 3.0);
        for nothing in [json!([]), json!({}), json!({"run": 3})] {
            assert_eq!(super::status(nothing, None, None), Value::Null);
        }
        let odd = super::status(json!({"run": {}, "trainer": "?"}), None, None);
        assert_eq!(odd["trainer"], "?");
    }
}
