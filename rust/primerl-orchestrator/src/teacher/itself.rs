//! On-policy self-distillation (SDFT, arXiv:2601.19897): the policy is its own teacher, having seen a demonstration. What it
//! sampled is scored behind a system message that holds it, by engines that have proved their weights.

use crate::config::DemonstrationConfig;
use primerl_core::Event;
use primerl_core::effect::TeacherRequest;
use primerl_core::sample::{Sample, TokenLogprobs};
use primerl_engines::Engines;
use primerl_render::{Message, RenderError, RenderOptions, Renderer};
use primerl_service::inbox::DriverHandle;
use primerl_service::waits::{Overdue, Waits};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// Samples of one environment that are scored at a time: engines batch them with the rollouts.
const AT_A_TIME: usize = 64;
/// A group that waits for longer is named in the log.
const PATIENCE: Duration = Duration::from_secs(25);

/// The handle. Clones share it.
#[derive(Clone)]
pub(crate) struct Itself(Arc<Inner>);

struct Inner {
    parts: Parts,
    shown: DemonstrationConfig,
    places: Semaphore,
}

pub(crate) struct Parts {
    pub renderer: Arc<Renderer>,
    pub engines: Arc<Engines>,
    pub driver: DriverHandle,
    pub waits: Waits,
    pub stop: CancellationToken,
    /// Longest time of one group.
    pub timeout: Duration,
}

impl Itself {
    pub fn new(parts: Parts, shown: DemonstrationConfig) -> Itself {
        Itself(Arc::new(Inner {
            parts,
            shown,
            places: Semaphore::new(AT_A_TIME),
        }))
    }

    /// Carries out [`primerl_core::Effect::ScoreByTeacher`].
    pub fn score(&self, request: Arc<TeacherRequest>) {
        let inner = Arc::clone(&self.0);
        let stop = inner.parts.stop.clone();
        tokio::spawn(async move {
            let group = request.group;
            tokio::select! {
                result = inner.group(&request) => {
                    inner.parts.driver.send(Event::TeacherScored { group, result });
                }
                () = stop.cancelled() => {}
            }
        });
    }
}

impl Inner {
    async fn group(&self, request: &TeacherRequest) -> Result<Vec<TokenLogprobs>, String> {
        let waiting_for = "the policy's log-probabilities behind a demonstration";
        let who = format!("group {}", request.group);
        let waits = &self.parts.waits;
        let _waiting = waits.begin(who, waiting_for, PATIENCE, Overdue::IsNamed);
        let deadline = Instant::now() + self.parts.timeout;
        let name = format!("group-{}", request.group);
        let samples = request.samples.iter().zip(&request.demonstrations);
        let scores = samples.map(|(sample, demonstration)| {
            self.scores_of(&name, sample, demonstration.as_deref(), deadline)
        });
        futures_util::future::try_join_all(scores).await
    }

    async fn scores_of(
        &self,
        name: &str,
        sample: &Sample,
        demonstration: Option<&str>,
        deadline: Instant,
    ) -> Result<TokenLogprobs, String> {
        let demonstration = demonstration
            .ok_or_else(|| format!("the environment has reported no {}", self.shown.key))?;
        let mut ids = shown_ids(&self.parts.renderer, &self.shown.message(demonstration))
            .map_err(|error| error.to_string())?;
        let before = ids.len();
        ids.extend(sample.token_ids());
        // Not closed: the semaphore lives as long as this.
        let _place = self
            .places
            .acquire()
            .await
            .map_err(|error| error.to_string())?;
        let scored = self.parts.engines.score(name, &ids, deadline).await;
        let mut logprobs = scored.map_err(|error| error.to_string())?.split_off(before);
        // As of a teacher: nothing precedes a sample's first token.
        if let Some(first) = logprobs.first_mut() {
            *first = 0.0;
        }
        Ok(TokenLogprobs(logprobs.into()))
    }
}

/// Ids of a conversation that is a system message alone.
pub(crate) fn shown_ids(renderer: &Renderer, text: &str) -> Result<Vec<u32>, RenderError> {
    let mut message = Message::user(text);
    message.role = "system".to_owned();
    let options = RenderOptions {
        add_generation_prompt: false,
        ..RenderOptions::default()
    };
    renderer.render(&[message], &options)
}
