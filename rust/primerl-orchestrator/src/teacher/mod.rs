//! On-policy distillation: the teacher scores the samples of every complete group.
//!
//! ```text
//! group ─> samples ─> the server with the fewest requests, of those that are well (`health`)
//!              ^             │ fails, is killed, hangs
//!              └─────────────┘ at once, or by a deadline: another one
//! one task a server: looks at it each second, proves it (`proof`) before it gets requests
//! ```
//! A request that may succeed later is repeated for as long as the group waits. When no server answers anything for
//! `timeouts.no_engine_s` the run ends, with the servers' last errors: what was sampled stays in the journal, and is
//! scored when the run resumes.

mod free;
mod health;
pub(crate) mod itself;
mod member;
mod proof;
mod watch;

use crate::failure::Failures;
use member::{Member, Place, is_another};
use parking_lot::Mutex;
use primerl_core::Event;
use primerl_core::effect::TeacherRequest;
use primerl_core::sample::TokenLogprobs;
use primerl_engines::Engines;
use primerl_engines::clients::{EndpointError, Outage, Pending, Scorer};
use primerl_render::Renderer;
use primerl_service::inbox::DriverHandle;
use primerl_service::waits::{Overdue, Waits};
use proof::Said;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Samples that one server gets at a time. An engine batches them.
const AT_A_TIME: usize = 64;
const FIRST_BACKOFF: Duration = Duration::from_millis(250);
const LONGEST_BACKOFF: Duration = Duration::from_secs(5);
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);
/// A group that waits for longer is named in the log.
const PATIENCE: Duration = Duration::from_secs(25);

/// The handle of the teacher. Clones share it.
#[derive(Clone)]
pub(crate) struct Teacher(Arc<Inner>);

struct Inner {
    parts: Parts,
    members: Vec<Member>,
    runtime: Handle,
    /// A place on a server may be free.
    free: Notify,
    outage: Outage,
    /// The first proved server's answers to the proof.
    reference: Mutex<Option<Said>>,
    /// A sample was scored: the run continues with the servers that it has.
    has_scored: AtomicBool,
}

/// The parts of a teacher.
pub(crate) struct Parts {
    pub renderer: Arc<Renderer>,
    pub driver: DriverHandle,
    pub engines: Arc<Engines>,
    pub failures: Failures,
    pub waits: Waits,
    pub stop: CancellationToken,
    /// Longest time of one group.
    pub timeout: Duration,
    /// The run ends when nothing was answered for this long.
    pub limit: Duration,
    /// Longest sample that is trained, tokens.
    pub seq_len: u32,
}

impl Teacher {
    /// Asks the servers at once to score a text: a wrong teacher must not be found only after the first group.
    ///
    /// # Panics
    /// Called outside of a runtime.
    pub fn start(parts: Parts, scorers: Vec<Scorer>) -> Teacher {
        let teacher = Teacher(Arc::new(Inner {
            parts,
            members: scorers.into_iter().map(Member::new).collect(),
            runtime: Handle::current(),
            free: Notify::new(),
            outage: Outage::default(),
            reference: Mutex::default(),
            has_scored: AtomicBool::new(false),
        }));
        for at in 0..teacher.0.members.len() {
            let inner = Arc::clone(&teacher.0);
            teacher.spawn(async move { inner.watch(at).await });
        }
        let inner = Arc::clone(&teacher.0);
        teacher.spawn(async move {
            // A server that does not exist is found before any group waits for it.
            let pending = inner.outage.begin(Instant::now());
            inner.place(&pending, None).await;
        });
        teacher
    }

