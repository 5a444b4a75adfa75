//! One orchestrator from start to end.
//!
//! ```text
//! Prepared::new    reads and checks, writes nothing
//! Prepared::start  locks the output folder, starts journal, recorder, driver, server, monitor
//! Running::wait    until the run has finished, failed, or the shutdown token fired; then everything is stopped
//! ```

use crate::address::{ADDRESS_FILE, check_exposure};
use crate::app::{App, Parts};
use crate::batches::Batches;
use crate::clients::{self, Endpoint, Scorer};
use crate::config::{ClientType, Config, ConfigError, flops_model};
use crate::connections::{self, Bodies, Limits};
use crate::custom::{self, AdvantagesThread, CustomAdvantages};
use crate::driver::{self, Driver};
use crate::effects::Effects;
use crate::engines::{Engines, EnginesConfig};
use crate::failure::RunError;
use crate::files;
use crate::gateway::Gateway;
use crate::gateway::access::{self, Access};
use crate::going_back;
use crate::journal::Identity;
use crate::monitor;
use crate::page::Page;
use crate::recorder::{self, Recorder};
use crate::secret::Secret;
use crate::server;
use crate::story::{self, Story, identity};
use crate::teacher::{self, Teacher};
use crate::telemetry::status;
use crate::trainer::holder::Holder;
use crate::unknown;
use primerl_core::{Core, Event, RolloutId, Step};
use primerl_render::{LoadOptions, Renderer};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// How long a disk may take for what is still to be written at the end.
const LAST_WRITES: Duration = Duration::from_secs(10);
/// How long workers have to notice that the run has finished.
const FAREWELL: Duration = Duration::from_secs(5);
/// After a request to stop, everything that is still open is cut off after this.
const DRAIN: Duration = Duration::from_secs(4);

/// Why a run ended well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExitReason(pub String);

/// A config whose every claim was checked.
pub struct Prepared {
    config: Config,
    core: Core,
    renderer: Arc<Renderer>,
    /// By environment: who answers in place of the engines.
    endpoints: Vec<Option<Arc<Endpoint>>>,
    /// Who scores what the policy samples.
    scorers: Vec<Scorer>,
    identity: Identity,
    functions: Option<Arc<dyn CustomAdvantages>>,
    run_key: Option<Secret>,
    limits: Limits,
    /// The checkpoint that the run goes back to.
    goes_back_to: Option<Step>,
    /// What a run that only evaluates has measured as failed is measured once more.
    measures_again: bool,
    /// An event of the journal that cannot be played back, and is left out.
    skips: Option<u64>,
}

/// A run that is going on.
pub struct Running {
    app: Arc<App>,
    stop: CancellationToken,
    tasks: TaskTracker,
    server: tokio::task::JoinHandle<std::io::Result<()>>,
    /// Fires when the driver has ended.
    driver: CancellationToken,
    recorder: JoinHandle<()>,
    /// There was nothing left to do: nobody is told where we are.
    is_over: bool,
    /// Held as long as the folder is ours.
    _lock: File,
}

/// Run to the end. `shutdown` asks for an early, orderly one.
pub async fn run(
    config: Config,
    listener: TcpListener,
    shutdown: CancellationToken,
) -> Result<ExitReason, Arc<RunError>> {
    let prepared = tokio::task::spawn_blocking(|| Prepared::new(config, None))
        .await
        .map_err(|_| RunError::TaskDied {
            task: "the model's loading",
        })?
        .map_err(RunError::from)?;
    prepared.start(listener).await?.wait(shutdown).await
}

impl Prepared {
    /// Check the config and load the model's tokenizer and template. Takes up to seconds, writes nothing.
    /// `functions` calls custom algorithms; without it a config that names one is refused.
    pub fn new(
        config: Config,
        functions: Option<Arc<dyn CustomAdvantages>>,
    ) -> Result<Prepared, ConfigError> {
        config.validate()?;
        custom::load(&config, functions.as_deref())?;
        let options = LoadOptions {
            tool_parser: config.parsers.tool.clone(),
            reasoning_parser: config.parsers.reasoning.clone(),
        };
        let renderer = Renderer::load_with(&config.model.path, &options).map_err(|error| {
            ConfigError::Model(match std::error::Error::source(&error) {
                Some(source) => format!("{error}: {source}"),
                None => error.to_string(),
            })
        })?;
        let endpoints = clients::of_environments(&config)?;
        let scorers = config.scoring_teacher();
        let scorers = scorers.map(|client| Scorer::open_all("teacher.client", client));
        let scorers = scorers.transpose()?.unwrap_or_default();
        let core = Core::new(config.to_core(flops_model(&config.model.path)))?;
        let identity = identity(&config, core.config());
        Ok(Prepared {
            identity,
            config,
            core,
            renderer: Arc::new(renderer),
            endpoints,
            scorers,
            functions,
            run_key: access::run_key()?,
            limits: Limits::default(),
            goes_back_to: None,
            measures_again: false,
            skips: None,
        })
    }

