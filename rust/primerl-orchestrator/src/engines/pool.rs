//! All engines of the run, and the requests on them. Only engines that have proved the newest version in rotation get
//! requests; which of them, `routing` chooses.

use super::body::RequestBody;
use super::chat::{self, ChatMessages};
use super::client::{EngineClient, EngineError, parse_url};
use super::generate::{Bounds, GenerateBody, Generated, Progress, SamplingParams};
use super::ids::{PromptIds, WrittenIds};
use super::part::{Begun, Follow};
use super::routing::{Candidate, Resident, choose};
use super::state::Engine;
use super::stream::Assembly;
use super::supervisor::{self, Update};
use crate::driver::DriverHandle;
use parking_lot::RwLock;
use primerl_core::conversation::History;
use primerl_core::{EngineId, Event, PolicyVersion, RolloutId, Truncation};
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Attempts that one request may lose to engines that answer with errors while they are healthy.
const MAX_ATTEMPTS: u32 = 6;
const FIRST_BACKOFF: Duration = Duration::from_millis(100);

#[derive(Clone, Debug)]
pub struct EnginesConfig {
    /// Name the engines serve the run's model under.
    pub model: String,
    pub request_timeout: Duration,
    pub update_timeout: Duration,
    pub stop_token_ids: Vec<u32>,
    /// Of the model; `None` where it does not say.
    pub vocabulary_size: Option<u32>,
    /// Training rollouts are not all sampled at temperature 1 from all tokens: log-probabilities must be of the
    /// distribution that was sampled from.
    pub needs_processed: bool,
    /// What of the prompts was written before.
    pub written_ids: Arc<WrittenIds>,
    /// Engines are given messages, and say which ids they made of them.
    pub engines_render: bool,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    #[error("no engine could answer within the rollout's deadline; last: {last}")]
    Deadline { last: String },
    #[error("the engines failed {attempts} times; last: {last}")]
    Exhausted { attempts: u32, last: String },
    #[error(
        "the engine failed in the middle of an answer that was being shown, while its weights may have changed: no other \
         can go on with it; last: {last}"
    )]
    Interrupted { last: String },
    #[error("the engine refused the request: {0}")]
    Refused(EngineError),
    #[error("cannot encode the request: {0}")]
    Encode(#[from] serde_json::Error),
}

/// What to sample.
#[derive(Clone, Debug)]
pub struct SampleRequest<'a> {
    /// Unique among requests; appears in the engine's log.
    pub request_id: &'a str,
    pub prompt: PromptIds<'a>,
    /// What the engine renders to that prompt; `None` where it is given the ids.
    pub chat: Option<&'a ChatMessages>,
    pub temperature: f64,
    pub truncation: Truncation,
    pub max_tokens: u32,
    /// Most likely tokens to be returned at each position.
    pub top_logprobs: u32,
    pub structured_outputs: Option<&'a serde_json::Value>,
    /// Where this conversation's prefix is.
    pub resident: Option<Resident>,
    /// The rollout whose first turn this is: the core is told when and by which version it begins.
    pub first_of: Option<RolloutId>,
    pub deadline: Instant,
}

impl<'a> SampleRequest<'a> {
    /// One token after this prompt, to see what an engine can do.
    pub(super) fn proof(history: &'a History, suffix: &'a [u32]) -> SampleRequest<'a> {
        SampleRequest {
            request_id: "proof",
            prompt: PromptIds { history, suffix },
            chat: None,
            temperature: 1.0,
            truncation: Truncation::default(),
            max_tokens: 1,
            top_logprobs: 0,
            structured_outputs: None,
            resident: None,
            first_of: None,
            deadline: Instant::now(),
        }
    }

    pub(crate) fn body(
        &self,
        config: &EnginesConfig,
        version: PolicyVersion,
        stream: bool,
    ) -> Result<RequestBody, serde_json::Error> {
        let body = GenerateBody {
            request_id: self.request_id,
            model: &config.model,
            token_ids: self.prompt,
            sampling_params: SamplingParams {
                temperature: self.temperature,
                truncation: self.truncation,
                max_tokens: self.max_tokens,
                // Of k, vLLM counts the sampled token as one.
                logprobs: match self.top_logprobs {
                    0 => 0,
                    count => count + 1,
                },
                stop_token_ids: &config.stop_token_ids,
                detokenize: false,
                structured_outputs: self.structured_outputs,
            },
            cache_salt: version.to_string(),
            stream,
        };
        body.encode(&config.written_ids)
    }

    pub(crate) fn bounds(&self, config: &EnginesConfig) -> Bounds {
        Bounds {
            max_tokens: self.max_tokens,
            top_logprobs: self.top_logprobs,
            vocabulary_size: config.vocabulary_size,
        }
    }
}

