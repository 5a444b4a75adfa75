//! What can be asked of the engine thread, and the handle by which the HTTP side asks it.

use crate::backend::ScoredToken;
use crate::request::RequestKey;
use crate::sequence::{Completion, Submission};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// What the requester of one or more sequences hears, with the index of the choice.
#[derive(Debug)]
pub enum Update {
    Token(u32, ScoredToken),
    Done(u32, Completion),
    /// The engine failed; nothing more will come.
    Failed(Arc<str>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseMode {
    Abort,
    Wait,
    Keep,
}

/// Why a command was not carried out; the engine continues.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct CommandError(pub String);

pub type Answer<T> = oneshot::Sender<Result<T, CommandError>>;

/// One sequence and where its answer goes.
pub struct Admission {
    pub submission: Submission,
    pub index: u32,
    pub request_id: Arc<str>,
    pub updates: mpsc::UnboundedSender<Update>,
}

pub enum Command {
    Submit(Vec<Admission>),
    /// Ends these requests, or all; answers how many sequences that were.
    Abort {
        request_ids: Option<Vec<String>>,
        answer: Answer<usize>,
    },
    /// The client hung up.
    Forget(Vec<RequestKey>),
    Pause {
        mode: PauseMode,
        clear_cache: bool,
        answer: Answer<()>,
    },
    Resume {
        answer: Answer<()>,
    },
    IsPaused {
        answer: Answer<bool>,
    },
    StartUpdate {
        answer: Answer<()>,
    },
    LoadWeights {
        path: PathBuf,
        answer: Answer<()>,
    },
    FinishUpdate {
        label: Option<String>,
        answer: Answer<()>,
    },
    SetLabel {
        label: String,
        answer: Answer<()>,
    },
    Label {
        answer: Answer<Arc<str>>,
    },
    Digest {
        answer: Answer<String>,
    },
    /// Answers whether no sequence holds KV afterwards.
    ResetCache {
        running_too: bool,
        answer: Answer<bool>,
    },
    /// Ends all requests, then the thread.
    Shutdown,
}

/// The engine thread is gone.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct EngineGone(pub String);

/// What both sides see.
pub struct Shared {
    /// Written once, by the first thread that finds that the engine has ended.
    failure: OnceLock<String>,
    origin: Instant,
    /// Milliseconds from `origin` + 1 at which the running step began; 0 between steps. Written by the engine thread.
    step_began: AtomicU64,
    next_key: AtomicU64,
    seed: u64,
}

impl Shared {
    /// The first reason counts.
    pub fn fail(&self, reason: &str) {
        let _ = self.failure.set(reason.to_owned());
    }

    pub fn step_begins(&self) {
        self.step_began.store(
            self.origin.elapsed().as_millis() as u64 + 1,
            Ordering::Relaxed,
        );
    }

    pub fn step_ended(&self) {
        self.step_began.store(0, Ordering::Relaxed);
    }
}

/// Sends commands to the engine thread.
#[derive(Clone)]
pub struct EngineHandle {
    commands: Sender<Command>,
    shared: Arc<Shared>,
}

impl EngineHandle {
    /// A handle, and what its engine needs: commands, and the state both sides see.
    pub fn new(seed: u64) -> (Self, Receiver<Command>, Arc<Shared>) {
        let (commands, receiver) = std::sync::mpsc::channel();
        let shared = Arc::new(Shared {
            failure: OnceLock::new(),
            origin: Instant::now(),
            step_began: AtomicU64::new(0),
            next_key: AtomicU64::new(0),
            seed,
        });
        let handle = EngineHandle {
            commands,
            shared: shared.clone(),
        };
        (handle, receiver, shared)
    }

    pub fn next_key(&self) -> RequestKey {
        RequestKey(self.shared.next_key.fetch_add(1, Ordering::Relaxed))
    }

    /// The seed of a request that brings none. From the engine's seed and the request's id where it has one, so that a run
    /// that is repeated samples the same whichever request comes first; else from its number. The length of the prompt
    /// counts too: an answer that another engine continues must not draw its first random numbers again.
    pub fn default_seed(
        &self,
        request_id: Option<&str>,
        prompt_len: usize,
        key: RequestKey,
    ) -> u64 {
        let seed = self.shared.seed;
        match request_id {
            Some(id) => {
                let named = xxh3_64_with_seed(id.as_bytes(), seed);
                xxh3_64_with_seed(&(prompt_len as u64).to_le_bytes(), named)
            }
            None => xxh3_64_with_seed(&key.0.to_le_bytes(), seed),
        }
    }

    /// Sends a command that has no answer.
    pub fn tell(&self, command: Command) -> Result<(), EngineGone> {
        self.commands.send(command).map_err(|_| self.gone())
    }

    /// Sends a command and waits until the engine has carried it out.
    pub async fn ask<T>(
        &self,
        command: impl FnOnce(Answer<T>) -> Command,
    ) -> Result<Result<T, CommandError>, EngineGone> {
        let (answer, answered) = oneshot::channel();
        self.tell(command(answer))?;
        answered.await.map_err(|_| self.gone())
    }

    pub fn gone(&self) -> EngineGone {
        EngineGone(
            self.failure()
                .unwrap_or_else(|| "the engine has stopped".into()),
        )
    }

    pub fn failure(&self) -> Option<String> {
        self.shared.failure.get().cloned()
    }

    pub fn mark_failed(&self, reason: &str) {
        self.shared.fail(reason);
    }

    /// How long the running step has lasted.
    pub fn step_lasts(&self) -> Option<Duration> {
        let began = self
            .shared
            .step_began
            .load(Ordering::Relaxed)
            .checked_sub(1)?;
        Some(
            self.shared
                .origin
                .elapsed()
                .saturating_sub(Duration::from_millis(began)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_follows_from_the_requests_id_and_not_from_its_turn() {
        let (engine, _commands, _shared) = EngineHandle::new(7);
        let seed = |id, length, key| engine.default_seed(id, length, RequestKey(key));
        let named = seed(Some("rollout-3-1-0"), 12, 0);
        assert_eq!(seed(Some("rollout-3-1-0"), 12, 99), named);
        let (again, _commands, _shared) = EngineHandle::new(7);
        assert_eq!(
            again.default_seed(Some("rollout-3-1-0"), 12, RequestKey(5)),
            named
        );
        let (other, _commands, _shared) = EngineHandle::new(8);
        let others = [
            seed(Some("rollout-3-1-1"), 12, 0),
            seed(Some("rollout-3-1-0"), 13, 0),
            seed(None, 12, 0),
            seed(None, 12, 1),
            other.default_seed(Some("rollout-3-1-0"), 12, RequestKey(0)),
        ];
        let all: std::collections::HashSet<u64> = others.into_iter().chain([named]).collect();
        assert_eq!(all.len(), 6);
    }
}