    /// Go back to the checkpoint that the trainer has saved of this step.
    pub fn going_back_to(self, step: Option<Step>) -> Prepared {
        Prepared {
            goes_back_to: step,
            ..self
        }
    }

    /// Measure once more what a run that only evaluates has measured as failed.
    pub fn measuring_again(self, measures_again: bool) -> Prepared {
        Prepared {
            measures_again,
            ..self
        }
    }

    /// Leave this event of the journal out, from this start on.
    pub fn skipping(self, event: Option<u64>) -> Prepared {
        Prepared {
            skips: event,
            ..self
        }
    }

    /// Another key than the environment's; `None`: one that is made and kept in the output folder.
    pub fn with_run_key(self, run_key: Option<Secret>) -> Prepared {
        Prepared { run_key, ..self }
    }

    pub fn with_limits(self, limits: Limits) -> Prepared {
        Prepared { limits, ..self }
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether this config goes on with the run that its folder holds, if any. Writes nothing.
    pub fn check_folder(&self) -> Result<(), RunError> {
        let folder = absolute(&self.config.output_dir)?.join("journal");
        Story::check(&folder, &self.identity)
    }

    pub async fn start(self, listener: TcpListener) -> Result<Running, RunError> {
        let address = listener.local_addr().map_err(RunError::Server)?;
        check_exposure(address, self.run_key.as_ref())?;
        let output_dir = absolute(&self.config.output_dir)?;
        let lock = lock_folder(&output_dir)?;
        let access = Access::open(&output_dir, self.run_key.as_ref())?;
        going_back::complete(&output_dir)?;
        if let Some(step) = self.goes_back_to {
            going_back::go_back(&output_dir, step, &self.identity)?;
        }
        let folder = output_dir.join("journal");
        if let Some(event) = self.skips {
            story::skip(&folder, event)?;
        }
        let mut story = Story::open(&folder, self.core, &self.identity)?;
        if self.measures_again {
            story = story.measuring_again()?;
        }
        unknown::set_aside(&output_dir, &story.core)?;
        let url = format!("http://{address}");
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        if story.owed.is_some() {
            story::look_at_unread(folder, stop.clone()).map_err(RunError::Thread)?;
        }
        let (finished_sender, finished) = watch::channel(None);
        let (driver, inbox) = driver::channel();
        let engines = Engines::new(
            engines_config(&self.config, &self.renderer),
            driver.clone(),
            stop.clone(),
            tasks.clone(),
        );
        let (model, seq_len) = (self.config.model.name(), self.config.seq_len);
        let parts = Parts {
            page: Page::new(
                &output_dir,
                Some(Arc::clone(&self.renderer)),
                story.core.config(),
            ),
            gateway: Gateway::new(self.renderer, access, model, seq_len).with_clients(
                self.config.client_type,
                self.endpoints,
                self.config.limits(),
                self.config.spans(),
            ),
            bodies: Bodies::new(self.limits.bodies.clone().of_run(seq_len)),
            driver,
            engines,
            holder: Holder::open(&output_dir, self.config.timeouts.trainer_patience()),
        };
        let core_config = story.core.config().clone();
        let app = Arc::new(App::new(self.config, core_config, url, parts, finished));
        let place = recorder::Place {
            output_dir: output_dir.clone(),
            identity: self.identity,
            keep_spool: app.config.retention.keep_spool,
            journal_bytes: app.config.retention.journal_mb << 20,
        };
        let batches = Batches::new(&output_dir, &story.core, app.driver.clone());
        let (recorder, recorder_thread) = Recorder::start(place, batches, &app, finished_sender)
            .map_err(|source| RunError::OutputFolder {
                path: output_dir.clone(),
                source,
            })?;
        let is_over = story.core.is_over();
        let advantages = self
            .functions
            .map(|functions| {
                AdvantagesThread::start(functions, app.environment_names(), app.driver.clone())
            })
            .transpose()
            .map_err(RunError::Thread)?;
        let parts = teacher_parts(&app, stop.clone());
        let teacher = (!self.scorers.is_empty()).then(|| Teacher::start(parts, self.scorers));
        let effects = Effects::new(&app, recorder, advantages, teacher);
        let driver = begin(story, effects, &app).await?;
        let driver = driver::start(driver, inbox, stop.clone()).map_err(RunError::Thread)?;
        let router = server::router(Arc::clone(&app));
        let serving = connections::serve(listener, router, self.limits, stop.clone());
        let running = Running {
            server: tokio::spawn(serving),
            driver,
            recorder: recorder_thread,
            stop,
            tasks,
            app,
            is_over,
            _lock: lock,
        };
        if !is_over {
            running.announce(&output_dir)?;
        }
        Ok(running)
    }
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

    /// What opens the model calls of a rollout, as in its lease.
    pub fn rollout_key(&self, rollout: RolloutId) -> Secret {
        self.app.gateway.access.rollout_key(rollout)
    }

    /// Paths of all routes that are served, as axum writes them.
    pub fn paths(&self) -> Vec<String> {
        server::routes(&self.app).paths().to_vec()
    }

    /// Tell where we are, and look for the engines that do not join by themselves.
    fn announce(&self, output_dir: &Path) -> Result<(), RunError> {
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
        let key = match output_dir.join(access::RUN_KEY_FILE) {
            file if file.exists() => file.display().to_string(),
            _ => access::RUN_KEY_VARIABLE.to_owned(),
        };
        tracing::info!(url, output_dir = %output_dir.display(), key, "orchestrator is up; `key` holds the run's key");
        Ok(())
    }

    /// Until the end, whichever it is.
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
            // Said where it failed, and by whoever started this.
            Err(error) => tracing::debug!(%error, "the run ends"),
        }
        if let Ok(status) = status::collect(&self.app).await {
            // Nobody else writes it.
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
        if tokio::time::timeout(drain, driver.cancelled())
            .await
            .is_err()
        {
            tracing::warn!("the driver did not stop in time");
        }
        // The driver held the journal and the way to the recorder: both end by themselves, after their last write.
        let given_up = Instant::now() + LAST_WRITES;
        while !recorder.is_finished() && Instant::now() < given_up {
            // Not awaited on a thread: a machine that is short of threads may refuse one more.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if !recorder.is_finished() {
            tracing::error!("the disk does not take the last records; they are given up");
        }
        tracing::info!(
            cpu_s = crate::telemetry::process_cpu_seconds(),
            elapsed_s = app.origin.elapsed().as_secs_f64(),
            "stopped"
        );
    }
}