/// An answer and who gave it.
#[derive(Debug)]
pub struct Sampled {
    pub generated: Generated,
    /// Where its prefix is now.
    pub resident: Resident,
}

/// One line of `/status`.
#[derive(Clone, Debug, Serialize)]
pub struct EngineStatus {
    pub engine: EngineId,
    pub url: String,
    pub version: Option<PolicyVersion>,
    pub healthy: bool,
    pub running: u32,
    /// Requests it is to have at a time, once the core has said it.
    pub limit: Option<u32>,
    /// Share of the time since its first proof in which it had no request.
    pub idle_share: Option<f64>,
    pub doing: String,
    #[serde(skip)]
    pub down_for: Option<Duration>,
    #[serde(skip)]
    pub was_proved: bool,
    /// What it lacks that the run's config asks of it.
    #[serde(skip)]
    pub unfit: Option<String>,
}

/// The pool.
#[derive(Debug)]
pub struct Engines {
    pub(super) config: EnginesConfig,
    /// Grows when an engine joins; never shrinks.
    engines: RwLock<Vec<Arc<Engine>>>,
    /// Bumped whenever an engine may have become usable.
    pub(super) changed: watch::Sender<u64>,
    failovers: AtomicU64,
    /// Answers that were sampled again because weights were loaded meanwhile.
    crossed: AtomicU64,
    pub(super) driver: DriverHandle,
    pub(super) stop: CancellationToken,
    tasks: TaskTracker,
}

impl Engines {
    pub fn new(
        config: EnginesConfig,
        driver: DriverHandle,
        stop: CancellationToken,
        tasks: TaskTracker,
    ) -> Arc<Engines> {
        Arc::new(Engines {
            config,
            engines: RwLock::default(),
            changed: watch::channel(0).0,
            failovers: AtomicU64::new(0),
            crossed: AtomicU64::new(0),
            driver,
            stop,
            tasks,
        })
    }

    /// Add an engine, or learn that a known one was restarted. The error says what is wrong with the URL.
    pub fn join(self: &Arc<Self>, url: &str) -> Result<EngineId, String> {
        let url = parse_url(url)?;
        let mut engines = self.engines.write();
        if let Some(known) = engines.iter().find(|engine| engine.client.url() == url) {
            known.rejoined.notify_one();
            return Ok(known.id);
        }
        let next = engines.iter().map(|engine| engine.id.0 + 1).max();
        let id = EngineId(next.unwrap_or(0));
        engines.push(self.add(id, url)?);
        Ok(id)
    }

    /// Look for an engine that had joined before a restart.
    pub fn restore(self: &Arc<Self>, id: EngineId, url: &str) -> Result<(), String> {
        let engine = self.add(id, parse_url(url)?)?;
        engine.state.lock().was_known = true;
        self.engines.write().push(engine);
        Ok(())
    }

    fn add(self: &Arc<Self>, id: EngineId, url: String) -> Result<Arc<Engine>, String> {
        let client = EngineClient::new(url).map_err(|error| error.to_string())?;
        let (updates, receiver) = mpsc::unbounded_channel();
        let engine = Arc::new(Engine::new(id, client, updates));
        let supervised = supervisor::supervise(Arc::clone(self), Arc::clone(&engine), receiver);
        self.tasks.spawn(supervised);
        Ok(engine)
    }

