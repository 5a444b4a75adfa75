//! One orchestrator from start to end.
//!
//! ```text
//! Prepared::new    reads and checks, writes nothing
//! Prepared::start  locks the output folder, starts journal, recorder, driver, server, monitor
//! Running::wait    until the run has finished, failed, or the shutdown token fired; then everything is stopped
//! ```

mod folder;
mod running;

pub use running::{ExitReason, Running};

use crate::address::check_exposure;
use crate::app::{App, Parts};
use crate::batches::Batches;
use crate::config::{Config, ScoringTeacher, flops_model};
use crate::custom::{self, AdvantagesThread, CustomAdvantages};
use crate::driver::{self, Driver};
use crate::effects::{Effects, ScoredBy};
use crate::failure::{Failures, RunError};
use crate::going_back;
use crate::page::Page;
use crate::recorder::{self, Recorder};
use crate::resumed_run::{self, ResumedRun, identity};
use crate::server;
use crate::teacher::itself::{self, Itself};
use crate::teacher::{self, Teacher};
use crate::trainer::holder::Holder;
use crate::unknown;
use folder::{absolute, lock_folder};
use primerl_core::{Core, EnvironmentId, Step};
use primerl_engines::clients::{ClientType, Endpoint};
use primerl_engines::{Engines, EnginesConfig};
use primerl_gateway::{Access, Gateway, Service, run_key};
use primerl_record::journal::Identity;
use primerl_render::{LoadOptions, Renderer};
use primerl_service::config_error::ConfigError;
use primerl_service::http::{self, Bodies, Limits};
use primerl_service::inbox;
use primerl_service::secret::Secret;
use primerl_service::waits::Waits;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A config after all its checks.
pub struct Prepared {
    config: Config,
    core: Core,
    renderer: Arc<Renderer>,
    /// By environment: the server that answers instead of the engines.
    endpoints: Vec<Option<Arc<Endpoint>>>,
    /// The teacher that scores the policy's samples.
    teachers: Vec<ScoringTeacher>,
    identity: Identity,
    functions: Option<Arc<dyn CustomAdvantages>>,
    run_key: Option<Secret>,
    limits: Limits,
    reopening: Reopening,
}

/// What changes in the run that a folder holds before it is resumed.
#[derive(Default)]
struct Reopening {
    /// The checkpoint that the run goes back to.
    goes_back_to: Option<Step>,
    /// Whether a run that only evaluates measures its failed rollouts once more.
    measures_again: bool,
    /// An event of the journal that cannot be played back, and is skipped.
    skips: Option<u64>,
}

impl Reopening {
    fn open(
        &self,
        output_dir: &Path,
        core: Core,
        identity: &Identity,
    ) -> Result<ResumedRun, RunError> {
        going_back::complete(output_dir)?;
        if let Some(step) = self.goes_back_to {
            going_back::go_back(output_dir, step, identity)?;
        }
        let folder = output_dir.join("journal");
        if let Some(event) = self.skips {
            resumed_run::skip(&folder, event)?;
        }
        let mut resumed = ResumedRun::open(&folder, core, identity)?;
        if self.measures_again {
            resumed = resumed.measuring_again()?;
        }
        unknown::set_aside(output_dir, &resumed.core)?;
        Ok(resumed)
    }
}

