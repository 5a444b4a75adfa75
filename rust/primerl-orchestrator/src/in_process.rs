//! The orchestrator inside another program: a separate runtime, and blocking calls with bounded waits.
//!
//! The HTTP server runs as usual, for engines and environment workers; the trainer's side is called directly.

use crate::address::listen;
use crate::app::App;
use crate::config::Config;
use crate::custom::CustomAdvantages;
use crate::endpoints::status;
use crate::endpoints::trainer as endpoints;
use crate::failure::RunError;
use crate::log;
use crate::run::{ExitReason, Prepared};
use crate::runtime;
use crate::trainer::holder::Identity;
use bytes::Bytes;
use primerl_core::{Event, PolicyVersion, Step};
use primerl_service::http::{ApiError, RUN_OVER};
use primerl_service::inbox::BatchReply;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InProcessError {
    #[error(transparent)]
    Run(#[from] Arc<RunError>),
    #[error("{}", .0.message)]
    Refused(ApiError),
    #[error("cannot start the runtime: {0}")]
    Runtime(Arc<std::io::Error>),
}

type Outcome = Result<ExitReason, Arc<RunError>>;

/// A run in this process. Dropping it stops the run abruptly; [`InProcess::shutdown`] stops it in order.
pub struct InProcess {
    app: Arc<App>,
    shutdown: CancellationToken,
    outcome: watch::Receiver<Option<Outcome>>,
    runtime: Runtime,
}

/// The answer to a call in progress.
pub struct Pending<T> {
    answer: Receiver<T>,
    task: tokio::task::AbortHandle,
}

impl<T> Pending<T> {
    /// The answer, or `None` if it takes longer than `patience`. `Some(None)` cannot happen twice: ask no further then.
    pub fn wait(&mut self, patience: Duration) -> Option<Option<T>> {
        match self.answer.recv_timeout(patience) {
            Ok(answer) => Some(Some(answer)),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(None),
        }
    }
}

impl<T> Drop for Pending<T> {
    /// A caller that gives up withdraws its request.
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl InProcess {
    /// Checks everything, then binds `host:port` and starts. `functions` calls custom algorithms.
    pub fn start(
        config: Config,
        functions: Option<Arc<dyn CustomAdvantages>>,
    ) -> Result<InProcess, InProcessError> {
        let prepared =
            Prepared::new(config, functions).map_err(|error| Arc::new(RunError::from(error)))?;
        let runtime = runtime::build().map_err(|error| InProcessError::Runtime(Arc::new(error)))?;
        let running = runtime
            .block_on(async {
                let listener = listen(prepared.config()).await?;
                prepared.start(listener).await
            })
            .map_err(Arc::new)?;
        let app = Arc::clone(running.app());
        // Another process would train alongside the caller.
        app.holder.hold(Identity::own());
        let file = app.config.output_dir.join("logs/orchestrator.log");
        log::to_file(&app.config.log.level, &file)
            .map_err(|source| Arc::new(RunError::OutputFolder { path: file, source }))?;
        let shutdown = CancellationToken::new();
        let (sender, outcome) = watch::channel(None);
        let stop = shutdown.clone();
        runtime.spawn(async move {
            let outcome = running.wait(stop).await;
            sender.send_replace(Some(outcome));
        });
        Ok(InProcess {
            app,
            shutdown,
            outcome,
            runtime,
        })
    }

    pub fn url(&self) -> &str {
        &self.app.url
    }

    /// Requests a rank's batch of `step`, for as long as it takes. `None`: there are no more.
    pub fn next_batch(
        &self,
        step: u64,
        rank: u32,
    ) -> Pending<Result<Option<Bytes>, InProcessError>> {
        let app = Arc::clone(&self.app);
        self.spawn(async move {
            loop {
                match endpoints::wait_for_batch(&app, Step(step), rank).await {
                    Ok(BatchReply::Batch(bytes)) => return Ok(Some(bytes)),
                    Ok(BatchReply::NoMore) => return Ok(None),
                    Ok(BatchReply::NotReady { waiting_for }) => {
                        tracing::debug!(step, waiting_for, "no batch yet")
                    }
                    Err(error) => return Err(InProcessError::Refused(error)),
                }
            }
        })
    }

    /// Publishes weights as policy version `version`. The result is known once it is durable.
    pub fn publish_weights(
        &self,
        version: u64,
        manifest: PathBuf,
    ) -> Pending<Result<(), InProcessError>> {
        let app = Arc::clone(&self.app);
        self.spawn(async move {
            endpoints::publish(&app, PolicyVersion(version), manifest)
                .await
                .map_err(InProcessError::Refused)
        })
    }

    /// The trainer continues after `step` (0: begins). The result is known once it is durable.
    pub fn resume_after(&self, step: u64) -> Pending<Result<(), InProcessError>> {
        let app = Arc::clone(&self.app);
        self.spawn(async move {
            endpoints::resume_after(&app, Step(step))
                .await
                .map_err(InProcessError::Refused)
        })
    }

    /// Batches up to `step` will not be requested again. `saved`: the checkpoint next to which the run's state is to be
    /// kept. The result is known once it is durable.
    pub fn checkpoint_saved(
        &self,
        step: u64,
        saved: Option<u64>,
    ) -> Pending<Result<(), InProcessError>> {
        let app = Arc::clone(&self.app);
        self.spawn(async move {
            match endpoints::checkpoint_saved(&app, Step(step), saved.map(Step)).await {
                // The last checkpoint comes when all is trained: no batches will be requested any more.
                Err(error) if error.code == Some(RUN_OVER) => Ok(()),
                outcome => outcome.map_err(InProcessError::Refused),
            }
        })
    }

    /// Like `GET /status`; the final status after the run has stopped.
    pub fn status(&self) -> serde_json::Value {
        match self.runtime.block_on(status::collect(&self.app)) {
            Ok(status) => status,
            Err(_) => self.app.last_status.get().cloned().unwrap_or_default(),
        }
    }

    /// Asks the run to end; returns at once.
    pub fn request_shutdown(&self, reason: String) {
        self.app.driver.send(Event::ShutdownRequested { reason });
        self.shutdown.cancel();
    }

    /// Why the run has ended, after everything was written; `None` if that takes longer than `patience`.
    pub fn wait_for_end(&self, patience: Duration) -> Option<Outcome> {
        let mut outcome = self.outcome.clone();
        self.runtime.block_on(async {
            let ended = tokio::time::timeout(patience, outcome.wait_for(Option::is_some)).await;
            ended.ok()?.ok()?.clone()
        })
    }

    /// The failure of the run has priority over the answer of a call that it has cut off.
    fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, InProcessError>> + Send + 'static,
    ) -> Pending<Result<T, InProcessError>> {
        let (sender, answer) = sync_channel(1);
        let failures = self.app.failures.clone();
        let task = self.runtime.spawn(async move {
            let outcome = tokio::select! {
                biased;
                error = failures.wait() => Err(InProcessError::Run(error)),
                outcome = work => outcome,
            };
            // A caller that gave up does not listen.
            let _ = sender.send(outcome);
        });
        Pending {
            answer,
            task: task.abort_handle(),
        }
    }
}