    /// Run what asks engines, whoever waits for it.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// Carry out [`primerl_core::Effect::UpdateEngine`].
    pub(crate) fn update(
        &self,
        engine: EngineId,
        version: PolicyVersion,
        manifest: &str,
        digest: String,
    ) {
        let engines = self.engines.read();
        let Some(engine) = engines.iter().find(|known| known.id == engine) else {
            return;
        };
        // A closed channel means that the run is over.
        let _ = engine.updates.send(Update {
            version,
            manifest: manifest.into(),
            digest,
        });
    }

    /// Carry out [`primerl_core::Effect::LimitEngine`].
    pub(crate) fn limit(&self, engine: EngineId, limit: u32) {
        if let Some(engine) = self.engines.read().get(engine.0 as usize) {
            engine.state.lock().limit = limit;
        }
    }

    /// Smallest context among the engines that have answered, tokens.
    pub fn max_model_len(&self) -> Option<u32> {
        self.engines
            .read()
            .iter()
            .filter_map(|engine| engine.state.lock().max_model_len)
            .min()
    }

    /// Requests that were sent again because an engine failed.
    pub fn failovers(&self) -> u64 {
        self.failovers.load(Ordering::Relaxed)
    }

    /// Answers that were sampled again because weights were loaded meanwhile.
    pub fn crossed(&self) -> u64 {
        self.crossed.load(Ordering::Relaxed)
    }

    pub fn status(&self) -> Vec<EngineStatus> {
        let now = Instant::now();
        let describe = |engine: &Arc<Engine>| {
            let state = engine.state.lock();
            EngineStatus {
                engine: engine.id,
                url: engine.client.url().to_owned(),
                version: state.proved,
                healthy: state.healthy,
                running: state.load.running,
                limit: (state.limit < u32::MAX).then_some(state.limit),
                idle_share: state.load.idle_share(now),
                doing: state.doing.clone(),
                down_for: state.down_since.map(|since| now - since),
                was_proved: state.was_known || state.load.counted_since.is_some(),
                unfit: state.unfit.clone(),
            }
        };
        self.engines.read().iter().map(describe).collect()
    }

    /// Sample from one engine; if it fails, from another, until the deadline. With `progress`, the engine is asked for a
    /// stream, and another goes on where it failed.
    pub async fn generate(
        &self,
        request: &SampleRequest<'_>,
        mut progress: Option<&mut dyn Progress>,
    ) -> Result<Sampled, GenerateError> {
        let mut last = String::from("no engine has proved its weights");
        let mut failed = Vec::new();
        let mut attempts = 0;
        let mut begun = Begun::default();
        loop {
            let picked = self.pick(request.resident, request.deadline, &failed);
            let Some(slot) = picked.await else {
                return Err(GenerateError::Deadline { last });
            };
            let sampled = self.go_on(&slot, request, &mut begun, reborrow(&mut progress));
            let error = match sampled.await? {
                Ok(generated) => {
                    return Ok(Sampled {
                        generated,
                        resident: Resident {
                            engine: slot.engine.id,
                            version: slot.version,
                        },
                    });
                }
                Err(error) if !error.is_retryable() => return Err(GenerateError::Refused(error)),
                Err(error @ EngineError::Crossed { .. }) => {
                    // Nobody failed: it begins anew on the new weights, as often as the deadline allows.
                    tracing::info!(request = request.request_id, %error, "sampled again");
                    self.crossed.fetch_add(1, Ordering::Relaxed);
                    last = error.to_string();
                    continue;
                }
                Err(error) => error,
            };
            tracing::warn!(engine = %slot.engine.client.url(), request = request.request_id, %error, "engine request failed");
            last = format!("{}: {error}", slot.engine.client.url());
            if progress
                .as_mut()
                .is_some_and(|progress| !progress.go_on(begun.tokens()))
            {
                slot.engine.suspect();
                return Err(GenerateError::Interrupted { last });
            }
            self.failovers.fetch_add(1, Ordering::Relaxed);
            if matches!(error, EngineError::Unproved { .. }) {
                slot.engine.rejoined.notify_one();
            } else {
                slot.engine.suspect();
            }
            if slot.lost.is_cancelled() {
                continue; // It is out of rotation, so it cannot be picked again before it proved itself.
            }
            attempts += 1;
            if attempts >= MAX_ATTEMPTS {
                return Err(GenerateError::Exhausted { attempts, last });
            }
            failed.push(slot.engine.id);
            drop(slot);
            tokio::time::sleep(FIRST_BACKOFF * 2_u32.pow(attempts - 1)).await;
        }
    }

