//! Commands about weights. A checkpoint is read and checked here, between two steps, before the model is touched.

use super::Engine;
use crate::backend::{Backend, BackendError};
use crate::checkpoint::Checkpoint;
use crate::handle::{Command, CommandError};
use std::path::Path;
use std::time::Instant;

impl<B: Backend> Engine<B> {
    /// The commands about weights.
    pub(super) fn carry_out_update(&mut self, command: Command) -> Result<(), BackendError> {
        let began = Instant::now();
        let versions = &mut self.scheduler.versions;
        match command {
            Command::StartUpdate { answer } => {
                let _ = answer.send(
                    versions
                        .start()
                        .map_err(|error| CommandError(error.to_string())),
                );
                self.metrics
                    .update_took("start", began.elapsed().as_secs_f64());
            }
            Command::LoadWeights { path, answer } => {
                let result = self.load_weights(&path)?;
                let seconds = began.elapsed().as_secs_f64();
                self.metrics.busy_seconds.inc_by(seconds);
                self.metrics.update_took("update", seconds);
                match &result {
                    Ok(()) => tracing::info!(path = %path.display(), seconds, "weights loaded"),
                    Err(error) => {
                        tracing::error!(path = %path.display(), %error, "weights refused")
                    }
                }
                let _ = answer.send(result);
            }
            Command::FinishUpdate { label, answer } => {
                let _ = answer.send(
                    versions
                        .finish(label)
                        .map_err(|error| CommandError(error.to_string())),
                );
                self.metrics
                    .update_took("finish", began.elapsed().as_secs_f64());
            }
            Command::SetLabel { label, answer } => {
                versions.set_label(label);
                let _ = answer.send(Ok(()));
            }
            Command::Label { answer } => {
                let _ = answer.send(Ok(versions.label()));
            }
            Command::Digest { answer } => match self.backend.digest() {
                Ok(digest) => drop(answer.send(Ok(digest))),
                Err(BackendError::Refused(reason)) => drop(answer.send(Err(CommandError(reason)))),
                Err(error) => return Err(error),
            },
            _ => {}
        }
        Ok(())
    }

    fn read_and_load(&mut self, path: &Path) -> Result<(), BackendError> {
        let folder = self.backend.locate(path)?;
        let expected = self.backend.info().loadable.as_ref();
        let checkpoint = Checkpoint::read(&folder, expected)
            .map_err(|error| BackendError::Refused(error.to_string()))?;
        self.backend.load_weights(&checkpoint)
    }

    fn load_weights(&mut self, path: &Path) -> Result<Result<(), CommandError>, BackendError> {
        if let Err(error) = self.scheduler.versions.check_started() {
            return Ok(Err(CommandError(error.to_string())));
        }
        match self.read_and_load(path) {
            Ok(()) => {
                self.scheduler.weights_changed();
                Ok(Ok(()))
            }
            Err(BackendError::Refused(reason)) => {
                self.scheduler.versions.failed();
                Ok(Err(CommandError(reason)))
            }
            Err(error) => Err(error),
        }
    }
}