/// Runs to the end. `shutdown` asks for an early, orderly one.
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
    /// Checks the config and loads the model's tokenizer and template. Takes up to seconds, writes nothing. `functions`
    /// calls custom algorithms; without it a config that names one is refused.
    pub fn new(
        config: Config,
        functions: Option<Arc<dyn CustomAdvantages>>,
    ) -> Result<Prepared, ConfigError> {
        config.validate()?;
        custom::load(&config, functions.as_deref())?;
        let renderer = load_renderer(&config)?;
        check_demonstrations(&config, &renderer)?;
        let endpoints = config.endpoints()?;
        let teachers = config.scoring_teachers()?;
        let core = Core::new(config.to_core(flops_model(&config.model.path)))?;
        let identity = identity(&config, core.config());
        Ok(Prepared {
            identity,
            config,
            core,
            renderer: Arc::new(renderer),
            endpoints,
            teachers,
            functions,
            run_key: run_key()?,
            limits: Limits::default(),
            reopening: Reopening::default(),
        })
    }

    /// Goes back to the checkpoint that the trainer has saved of this step.
    pub fn going_back_to(mut self, step: Option<Step>) -> Prepared {
        self.reopening.goes_back_to = step;
        self
    }

    /// Measures failed rollouts once more, in a run that only evaluates.
    pub fn measuring_again(mut self, measures_again: bool) -> Prepared {
        self.reopening.measures_again = measures_again;
        self
    }

    /// Skips this event of the journal, from this start on.
    pub fn skipping(mut self, event: Option<u64>) -> Prepared {
        self.reopening.skips = event;
        self
    }

    /// Another key than the environment's; `None`: one that is generated and kept in the output folder.
    pub fn with_run_key(self, run_key: Option<Secret>) -> Prepared {
        Prepared { run_key, ..self }
    }

    pub fn with_limits(self, limits: Limits) -> Prepared {
        Prepared { limits, ..self }
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether this config can resume the run that its folder holds, if any, or go back to the checkpoint. Writes
    /// nothing.
    pub fn check_folder(&self) -> Result<(), RunError> {
        let output_dir = absolute(&self.config.output_dir)?;
        match self.reopening.goes_back_to {
            Some(step) => going_back::check(&output_dir, step, &self.identity),
            None => ResumedRun::check(&output_dir.join("journal"), &self.identity),
        }
    }

    pub async fn start(self, listener: TcpListener) -> Result<Running, RunError> {
        let address = listener.local_addr().map_err(RunError::Server)?;
        check_exposure(address, self.run_key.as_ref())?;
        let output_dir = absolute(&self.config.output_dir)?;
        let lock = lock_folder(&output_dir)?;
        let access = Access::open(&output_dir, self.run_key.as_ref())?.opening(server::is_open);
        let resumed = (self.reopening).open(&output_dir, self.core, &self.identity)?;
        let url = format!("http://{address}");
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        if resumed.owed.is_some() {
            resumed_run::look_at_unread(output_dir.join("journal"), stop.clone())
                .map_err(RunError::Thread)?;
        }
        let (finished_sender, finished) = watch::channel(None);
        let (driver, inbox) = inbox::channel();
        let engines = Engines::new(
            engines_config(&self.config, &self.renderer),
            driver.clone(),
            stop.clone(),
            tasks.clone(),
        );
        let failures = Failures::default();
        let bodies = self.limits.bodies.clone().of_run(self.config.run.seq_len);
        let service = Service {
            gateway: gateway(&self.config, &self.renderer, access, self.endpoints),
            engines,
            driver,
            bodies: Arc::new(Bodies::new(bodies)),
            metrics: Arc::default(),
            waits: Waits::default(),
            run: Arc::new(failures.clone()),
            only_evaluates: resumed.core.config().only_evaluates(),
            no_engine: Duration::from_secs_f64(self.config.timeouts.no_engine_s),
        };
        let parts = Parts {
            page: Page::new(&output_dir, Some(self.renderer), resumed.core.config()),
            gateway: Arc::new(service),
            failures,
            holder: Holder::open(&output_dir, self.config.timeouts.trainer_patience()),
        };
        let core_config = resumed.core.config().clone();
        let app = Arc::new(App::new(self.config, core_config, url, parts, finished));
        let place = recorder_place(&output_dir, self.identity, &app.config);
        let batches = Batches::new(&output_dir, &resumed.core, app.driver.clone());
        let (recorder, recorder_thread) = Recorder::start(place, batches, &app, finished_sender)
            .map_err(|source| RunError::OutputFolder {
                path: output_dir.clone(),
                source,
            })?;
        let is_over = resumed.core.is_over();
        let advantages = start_advantages(self.functions, &app)?;
        let scorers = scorers(&app, self.teachers, &stop)?;
        let effects = Effects::new(&app, recorder, advantages, scorers);
        let driver = begin(resumed, effects, &app).await?;
        let driver = driver::start(driver, inbox, stop.clone()).map_err(RunError::Thread)?;
        let router = server::router(Arc::clone(&app));
        let serving = http::serve(listener, router, self.limits, stop.clone());
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

fn load_renderer(config: &Config) -> Result<Renderer, ConfigError> {
    let options = LoadOptions {
        tool_parser: config.parsers.tool.clone(),
        reasoning_parser: config.parsers.reasoning.clone(),
        control_tokens: config.control_tokens,
    };
    Renderer::load_with(&config.model.path, &options).map_err(|error| {
        ConfigError::Model(match std::error::Error::source(&error) {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        })
    })
}

fn check_demonstrations(config: &Config, renderer: &Renderer) -> Result<(), ConfigError> {
    for (_, shown) in config.demonstrations() {
        itself::check(renderer, &shown).map_err(|problem| {
            let what = "training_mode = opsd shows a demonstration in a system message by itself, which the model's \
                        chat template cannot write";
            ConfigError::Model(format!("{what}: {problem}"))
        })?;
    }
    Ok(())
}

/// The driver, with the state that an earlier start left.
async fn begin(resumed: ResumedRun, effects: Effects, app: &App) -> Result<Driver, RunError> {
    let ResumedRun {
        core,
        journal,
        owed,
    } = resumed;
    if owed.is_some() {
        resumed_run::restore(app, &core);
        let (step, rollouts) = (core.next_step(), core.open_rollouts().count());
        tracing::info!(next_step = %step, rollouts, "resuming the run in this folder");
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
        seq_len: config.run.seq_len,
        max_tokens: config.sampling.max_tokens,
        needs_processed: config.sampling.temperature != 1.0 || config.sampling.replayed().is_some(),
        returns_experts: config.router_replay,
        probe_tolerance: config.probe_tolerance,
        written_ids: Arc::default(),
        engines_render: config.client_type == ClientType::OpenaiChatCompletionsToken,
    }
}

fn gateway(
    config: &Config,
    renderer: &Arc<Renderer>,
    access: Access,
    endpoints: Vec<Option<Arc<Endpoint>>>,
) -> Gateway {
    let (model, seq_len) = (config.model.name(), config.run.seq_len);
    Gateway::new(Arc::clone(renderer), access, model, seq_len).with_clients(
        config.client_type,
        endpoints,
        config.limits(),
        config.spans(),
    )
}

fn recorder_place(output_dir: &Path, identity: Identity, config: &Config) -> recorder::Place {
    recorder::Place {
        output_dir: output_dir.to_owned(),
        identity,
        keep_spool: config.retention.keep_spool,
        journal_bytes: config.retention.journal_mb << 20,
    }
}

fn start_advantages(
    functions: Option<Arc<dyn CustomAdvantages>>,
    app: &App,
) -> Result<Option<AdvantagesThread>, RunError> {
    let thread = functions.map(|functions| {
        AdvantagesThread::start(functions, app.environment_names(), app.driver.clone())
    });
    thread.transpose().map_err(RunError::Thread)
}

/// Who scores the samples of each environment that learns from a teacher or from itself.
fn scorers(
    app: &Arc<App>,
    teachers: Vec<ScoringTeacher>,
    stop: &CancellationToken,
) -> Result<BTreeMap<EnvironmentId, ScoredBy>, ConfigError> {
    let mut scorers = BTreeMap::new();
    for taught in teachers {
        let teacher = Teacher::start(teacher_parts(app, stop.clone()), taught.scorers);
        let of_each = taught.environments.into_iter();
        scorers
            .extend(of_each.map(|environment| (environment, ScoredBy::Teacher(teacher.clone()))));
    }
    for (environment, shown) in app.config.demonstrations() {
        let policy = Itself::new(own_parts(app, stop.clone()), shown)
            .map_err(|error| ConfigError::Model(error.to_string()))?;
        scorers.insert(environment, ScoredBy::Itself(policy));
    }
    Ok(scorers)
}

fn own_parts(app: &App, stop: CancellationToken) -> itself::Parts {
    itself::Parts {
        renderer: Arc::clone(&app.gateway.gateway.renderer),
        engines: Arc::clone(&app.engines),
        driver: app.driver.clone(),
        waits: app.telemetry.waits.clone(),
        stop,
        timeout: Duration::from_micros(app.core_config.timeouts.teacher.0),
    }
}

fn teacher_parts(app: &App, stop: CancellationToken) -> teacher::Parts {
    teacher::Parts {
        renderer: Arc::clone(&app.gateway.gateway.renderer),
        driver: app.driver.clone(),
        engines: Arc::clone(&app.engines),
        failures: app.failures.clone(),
        waits: app.telemetry.waits.clone(),
        stop,
        timeout: Duration::from_micros(app.core_config.timeouts.teacher.0),
        limit: Duration::from_secs_f64(app.config.timeouts.no_engine_s),
        seq_len: app.config.run.seq_len,
    }
}
