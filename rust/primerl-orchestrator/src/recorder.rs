//! The thread that writes a run's files: spool, `steps.jsonl`, `evals.jsonl`, snapshots of the core, the orchestrator's
//! part of the trainer's checkpoints. Jobs are done in order, so a batch is on disk before its first answer, and
//! everything is on disk before the run counts as finished.
//!
//! After a restart the core repeats its effects since the last snapshot: what is on disk is not written again.

use crate::app::App;
use crate::batches::Batches;
use crate::envs::joining::FirstWorkers;
use crate::failure::{Failures, RunError};
use crate::telemetry::Telemetry;
use primerl_core::effect::EvaluationReport;
use primerl_core::pack::PackedBatch;
use primerl_core::{Core, PolicyVersion, Step};
use primerl_record::journal::{self, Identity};
use primerl_record::kept_state::State;
use primerl_service::files::{self, WriteError};
use primerl_service::inbox::BatchReply;
use primerl_service::waits::Overdue;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};

/// The newest version when another model than the policy was measured.
const MEASURED_AT: &str = "policy_at_the_time";

/// A disk that works on one job for this long counts as lost.
const STUCK: Duration = Duration::from_secs(25);

enum Job {
    Cut(Arc<PackedBatch>),
    Answer {
        step: Step,
        rank: u32,
        waiter: oneshot::Sender<BatchReply>,
    },
    /// Batches of earlier steps are no longer needed.
    Forget(Step),
    Evaluated(EvaluationReport),
    Snapshot(u64, Box<Core>),
    /// The core after so many events, to be kept next to the trainer's checkpoint of a step.
    State(Step, u64, Box<Core>),
    Finished(String),
    Failed(String),
}

impl Job {
    /// What the thread waits for during this job, and the result of a wait that is too long.
    fn described(&self) -> (String, Overdue) {
        match self {
            Job::Cut(batch) => (
                format!("the disk to take the batch of step {}", batch.step),
                Overdue::FailsTheRun,
            ),
            Job::Answer { step, .. } => (
                format!("the disk to give the batch of step {step}"),
                Overdue::FailsTheRun,
            ),
            Job::Snapshot(number, _) => (
                format!("the disk to take the core after event {number}"),
                Overdue::IsNamed,
            ),
            Job::State(step, ..) => (
                format!("the disk to take the state at the checkpoint of step {step}"),
                Overdue::IsNamed,
            ),
            Job::Forget(_) => ("the disk to delete batches".into(), Overdue::IsNamed),
            Job::Evaluated(_) => (
                "the disk to take an evaluation".into(),
                Overdue::FailsTheRun,
            ),
            Job::Finished(_) | Job::Failed(_) => ("the end".into(), Overdue::IsNamed),
        }
    }
}

/// The handle of the thread.
#[derive(Clone, Debug)]
pub(crate) struct Recorder(mpsc::Sender<Job>);

/// The run's folders, and the settings that it must keep.
pub(crate) struct Place {
    pub output_dir: PathBuf,
    pub identity: Identity,
    /// Keep batches that are no longer needed.
    pub keep_spool: bool,
    /// A journal larger than this loses its oldest events.
    pub journal_bytes: u64,
}

impl Recorder {
    /// The thread ends when every `Recorder` is gone. `finished` is set once the run is over and recorded.
    pub fn start(
        place: Place,
        batches: Batches,
        app: &App,
        finished: watch::Sender<Option<String>>,
    ) -> std::io::Result<(Recorder, JoinHandle<()>)> {
        let (jobs, receiver) = mpsc::channel();
        let failures = app.failures.clone();
        let writer = Writer::open(place, batches, app, finished)?;
        let thread = std::thread::Builder::new()
            .name("recorder".into())
            .spawn(move || writer.run(&receiver, &failures))?;
        Ok((Recorder(jobs), thread))
    }

    pub fn cut(&self, batch: Arc<PackedBatch>) {
        self.send(Job::Cut(batch));
    }

    pub fn answer(&self, step: Step, rank: u32, waiter: oneshot::Sender<BatchReply>) {
        self.send(Job::Answer { step, rank, waiter });
    }

    pub fn forget(&self, before: Step) {
        self.send(Job::Forget(before));
    }

    pub fn evaluated(&self, report: EvaluationReport) {
        self.send(Job::Evaluated(report));
    }

    pub fn snapshot(&self, number: u64, core: Box<Core>) {
        self.send(Job::Snapshot(number, core));
    }

    pub fn keep_state(&self, step: Step, number: u64, core: Box<Core>) {
        self.send(Job::State(step, number, core));
    }

