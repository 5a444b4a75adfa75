//! The thread that writes what a run produces: spool, `steps.jsonl`, `evals.jsonl`. Jobs are done in order, so a batch
//! is on disk before its first answer, and everything is on disk before the run counts as finished.

use crate::app::App;
use crate::driver::BatchReply;
use crate::failure::{Failures, RunError};
use crate::files;
use crate::telemetry::Telemetry;
use crate::trainer::batch;
use bytes::Bytes;
use primerl_core::Step;
use primerl_core::effect::EvaluationReport;
use primerl_core::pack::PackedBatch;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;
use tokio::sync::{oneshot, watch};

/// Encoded steps that are kept for ranks that lag behind or ask again; older ones are encoded anew.
const CACHED_STEPS: usize = 3;

enum Job {
    Cut(Arc<PackedBatch>),
    Answer {
        batch: Arc<PackedBatch>,
        rank: u32,
        waiter: oneshot::Sender<BatchReply>,
    },
    Evaluated(EvaluationReport),
    Finished(String),
    Failed(String),
}

/// The way to the thread.
#[derive(Clone, Debug)]
pub(crate) struct Recorder(mpsc::Sender<Job>);

impl Recorder {
    /// The thread ends when every `Recorder` is gone. `finished` is set once the run is over and recorded.
    pub fn start(
        output_dir: &Path,
        app: &App,
        finished: watch::Sender<Option<String>>,
    ) -> std::io::Result<(Recorder, JoinHandle<()>)> {
        let (jobs, receiver) = mpsc::channel();
        let failures = app.failures.clone();
        let writer = Writer {
            output_dir: output_dir.to_owned(),
            environments: app.environment_names(),
            origin: app.origin,
            telemetry: Arc::clone(&app.telemetry),
            finished,
            encoded: BTreeMap::new(),
        };
        let thread = std::thread::Builder::new()
            .name("recorder".into())
            .spawn(move || writer.run(&receiver, &failures))?;
        Ok((Recorder(jobs), thread))
    }

    pub fn cut(&self, batch: Arc<PackedBatch>) {
        self.send(Job::Cut(batch));
    }

    pub fn answer(&self, batch: Arc<PackedBatch>, rank: u32, waiter: oneshot::Sender<BatchReply>) {
        self.send(Job::Answer {
            batch,
            rank,
            waiter,
        });
    }

    pub fn evaluated(&self, report: EvaluationReport) {
        self.send(Job::Evaluated(report));
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
    output_dir: PathBuf,
    /// Names by environment.
    environments: Vec<String>,
    origin: Instant,
    telemetry: Arc<Telemetry>,
    finished: watch::Sender<Option<String>>,
    /// One body a rank, by step.
    encoded: BTreeMap<Step, Vec<Bytes>>,
}

impl Writer {
    fn run(mut self, jobs: &mpsc::Receiver<Job>, failures: &Failures) {
        for job in jobs {
            if let Err(error) = self.work(job) {
                failures.fail(error);
                return;
            }
        }
    }

    fn work(&mut self, job: Job) -> Result<(), RunError> {
        match job {
            Job::Cut(batch) => self.cut(&batch),
            Job::Answer {
                batch,
                rank,
                waiter,
            } => {
                let body = match self
                    .encoded
                    .get(&batch.step)
                    .and_then(|ranks| ranks.get(rank as usize))
                {
                    Some(body) => body.clone(),
                    None => batch::encode(&batch, rank)?,
                };
                // A trainer that hung up asks again.
                let _ = waiter.send(BatchReply::Batch(body));
                Ok(())
            }
            Job::Evaluated(report) => self.evaluated(report),
            Job::Finished(reason) => {
                self.finished.send_replace(Some(reason));
                Ok(())
            }
            Job::Failed(reason) => Err(RunError::Core { reason }),
        }
    }

    fn cut(&mut self, batch: &PackedBatch) -> Result<(), RunError> {
        let folder = self.output_dir.join(format!("spool/step_{}", batch.step));
        let mut ranks = Vec::with_capacity(batch.ranks.len());
        for rank in 0..batch.ranks.len() as u32 {
            let body = batch::encode(batch, rank)?;
            files::write_whole(&folder.join(format!("rank_{rank}.msgpack")), &body)?;
            ranks.push(body);
        }
        self.encoded.insert(batch.step, ranks);
        while self.encoded.len() > CACHED_STEPS {
            self.encoded.pop_first();
        }
        let line = serde_json::json!({
            "step": batch.step,
            "time_s": self.origin.elapsed().as_secs_f64(),
            "loss_tokens": batch.loss_tokens,
            "metrics": batch.metrics,
        });
        Ok(files::append_line(
            &self.output_dir.join("steps.jsonl"),
            &line.to_string(),
        )?)
    }

    fn evaluated(&mut self, report: EvaluationReport) -> Result<(), RunError> {
        let name = self
            .environments
            .get(report.environment.0 as usize)
            .map_or("", String::as_str);
        let mut line = serde_json::json!(report);
        line["environment"] = name.into();
        line["time_s"] = self.origin.elapsed().as_secs_f64().into();
        tracing::info!(
            environment = name, version = %report.version, rollouts = report.rollouts, failed = report.failed,
            mean_reward = report.mean_reward, "evaluation ended"
        );
        files::append_line(&self.output_dir.join("evals.jsonl"), &line.to_string())?;
        self.telemetry.evaluations.lock().push(line);
        Ok(())
    }
}