/// The driver, with everything that a run before it left.
async fn begin(story: Story, effects: Effects, app: &App) -> Result<Driver, RunError> {
    let Story {
        core,
        journal,
        owed,
    } = story;
    if owed.is_some() {
        story::restore(app, &core);
        let (step, rollouts) = (core.next_step(), core.open_rollouts().count());
        tracing::info!(next_step = %step, rollouts, "going on with the run in this folder");
    }
    let mut driver = Driver::new(core, journal, effects, app);
    if let Some(owed) = owed {
        driver.go_on(owed).await.map_err(RunError::Journal)?;
    }
    Ok(driver)
}

fn engines_config(config: &Config, renderer: &Renderer) -> EnginesConfig {
    EnginesConfig {
        model: config.model.name(),
        request_timeout: Duration::from_secs_f64(config.timeouts.engine_request_s),
        update_timeout: Duration::from_secs_f64(config.timeouts.engine_update_s),
        stop_token_ids: renderer.stop_token_ids().to_vec(),
        vocabulary_size: renderer.vocabulary_size(),
        seq_len: config.seq_len,
        max_tokens: config.sampling.max_tokens,
        needs_processed: config.sampling.temperature != 1.0 || config.sampling.replayed().is_some(),
        probe_tolerance: config.probe_tolerance,
        written_ids: Arc::default(),
        engines_render: config.client_type == ClientType::OpenaiChatCompletionsToken,
    }
}

fn teacher_parts(app: &App, stop: CancellationToken) -> teacher::Parts {
    teacher::Parts {
        renderer: Arc::clone(&app.gateway.renderer),
        driver: app.driver.clone(),
        engines: Arc::clone(&app.engines),
        failures: app.failures.clone(),
        waits: app.telemetry.waits.clone(),
        stop,
        timeout: Duration::from_micros(app.core_config.timeouts.teacher.0),
        limit: Duration::from_secs_f64(app.config.timeouts.no_engine_s),
        seq_len: app.config.seq_len,
    }
}

fn absolute(path: &Path) -> Result<PathBuf, RunError> {
    std::path::absolute(path).map_err(|source| RunError::OutputFolder {
        path: path.to_owned(),
        source,
    })
}

/// Two orchestrators in one folder would mix their journals. The lock is the kernel's, so a crash leaves none behind.
fn lock_folder(output_dir: &Path) -> Result<File, RunError> {
    let path = output_dir.join("run/orchestrator.lock");
    let failed = |source| RunError::OutputFolder {
        path: output_dir.to_owned(),
        source,
    };
    std::fs::create_dir_all(output_dir.join("run")).map_err(failed)?;
    let file = File::options()
        .create(true)
        .append(true)
        .open(path)
        .map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(RunError::OutputFolderInUse {
            path: output_dir.to_owned(),
        }),
        Err(std::fs::TryLockError::Error(source)) => Err(failed(source)),
    }
}
