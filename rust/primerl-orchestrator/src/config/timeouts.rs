//! How long each part of the run may take.

use serde::Deserialize;
use std::time::Duration;

/// Seconds.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimeoutsConfig {
    pub rollout_s: f64,
    pub worker_s: f64,
    pub long_poll_s: f64,
    /// `None`: an evaluation may last, as long as it measures something.
    pub evaluation_s: Option<f64>,
    /// An evaluation that training waits for is closed when it has measured nothing for this long; `None`: three times
    /// `rollout_s`, in which a rollout that hangs and its second attempt have come to their end.
    pub evaluation_progress_s: Option<f64>,
    pub engine_request_s: f64,
    pub engine_update_s: f64,
    /// The run fails when no engine answered for this long, after one had proved its weights.
    pub no_engine_s: f64,
    /// A trainer that holds a batch and has not published its weights for this long is warned about.
    pub weights_s: f64,
    /// The run fails when a trainer that sends heartbeats has been silent for this long.
    pub trainer_s: f64,
}

impl TimeoutsConfig {
    /// Silence of a trainer on another machine after which another one may have the run. Shorter than the one that ends it.
    pub(crate) fn trainer_patience(&self) -> Duration {
        Duration::from_secs_f64(self.trainer_s / 2.0)
    }
}