    pub fn finished(&self, reason: String) {
        self.send(Job::Finished(reason));
    }

    /// The run fails once everything before is on disk.
    pub fn failed(&self, reason: String) {
        self.send(Job::Failed(reason));
    }

    fn send(&self, job: Job) {
        // The thread only ends early after it has reported why.
        let _ = self.0.send(job);
    }
}

struct Writer {
    place: Place,
    /// Names, indexed by environment.
    environments: Vec<String>,
    /// By environment: the model that is measured instead of the policy.
    other_models: Vec<Option<String>>,
    /// By environment: the training environment that it validates.
    validated: Vec<Option<String>>,
    /// They have said by which key an example is known.
    first_workers: Arc<FirstWorkers>,
    origin: Instant,
    telemetry: Arc<Telemetry>,
    finished: watch::Sender<Option<String>>,
    batches: Batches,
    /// The entries of `steps.jsonl` and `evals.jsonl`.
    steps: BTreeSet<Step>,
    /// For each evaluation, how often failed rollouts were measured again.
    evaluated: BTreeMap<(u32, PolicyVersion), u64>,
}

/// For each evaluation among the lines of `evals.jsonl`, how often failed rollouts were measured again.
fn evaluated_in(
    lines: &[serde_json::Value],
    environments: &[String],
) -> BTreeMap<(u32, PolicyVersion), u64> {
    let known = lines.iter().filter_map(|line| {
        let index = environments
            .iter()
            .position(|name| line["environment"] == *name)?;
        let version = line["version"].as_u64().or(line[MEASURED_AT].as_u64())?;
        let again = line["measured_again"].as_u64().unwrap_or(0);
        Some(((index as u32, PolicyVersion(version)), again))
    });
    known.collect()
}

impl Writer {
    fn open(
        place: Place,
        batches: Batches,
        app: &App,
        finished: watch::Sender<Option<String>>,
    ) -> std::io::Result<Writer> {
        let environments = app.environment_names();
        let evaluations = json_lines(&place.output_dir.join("evals.jsonl"))?;
        let evaluated = evaluated_in(&evaluations, &environments);
        *app.telemetry.evaluations.lock() = evaluations;
        Ok(Writer {
            steps: steps_in(&place.output_dir.join("steps.jsonl"))?,
            batches,
            evaluated,
            environments,
            other_models: app.config.measured_models(),
            validated: app.config.validated(),
            first_workers: Arc::clone(&app.first_workers),
            origin: app.origin,
            telemetry: Arc::clone(&app.telemetry),
            finished,
            place,
        })
    }

    fn run(mut self, jobs: &mpsc::Receiver<Job>, failures: &Failures) {
        for job in jobs {
            let (what, overdue) = job.described();
            let waits = self.telemetry.waits.clone();
            let _waiting = waits.begin("the recorder", what, STUCK, overdue);
            if let Err(error) = self.work(job) {
                failures.fail(error);
                return;
            }
        }
    }

    fn work(&mut self, job: Job) -> Result<(), RunError> {
        match job {
            Job::Cut(batch) => self.cut(&batch),
            Job::Answer { step, rank, waiter } => {
                let body = self.batches.body(step, rank)?;
                // A trainer that hung up asks again.
                let _ = waiter.send(BatchReply::Batch(body));
                Ok(())
            }
            Job::Forget(before) => self.batches.forget(before, self.place.keep_spool),
            Job::Evaluated(report) => self.evaluated(report),
            Job::Snapshot(number, core) => self.snapshot(number, &core),
            Job::State(step, number, core) => self.keep_state(step, number, &core),
            Job::Finished(reason) => {
                self.finished.send_replace(Some(reason));
                Ok(())
            }
            Job::Failed(reason) => Err(RunError::Core { reason }),
        }
    }

    fn cut(&mut self, batch: &PackedBatch) -> Result<(), RunError> {
        self.batches.add(batch)?;
        if !self.steps.insert(batch.step) {
            return Ok(());
        }
        let line = serde_json::json!({
            "step": batch.step,
            "time_s": self.origin.elapsed().as_secs_f64(),
            "loss_tokens": batch.loss_tokens,
            "metrics": batch.metrics,
        });
        let path = self.place.output_dir.join("steps.jsonl");
        Ok(files::append_line(&path, &line.to_string())?)
    }