    /// Carries out [`primerl_core::Effect::ScoreByTeacher`].
    pub fn score(&self, request: Arc<TeacherRequest>) {
        let inner = Arc::clone(&self.0);
        self.spawn(async move {
            let group = request.group;
            let scored = tokio::time::timeout(inner.parts.timeout, inner.group(&request)).await;
            // After that time the core has given the group up.
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
    /// All its servers, for people.
    fn describe(&self) -> String {
        let names: Vec<String> = self.members.iter().map(|it| it.scorer.describe()).collect();
        names.join(", ")
    }

    async fn group(&self, request: &TeacherRequest) -> Result<Vec<TokenLogprobs>, String> {
        let who = format!("group {}", request.group);
        let waiting_for = format!("the log-probabilities of {}", self.describe());
        let _waiting = self
            .parts
            .waits
            .begin(who, waiting_for, PATIENCE, Overdue::IsNamed);
        let samples = request.samples.iter();
        let scores = samples.map(|sample| self.scores_of(sample.token_ids()));
        futures_util::future::try_join_all(scores).await
    }

    async fn scores_of(&self, token_ids: Vec<u32>) -> Result<TokenLogprobs, String> {
        let mut backoff = FIRST_BACKOFF;
        let pending = self.outage.begin(Instant::now());
        let mut failed = None;
        loop {
            let (at, place) = self.place(&pending, failed).await;
            let asked = tokio::select! {
                asked = place.member.scorer.score(&token_ids) => Some(asked),
                () = place.lost.cancelled() => None,
            };
            let (error, wait) = match asked {
                Some(Ok(scores)) => {
                    place.answered();
                    self.give_back(place);
                    pending.answered(Instant::now());
                    self.has_scored.store(true, Ordering::Relaxed);
                    return Ok(TokenLogprobs(scores.into()));
                }
                Some(Err(error)) => error,
                // Another server is asked, or this one when it is back.
                None => {
                    failed = Some(at);
                    continue;
                }
            };
            if !error.is_outage() && !is_another(&error) {
                place.answered();
                self.give_back(place);
                pending.answered(Instant::now());
                return Err(error.to_string());
            }
            failed = Some(at);
            self.told_of(at, &error, &pending);
            let is_lost = matches!(error, EndpointError::Transport(_));
            self.give_back(place);
            if is_lost && self.another_is_well(at) {
                continue;
            }
            let wait = wait.map_or(backoff, |wait| wait.max(backoff));
            tokio::time::sleep(wait.min(LONGEST_BACKOFF)).await;
            backoff = (backoff * 2).min(LONGEST_BACKOFF);
        }
    }

    /// A place is free.
    fn give_back(&self, place: Place<'_>) {
        drop(place);
        self.free.notify_one();
    }

    fn told_of(&self, at: usize, error: &EndpointError, pending: &Pending<'_>) {
        let member = &self.members[at];
        member.request_failed(error);
        if member.is_news(LONGEST_BACKOFF) {
            tracing::warn!(%error, "{} does not answer", member.scorer.describe());
        }
        if !self.another_is_well(at) {
            self.end_if_given_up(pending);
        }
    }

    fn another_is_well(&self, at: usize) -> bool {
        let mut others = self.members.iter().enumerate().filter(|it| it.0 != at);
        others.any(|(_, member)| member.state.lock().health.is_well())
    }

    /// A place on the server with the fewest requests; not on the server that `failed` this request, if another one is
    /// well. Waits until there is one; if that takes too long, the run ends.
    async fn place(&self, pending: &Pending<'_>, failed: Option<usize>) -> (usize, Place<'_>) {
        let idle = || {
            if !self.any_is_well() {
                self.end_if_given_up(pending);
            }
        };
        free::take(&self.free, BETWEEN_LOOKS, || self.try_place(failed), idle).await
    }

    fn try_place(&self, failed: Option<usize>) -> Option<(usize, Place<'_>)> {
        let mut choice: Vec<(bool, usize, usize)> = self
            .members
            .iter()
            .enumerate()
            .map(|(at, member)| (failed == Some(at), member.state.lock().health.running, at))
            .collect();
        choice.sort_unstable();
        let mut places = choice
            .iter()
            .map(|(_, _, at)| (*at, self.members[*at].take(AT_A_TIME)));
        places.find_map(|(at, place)| Some((at, place?)))
    }

    fn any_is_well(&self) -> bool {
        self.members
            .iter()
            .any(|member| member.state.lock().health.is_well())
    }

    fn end_if_given_up(&self, pending: &Pending<'_>) {
        let said = |member: &Member| {
            let last = member.state.lock().last.clone();
            last.map(|last| match self.members.len() {
                1 => last,
                _ => format!("{}: {last}", member.scorer.root()),
            })
        };
        let last: Vec<String> = self.members.iter().filter_map(said).collect();
        let last = last.join("; ");
        let limit = self.parts.limit;
        if let Some(end) = pending.given_up(
            Instant::now(),
            limit,
            self.describe(),
            "teacher.client",
            &last,
        ) {
            self.parts.failures.fail(end.into());
        }
    }
}