    /// Sample what is left of an answer. Where that fails, `begun` keeps what can be relied on.
    async fn go_on(
        &self,
        slot: &Slot,
        request: &SampleRequest<'_>,
        begun: &mut Begun,
        progress: Option<&mut dyn Progress>,
    ) -> Result<Result<Generated, EngineError>, GenerateError> {
        let before = begun.tokens().len();
        let rest = begun.rest(request);
        if let Some(rollout) = rest.first_of {
            let version = slot.version;
            self.driver
                .send(Event::SamplingStarted { rollout, version });
        }
        if let Some(messages) = rest.chat {
            // Nothing of it is shown before it is whole: there is never a part to go on from.
            let (config, timeout) = (&self.config, self.timeout(rest.deadline));
            let answer = chat::sample(slot, messages, &rest, config, timeout, progress);
            return Ok(slot.unless_lost(answer).await);
        }
        let bounds = rest.bounds(&self.config);
        let Some(progress) = progress else {
            return self.generate_on(slot, &rest, None).await;
        };
        let mut follow = Follow::new(progress, &slot.engine, slot.weights, before);
        let mut assembly = Assembly::default();
        let stream = Some((&mut follow, &mut assembly));
        let error = match self.generate_on(slot, &rest, stream).await? {
            Ok(generated) => return Ok(Ok(begun.with(generated))),
            Err(error) => error,
        };
        // A grammar would begin anew, and allow again what was said.
        if error.leaves_a_part() && request.structured_outputs.is_none() {
            let part = follow.part(assembly.take(), slot.version, &bounds);
            let stops = &self.config.stop_token_ids;
            if part.is_some_and(|part| begun.add(part, request.max_tokens, stops))
                && let Some(whole) = begun.take()
            {
                return Ok(Ok(whole));
            }
        }
        Ok(Err(error))
    }