    fn evaluated(&mut self, report: EvaluationReport) -> Result<(), RunError> {
        let key = (report.environment.0, report.version);
        let again = u64::from(report.measured_again);
        let before = self.evaluated.get(&key).copied();
        if before >= Some(again) {
            return Ok(());
        }
        self.evaluated.insert(key, again);
        let index = key.0 as usize;
        let name = self.environments.get(index).map_or("", String::as_str);
        let model = self.other_models.get(index).cloned().flatten();
        let line = self.evaluation_line(&report, name, model.as_deref());
        tracing::info!(
            environment = name, version = %report.version, rollouts = report.rollouts, failed = report.failed,
            mean_reward = report.mean_reward, model, "evaluation ended"
        );
        // Before the line: a reader of the line finds the file, and the file says to which line it belongs.
        self.write_examples(name, &report)?;
        if before.is_some() {
            return self.replace_evaluation(line);
        }
        let path = self.place.output_dir.join("evals.jsonl");
        files::append_line(&path, &line.to_string())?;
        self.telemetry.evaluations.lock().push(line);
        Ok(())
    }

    /// An entry of `evals.jsonl`; `model` was measured instead of the policy.
    fn evaluation_line(
        &self,
        report: &EvaluationReport,
        name: &str,
        model: Option<&str>,
    ) -> serde_json::Value {
        let mut line = serde_json::json!(report);
        line["environment"] = name.into();
        if let (Some(model), Some(fields)) = (model, line.as_object_mut()) {
            let version = fields.remove("version").unwrap_or_default();
            fields.insert("model".into(), model.into());
            fields.insert(MEASURED_AT.into(), version);
        }
        if let Some(Some(validated)) = self.validated.get(report.environment.0 as usize) {
            line["validates"] = validated.as_str().into();
        }
        line["time_s"] = self.origin.elapsed().as_secs_f64().into();
        line
    }

    /// The scores of each example: `evaluations/v<version>/<environment>.json`.
    fn write_examples(&self, name: &str, report: &EvaluationReport) -> Result<(), RunError> {
        let content = serde_json::json!({
            "rollouts": report.rollouts,
            "mean_reward": report.mean_reward,
            "examples": report.by_example.examples,
            "keys": self.first_workers.keys(report.environment, &report.by_example.examples),
            "scores": report.by_example.scores,
        });
        let folder = self.place.output_dir.join("evaluations");
        let folder = folder.join(format!("v{}", report.version.0));
        let made = std::fs::create_dir_all(&folder);
        made.map_err(|source| WriteError::new(&folder, source))?;
        let path = folder.join(format!("{name}.json"));
        Ok(files::write_whole(&path, content.to_string().as_bytes())?)
    }

    /// Moves the earlier line to `replaced_evals.jsonl`; a process that is killed meanwhile leaves one of the two
    /// lines.
    fn replace_evaluation(&self, line: serde_json::Value) -> Result<(), RunError> {
        let is_of = |other: &serde_json::Value| {
            let same = |key| other[key] == line[key];
            same("environment") && same("version") && same(MEASURED_AT)
        };
        let known = self.telemetry.evaluations.lock().clone();
        let (before, mut kept): (Vec<_>, Vec<_>) = known.into_iter().partition(is_of);
        let replaced = self.place.output_dir.join("replaced_evals.jsonl");
        for other in before {
            files::append_line(&replaced, &other.to_string())?;
        }
        kept.push(line);
        let lines: String = kept.iter().map(|line| format!("{line}\n")).collect();
        let path = self.place.output_dir.join("evals.jsonl");
        files::write_whole(&path, lines.as_bytes())?;
        *self.telemetry.evaluations.lock() = kept;
        Ok(())
    }

    fn keep_state(&self, step: Step, number: u64, core: &Core) -> Result<(), RunError> {
        let state = State::new(&self.place.output_dir, step);
        let spool = self.batches.spool();
        Ok(state.keep(spool, number, &self.place.identity, core)?)
    }

    fn snapshot(&self, number: u64, core: &Core) -> Result<(), RunError> {
        let folder = self.place.output_dir.join("journal");
        journal::write_snapshot(&folder, number, &self.place.identity, core)?;
        let retained = journal::retain(&folder, self.place.journal_bytes);
        retained.map_err(|source| RunError::from(WriteError::new(&folder, source)))
    }
}

fn json_lines(path: &Path) -> std::io::Result<Vec<serde_json::Value>> {
    let lines = files::whole_lines(path)?;
    Ok(lines
        .iter()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect())
}

fn steps_in(path: &Path) -> std::io::Result<BTreeSet<Step>> {
    let lines = json_lines(path)?;
    Ok(lines
        .iter()
        .filter_map(|line| line["step"].as_u64().map(Step))
        .collect())
}
