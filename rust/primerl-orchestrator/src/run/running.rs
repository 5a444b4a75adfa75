//! A run in progress, until its end.

use crate::address::ADDRESS_FILE;
use crate::app::App;
use crate::endpoints::status;
use crate::failure::RunError;
use crate::monitor;
use crate::server;
use primerl_core::{Event, RolloutId};
use primerl_gateway::{RUN_KEY_FILE, RUN_KEY_VARIABLE};
use primerl_service::cpu::process_cpu_seconds;
use primerl_service::files;
use primerl_service::secret::Secret;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// How long the last writes to the disk may take at the end.
const LAST_WRITES: Duration = Duration::from_secs(10);
/// How long workers have to notice that the run has finished.
const FAREWELL: Duration = Duration::from_secs(5);
/// After a request to stop, everything that is still open is cut off after this time.
const DRAIN: Duration = Duration::from_secs(4);

/// Why a run ended without a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExitReason(pub String);

/// A run in progress.
pub struct Running {
    pub(super) app: Arc<App>,
    pub(super) stop: CancellationToken,
    pub(super) tasks: TaskTracker,
    pub(super) server: tokio::task::JoinHandle<std::io::Result<()>>,
    /// Fires when the driver has ended.
    pub(super) driver: CancellationToken,
    pub(super) recorder: JoinHandle<()>,
    /// There was nothing left to do: the server's address is not announced.
    pub(super) is_over: bool,
    /// Locked while this process uses the folder.
    pub(super) _lock: File,
}

impl Running {
    pub fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// Whether the run was over before it was started.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    pub fn url(&self) -> &str {
        &self.app.url
    }

    /// The key for the model calls of a rollout, as in its lease.
    pub fn rollout_key(&self, rollout: RolloutId) -> Secret {
        self.app.gateway.gateway.access.rollout_key(rollout)
    }

    /// Paths of all served routes, as axum writes them.
    pub fn paths(&self) -> Vec<String> {
        server::routes(&self.app).paths().to_vec()
    }

    /// Announces the server's address, and looks for the engines that do not join by themselves.
    pub(super) fn announce(&self, output_dir: &Path) -> Result<(), RunError> {
        for engine in &self.app.config.engines {
            // Checked by the config's validation.
            if let Err(problem) = self.app.engines.join(engine, None) {
                tracing::error!(engine, problem, "cannot use this engine");
            }
        }
        self.tasks
            .spawn(monitor::watch(Arc::clone(&self.app), self.stop.clone()));
        let url = self.url();
        let address = serde_json::json!({"url": url, "pid": std::process::id()});
        files::write_whole(
            &output_dir.join(ADDRESS_FILE),
            address.to_string().as_bytes(),
        )?;
        let key = match output_dir.join(RUN_KEY_FILE) {
            file if file.exists() => file.display().to_string(),
            _ => RUN_KEY_VARIABLE.to_owned(),
        };
        tracing::info!(url, output_dir = %output_dir.display(), key, "orchestrator is up; `key` holds the run's key");
        Ok(())
    }

    /// Runs until the end, whichever it is.
    pub async fn wait(mut self, shutdown: CancellationToken) -> Result<ExitReason, Arc<RunError>> {
        let outcome = self.wait_for_end(&shutdown).await;
        match &outcome {
            Ok(reason) => {
                tracing::info!(reason = reason.0, "the run has finished");
                if !shutdown.is_cancelled() {
                    let farewell = self.app.workers.wait_until_empty();
                    tokio::select! {
                        _ = tokio::time::timeout(FAREWELL, farewell) => {}
                        () = shutdown.cancelled() => {}
                    }
                }
            }
            // Logged where it failed, and by the caller.
            Err(error) => tracing::debug!(%error, "the run ends"),
        }
        if let Ok(status) = status::collect(&self.app).await {
            // No other process writes it.
            let _ = self.app.last_status.set(status);
        }
        self.stop().await;
        outcome
    }

    async fn wait_for_end(
        &mut self,
        shutdown: &CancellationToken,
    ) -> Result<ExitReason, Arc<RunError>> {
        let failures = self.app.failures.clone();
        let mut finished = self.app.finished.clone();
        let mut asked = false;
        loop {
            tokio::select! {
                biased;
                error = failures.wait() => return Err(error),
                ended = finished.wait_for(Option::is_some) => {
                    return match ended {
                        Ok(reason) => Ok(ExitReason(reason.clone().unwrap_or_default())),
                        Err(_) => Err(Arc::new(RunError::TaskDied { task: "the recorder" })),
                    };
                }
                served = &mut self.server => {
                    return Err(Arc::new(match served {
                        Ok(Err(error)) => RunError::Server(error),
                        _ => RunError::TaskDied { task: "the HTTP server" },
                    }));
                }
                () = self.driver.cancelled() => return Err(Arc::new(RunError::TaskDied { task: "the driver" })),
                () = shutdown.cancelled(), if !asked => {
                    asked = true;
                    self.app.driver.send(Event::ShutdownRequested { reason: "a signal to stop".into() });
                }
                () = tokio::time::sleep(DRAIN), if asked => {
                    return Ok(ExitReason("stopped by a signal; not everything could be drained".into()));
                }
            }
        }
    }

    async fn stop(self) {
        let Running {
            app,
            stop,
            tasks,
            mut server,
            driver,
            recorder,
            is_over: _,
            _lock,
        } = self;
        stop.cancel();
        tasks.close();
        // Requests in flight are answered or cut off.
        let drain = tokio::time::Duration::from_secs(1);
        if !server.is_finished() && tokio::time::timeout(drain, &mut server).await.is_err() {
            server.abort();
        }
        if tokio::time::timeout(drain, tasks.wait()).await.is_err() {
            tracing::warn!("engine tasks did not stop in time");
        }
        let driver_ends = tokio::time::timeout(drain, driver.cancelled());
        if driver_ends.await.is_err() {
            tracing::warn!("the driver did not stop in time");
        }
        wait_for_last_writes(&recorder).await;
        tracing::info!(
            cpu_s = process_cpu_seconds(),
            elapsed_s = app.origin.elapsed().as_secs_f64(),
            "stopped"
        );
    }
}

/// The driver held the journal and the recorder's handle: both end by themselves, after their last write.
async fn wait_for_last_writes(recorder: &JoinHandle<()>) {
    let given_up = Instant::now() + LAST_WRITES;
    while !recorder.is_finished() && Instant::now() < given_up {
        // No thread is used to wait: a machine that is short of threads may refuse one more.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    if !recorder.is_finished() {
        tracing::error!("the last records could not be written to the disk in time; they are lost");
    }
}
