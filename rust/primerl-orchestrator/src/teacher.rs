//! On-policy distillation: the teacher scores the samples of every complete group.
//!
//! A request that may succeed later is made again for as long as the group waits. A teacher that answers nothing for
//! `timeouts.no_engine_s` ends the run, with its last words: what was sampled stays in the journal, and is scored when the
//! run goes on.

use crate::clients::{EndpointError, Outage, Pending, Scorer};
use crate::driver::DriverHandle;
use crate::failure::{Failures, RunError};
use crate::telemetry::{Overdue, Waits};
use primerl_core::Event;
use primerl_core::effect::TeacherRequest;
use primerl_core::sample::TokenLogprobs;
use primerl_render::Renderer;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::{OnceCell, Semaphore};
use tokio_util::sync::CancellationToken;

/// Samples that the teacher is given at a time. An engine batches them.
const AT_A_TIME: usize = 64;
const FIRST_BACKOFF: Duration = Duration::from_millis(250);
const LONGEST_BACKOFF: Duration = Duration::from_secs(5);
/// A group that waits for longer is named in the log.
const PATIENCE: Duration = Duration::from_secs(25);
/// Words, letters, digits, spaces, newlines, accents, other scripts and an emoji: vocabularies differ somewhere here.
const PROBE: &str = "The quick brown fox jumps over the lazy dog, and then there is another thing: 12345.678 + 90\n\n\tif (x != y) \
                     { return  \"Größe\"; }\r\n# Привет, мир! 知識は力なり 🙂 https://example.org/a_b?c=d%20e \\begin{equation}";

/// The way to the teacher. Clones share it.
#[derive(Clone)]
pub(crate) struct Teacher(Arc<Inner>);

struct Inner {
    parts: Parts,
    runtime: Handle,
    slots: Semaphore,
    proved: OnceCell<()>,
    outage: Outage,
}

/// What it is made of.
pub(crate) struct Parts {
    pub scorer: Scorer,
    pub renderer: Arc<Renderer>,
    pub driver: DriverHandle,
    pub failures: Failures,
    pub waits: Waits,
    pub stop: CancellationToken,
    /// Longest time of one group.
    pub timeout: Duration,
    /// The run ends when nothing was answered for so long.
    pub limit: Duration,
}

impl Teacher {
    /// Asks it at once what it makes of a text: a wrong teacher must not be found out at the end of the first group.
    ///
    /// # Panics
    /// Outside of a runtime.
    pub fn start(parts: Parts) -> Teacher {
        let teacher = Teacher(Arc::new(Inner {
            parts,
            runtime: Handle::current(),
            slots: Semaphore::new(AT_A_TIME),
            proved: OnceCell::new(),
            outage: Outage::default(),
        }));
        let inner = Arc::clone(&teacher.0);
        teacher.spawn(async move { inner.prove().await });
        teacher
    }

    /// Carry out [`primerl_core::Effect::ScoreByTeacher`].
    pub fn score(&self, request: Arc<TeacherRequest>) {
        let inner = Arc::clone(&self.0);
        self.spawn(async move {
            let group = request.group;
            let scored = tokio::time::timeout(inner.parts.timeout, inner.group(&request)).await;
            // Past that time the core has given the group up.
            if let Ok(result) = scored {
                inner
                    .parts
                    .driver
                    .send(Event::TeacherScored { group, result });
            }
        });
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stop = self.0.parts.stop.clone();
        self.0.runtime.spawn(async move {
            tokio::select! {
                () = task => {}
                () = stop.cancelled() => {}
            }
        });
    }
}

impl Inner {
    async fn group(&self, request: &TeacherRequest) -> Result<Vec<TokenLogprobs>, String> {
        let who = format!("group {}", request.group);
        let waiting_for = format!("the log-probabilities of {}", self.parts.scorer.describe());
        let _waiting = self
            .parts
            .waits
            .begin(who, waiting_for, PATIENCE, Overdue::IsNamed);
        self.prove().await;
        let samples = request.samples.iter();
        let scores = samples.map(|sample| self.scores_of(sample.token_ids()));
        futures_util::future::try_join_all(scores).await
    }

    async fn scores_of(&self, token_ids: Vec<u32>) -> Result<TokenLogprobs, String> {
        let mut backoff = FIRST_BACKOFF;
        let pending = self.outage.begin(Instant::now());
        loop {
            let asked = {
                let _slot = self.slots.acquire().await;
                self.parts.scorer.score(&token_ids).await
            };
            match asked {
                Ok(scores) => {
                    pending.answered(Instant::now());
                    return Ok(TokenLogprobs(scores.into()));
                }
                Err(failed) => self.wait_after(&pending, failed, &mut backoff).await?,
            }
        }
    }

    /// Resolves once the teacher has shown that it has our vocabulary, as far as it can; where it has not, the run fails.
    async fn prove(&self) {
        self.proved.get_or_init(|| self.compare()).await;
    }

    async fn compare(&self) {
        let name = self.parts.scorer.describe();
        let mut backoff = FIRST_BACKOFF;
        let pending = self.outage.begin(Instant::now());
        let theirs = loop {
            match self.parts.scorer.tokenize(PROBE).await {
                Ok(theirs) => break Ok(theirs),
                Err(failed) => {
                    let waited = self.wait_after(&pending, failed, &mut backoff).await;
                    if let Err(problem) = waited {
                        break Err(problem);
                    }
                }
            }
        };
        let problem = match (theirs, self.parts.renderer.tokenizer().encode(PROBE)) {
            (Ok(Some(theirs)), Ok(ours)) if theirs == ours => return,
            (Ok(None), _) => {
                tracing::warn!("{name} does not say how it tokenizes: nobody knows whether it has the model's vocabulary");
                return;
            }
            (Ok(Some(_)), Ok(_)) => {
                "it makes other tokens of a text than the model; its log-probabilities would be of other tokens".to_owned()
            }
            (Ok(Some(_)), Err(error)) => error.to_string(),
            (Err(problem), _) => problem,
        };
        self.parts
            .failures
            .fail(RunError::Teacher { name, problem });
        // Nothing is scored by it.
        std::future::pending().await
    }

    /// Waits until a request that failed may be made again; the error says why that would not help.
    async fn wait_after(
        &self,
        pending: &Pending<'_>,
        (error, wait): (EndpointError, Option<Duration>),
        backoff: &mut Duration,
    ) -> Result<(), String> {
        let now = Instant::now();
        if !error.is_outage() {
            pending.answered(now);
            return Err(error.to_string());
        }
        let name = self.parts.scorer.describe();
        if pending.is_news(now, LONGEST_BACKOFF) {
            let down_s = pending.silence(now).as_secs_f64();
            tracing::warn!(%error, down_s, "{name} does not answer");
        }
        if let Some(end) = pending.given_up(now, self.parts.limit, name, &error) {
            self.parts.failures.fail(end);
            return std::future::pending().await;
        }
        let wait = wait.map_or(*backoff, |wait| wait.max(*backoff));
        tokio::time::sleep(wait.min(LONGEST_BACKOFF)).await;
        *backoff = (*backoff * 2).min(LONGEST_BACKOFF);
        Ok(())
    }
}
