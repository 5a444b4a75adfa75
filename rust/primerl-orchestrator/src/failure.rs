//! How a run ends badly: the first failure wins, everything else stops.

use primerl_engines::clients::Unanswered;
use primerl_gateway::{AccessError, RunEnd};
use primerl_record::batch::EncodeError;
use primerl_record::journal::{JournalError, RestoreError, SkipError};
use primerl_service::config_error::ConfigError;
use primerl_service::files::WriteError;
use primerl_service::http::ApiError;
use primerl_service::inbox::RunOver;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::watch;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(
        "host, port: cannot listen on {address}: {source}; choose another port, or 0 for a free one"
    )]
    Bind {
        address: String,
        source: std::io::Error,
    },
    #[error("output_dir: cannot use {path}: {source}")]
    OutputFolder {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "output_dir: {path} belongs to another orchestrator that still runs; stop it or give another folder"
    )]
    OutputFolderInUse { path: PathBuf },
    #[error(transparent)]
    Journal(JournalError),
    #[error(transparent)]
    Restore(RestoreError),
    #[error(transparent)]
    Skip(#[from] SkipError),
    #[error(
        "{path} holds a run that was begun with {name} = {was}, and now {name} = {is}: resume with the same config, or \
         begin a new run in another --output-dir (--clean-output-dir deletes this one)"
    )]
    Changed {
        path: PathBuf,
        name: String,
        was: String,
        is: String,
    },
    #[error(
        "the run cannot go back to the checkpoint of step {step}: {folder} has no state of the orchestrator ({why}); \
         go back to another one, or begin a new run with its weights"
    )]
    NoState {
        step: u64,
        folder: PathBuf,
        why: String,
    },
    #[error(
        "{path} is not the batch of step {step} that the journal describes ({problem}), and it cannot be written again \
         ({why}): it is given to no trainer; go back to a checkpoint (--ckpt.resume-step), or begin a new run in another \
         --output-dir"
    )]
    DamagedBatch {
        step: u64,
        path: PathBuf,
        problem: String,
        why: String,
    },
    #[error("{error}: {}", error.source)]
    Write { error: WriteError },
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error("engine {url} cannot serve this run: {lacking}")]
    UnfitEngine { url: String, lacking: String },
    #[error("{name}: {problem}; see teacher.client")]
    Teacher { name: String, problem: String },
    #[error(transparent)]
    Unanswered(#[from] Unanswered),
    #[error("no engine could be reached for {seconds:.0} s: {engines}")]
    NoEngine { seconds: f64, engines: String },
    #[error(
        "the trainer has been silent for {seconds:.0} s (timeouts.trainer_s), its last words: {doing}; it hangs, or the \
         machine it runs on is gone"
    )]
    TrainerSilent { seconds: f64, doing: String },
    #[error(
        "the trainer {why} and was started again, and has not begun within {seconds:.0} s (timeouts.start_s): see \
         logs/trainer.log, and raise it where the start is only slow"
    )]
    TrainerNotBack { seconds: f64, why: String },
    #[error(
        "{who} has waited for {waiting_for} for {seconds:.0} s, and nothing can continue without it"
    )]
    Stuck {
        who: String,
        waiting_for: String,
        seconds: f64,
    },
    #[error("{reason}")]
    Core { reason: String },
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    #[error("the HTTP server stopped: {0}")]
    Server(std::io::Error),
    #[error("{task} stopped unexpectedly; this is a bug in primerl")]
    TaskDied { task: &'static str },
}

impl RunError {
    /// Whether the user's input is wrong, in contrast to something that happened.
    pub fn is_input(&self) -> bool {
        matches!(
            self,
            RunError::Config(_)
                | RunError::Bind { .. }
                | RunError::OutputFolder { .. }
                | RunError::OutputFolderInUse { .. }
                | RunError::Changed { .. }
                | RunError::Restore(_)
                | RunError::Skip(_)
                | RunError::NoState { .. }
        )
    }
}

/// Why a check refuses, for a program that started it.
#[derive(Debug, Serialize)]
pub struct Refusal<'a> {
    /// `changed`: the run was begun with another value of `key`. `config`: the config is wrong. `input`: all else.
    pub code: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub was: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub now: Option<&'a str>,
    /// The same for people.
    pub message: String,
}

impl RunError {
    pub fn refusal(&self) -> Refusal<'_> {
        let (code, key) = match self {
            RunError::Config(error) => ("config", error.key()),
            RunError::Changed { name, .. } => ("changed", Some(name.as_str())),
            RunError::OutputFolder { .. } | RunError::OutputFolderInUse { .. } => {
                ("input", Some("output_dir"))
            }
            _ => ("input", None),
        };
        let (was, now) = match self {
            RunError::Changed { was, is, .. } => (Some(was.as_str()), Some(is.as_str())),
            _ => (None, None),
        };
        let message = self.to_string();
        Refusal {
            code,
            key,
            was,
            now,
            message,
        }
    }
}

impl From<AccessError> for RunError {
    fn from(AccessError { path, source }: AccessError) -> Self {
        RunError::OutputFolder { path, source }
    }
}

impl From<WriteError> for RunError {
    fn from(error: WriteError) -> Self {
        RunError::Write { error }
    }
}

/// Where any part reports that the run cannot continue.
#[derive(Clone, Debug)]
pub struct Failures(Arc<watch::Sender<Option<Arc<RunError>>>>);

impl Default for Failures {
    fn default() -> Self {
        Failures(Arc::new(watch::channel(None).0))
    }
}

impl Failures {
    /// Keeps the first failure; later ones are its consequences.
    pub fn fail(&self, error: RunError) {
        self.0.send_if_modified(|failure| {
            if failure.is_some() {
                tracing::debug!(%error, "it failed after the run had");
                return false;
            }
            tracing::error!(%error, "the run failed");
            *failure = Some(Arc::new(error));
            true
        });
    }

    pub fn get(&self) -> Option<Arc<RunError>> {
        self.0.borrow().clone()
    }

    /// Waits for the first failure.
    pub async fn wait(&self) -> Arc<RunError> {
        let mut receiver = self.0.subscribe();
        loop {
            if let Some(error) = receiver.borrow_and_update().clone() {
                return error;
            }
            if receiver.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

impl RunEnd for Failures {
    fn over(&self) -> ApiError {
        match self.get() {
            Some(error) => {
                ApiError::internal(format!("the run failed: {error}")).code("run_failed")
            }
            None => RunOver.into(),
        }
    }

    fn fail(&self, unanswered: Unanswered) {
        // Other waiters have seen the same error.
        if self.get().is_none() {
            Failures::fail(self, unanswered.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_cannot_be_used_is_refused_by_its_key() {
        let error = RunError::OutputFolderInUse { path: "out".into() };
        let refusal = error.refusal();
        assert_eq!((refusal.code, refusal.key), ("input", Some("output_dir")));
    }
}