    async fn generate_on(
        &self,
        slot: &Slot,
        request: &SampleRequest<'_>,
        stream: Option<(&mut Follow<'_>, &mut Assembly)>,
    ) -> Result<Result<Generated, EngineError>, GenerateError> {
        let body = request.body(&self.config, slot.version, stream.is_some())?;
        let bounds = request.bounds(&self.config);
        let timeout = self.timeout(request.deadline);
        let client = &slot.engine.client;
        let answer = async {
            match stream {
                None => client.generate(body, bounds, timeout).await,
                Some((follow, assembly)) => {
                    let id = request.request_id;
                    client
                        .generate_streamed(body, id, bounds, timeout, follow, assembly)
                        .await
                }
            }
        };
        let answer = slot.unless_lost(answer).await;
        Ok(answer.and_then(|generated| slot.check_versions(generated)))
    }

    /// Of one engine's answer.
    fn timeout(&self, deadline: Instant) -> Duration {
        let left = deadline.saturating_duration_since(Instant::now());
        left.min(self.config.request_timeout)
    }

    /// The ids that engines make of these messages; asked of one, and if it fails of another, until the deadline.
    pub async fn tokenize(
        &self,
        messages: &ChatMessages,
        resident: Option<Resident>,
        deadline: Instant,
    ) -> Result<Vec<u32>, GenerateError> {
        let mut last = String::from("no engine has proved its weights");
        let mut failed = Vec::new();
        loop {
            let Some(slot) = self.pick(resident, deadline, &failed).await else {
                return Err(GenerateError::Deadline { last });
            };
            let client = &slot.engine.client;
            let timeout = self.timeout(deadline);
            let answer = chat::tokenize(client, &self.config.model, messages, timeout);
            let error = match slot.unless_lost(answer).await {
                Ok(ids) => return Ok(ids),
                Err(error) if !error.is_retryable() => return Err(GenerateError::Refused(error)),
                Err(error) => error,
            };
            tracing::warn!(engine = %client.url(), %error, "an engine could not render");
            last = format!("{}: {error}", client.url());
            slot.engine.suspect();
            failed.push(slot.engine.id);
            let attempts = failed.len() as u32;
            if attempts >= MAX_ATTEMPTS {
                return Err(GenerateError::Exhausted { attempts, last });
            }
            drop(slot);
            tokio::time::sleep(FIRST_BACKOFF * 2_u32.pow(attempts - 1)).await;
        }
    }

    /// Wait until an engine may be used, and take a place on it. `None`: the deadline passed.
    async fn pick(
        &self,
        resident: Option<Resident>,
        deadline: Instant,
        failed: &[EngineId],
    ) -> Option<Slot> {
        let mut changed = self.changed.subscribe();
        loop {
            if deadline <= Instant::now() {
                return None;
            }
            if let Some(slot) = self.try_pick(resident, failed) {
                return Some(slot);
            }
            let deadline = tokio::time::Instant::from_std(deadline);
            match tokio::time::timeout_at(deadline, changed.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return None,
            }
        }
    }

    fn try_pick(&self, resident: Option<Resident>, failed: &[EngineId]) -> Option<Slot> {
        let engines = self.engines.read();
        let candidates: Vec<Candidate> = engines
            .iter()
            .filter_map(|engine| {
                let state = engine.state.lock();
                Some(Candidate {
                    engine: engine.id,
                    version: state.usable()?,
                    running: state.load.running,
                    limit: state.limit,
                    failed: failed.contains(&engine.id),
                })
            })
            .collect();
        let engine = &engines[choose(&candidates, resident)?.0 as usize];
        let mut state = engine.state.lock();
        // The state may have changed since it was read; the caller tries again.
        let version = state.usable()?;
        state.load.start(Instant::now());
        Some(Slot {
            engine: Arc::clone(engine),
            version,
            weights: engine.weights.load(Ordering::SeqCst),
            lost: state.lost.clone(),
        })
    }
}

/// For one call among several.
fn reborrow<'a>(progress: &'a mut Option<&mut dyn Progress>) -> Option<&'a mut dyn Progress> {
    match progress {
        Some(progress) => Some(&mut **progress),
        None => None,
    }
}

/// A request's place on an engine.
pub(super) struct Slot {
    pub engine: Arc<Engine>,
    pub version: PolicyVersion,
    /// [`Engine::weights`] when the place was taken.
    pub weights: u64,
    lost: CancellationToken,
}

impl Slot {
    async fn unless_lost<T>(
        &self,
        answer: impl Future<Output = Result<T, EngineError>>,
    ) -> Result<T, EngineError> {
        tokio::select! {
            answer = answer => answer,
            () = self.lost.cancelled() => Err(EngineError::Lost),
        }
    }

    /// Tokens may come from the version proved at the start, or from updates that were told since; from no other.
    pub(super) fn check_versions(&self, generated: Generated) -> Result<Generated, EngineError> {
        let newest = self.engine.state.lock().told.unwrap_or(self.version);
        let foreign = generated
            .versions
            .iter()
            .find(|run| !(self.version..=newest).contains(&run.version));
        match foreign {
            Some(run) => Err(EngineError::Unproved {
                label: run.version.to_string(),
            }),
            None => Ok(generated),
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.engine.state.lock();
        state.load.stop(Instant::now());
        if state.load.running == 0 {
            self.engine.idle.notify_one();
        }
    }
}
