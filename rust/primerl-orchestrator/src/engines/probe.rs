//! What an engine computes with new weights, by what the trainer computed with them: a digest proves what an engine was
//! given, not what it uses (vLLM's CPU build keeps packed copies of its weights, for one).
//!
//! ```text
//! manifest.json: "probe": {"token_ids": [N], "logprobs": [N]}     of each token after those before it, nats; the first 0
//! engine:        prompt_logprobs of the same tokens               right after the update
//! accepted:      mean |difference| <= `probe_tolerance`
//! ```
//! Answers with tokens of the new weights are held back until then (`Engines::unless_probe_fails`, `Follow`). In half
//! precision that finds weights that are broken or of another model; those of the version before are as near as rounding.

use super::client::{EngineClient, EngineError};
use super::pool::EnginesConfig;
use crate::clients::scored_logprobs;
use primerl_core::PolicyVersion;
use serde::Deserialize;
use serde_json::json;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub(super) enum ProbeError {
    #[error("cannot read the probe in {path}: {problem}")]
    Read { path: PathBuf, problem: String },
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(
        "it says that its weights are those of version {version}, but it does not compute with them: the \
         log-probabilities of the probe's {tokens} tokens are {mean} nats from the trainer's in the mean, {largest} at \
         most, and {tolerance} are allowed (orchestrator.probe_tolerance)"
    )]
    Differs {
        version: PolicyVersion,
        tokens: usize,
        mean: f64,
        largest: f64,
        tolerance: f64,
    },
}

#[derive(Debug, Deserialize)]
pub(super) struct Probe {
    token_ids: Vec<u32>,
    /// Nats; the trainer's. The first is 0.
    logprobs: Vec<f32>,
}

#[derive(Deserialize)]
struct Manifest {
    probe: Option<Probe>,
}

impl Probe {
    /// `None` where the publisher gave none.
    pub fn read(manifest: &Path) -> Result<Option<Probe>, ProbeError> {
        let failed = |problem: String| ProbeError::Read {
            path: manifest.to_owned(),
            problem,
        };
        let bytes = std::fs::read(manifest).map_err(|error| failed(error.to_string()))?;
        let read: Manifest =
            serde_json::from_slice(&bytes).map_err(|error| failed(error.to_string()))?;
        let Some(probe) = read.probe else {
            return Ok(None);
        };
        let (ids, logprobs) = (probe.token_ids.len(), probe.logprobs.len());
        if ids != logprobs || ids < 2 {
            let problem = format!("it has {logprobs} log-probabilities for {ids} tokens");
            return Err(failed(problem));
        }
        Ok(Some(probe))
    }

    /// Mean and largest difference, nats.
    fn distance(&self, found: &[f32]) -> (f64, f64) {
        let differences = self.logprobs[1..]
            .iter()
            .zip(&found[1..])
            .map(|(own, other)| f64::from((own - other).abs()));
        let largest = differences.clone().fold(0.0, f64::max);
        let mean = differences.sum::<f64>() / (self.logprobs.len() - 1) as f64;
        (mean, largest)
    }
}

/// The engine, which has just loaded `version`, computes what the trainer does.
pub(super) async fn check(
    client: &EngineClient,
    config: &EnginesConfig,
    version: PolicyVersion,
    probe: &Probe,
) -> Result<(), ProbeError> {
    let sampling =
        json!({"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "detokenize": false});
    let body = json!({
        "request_id": "primerl-probe", "model": config.model, "token_ids": probe.token_ids,
        "sampling_params": sampling, "cache_salt": version.to_string(), "stream": false,
    });
    let answer = client
        .call(
            "generate",
            "/inference/v1/generate",
            body.to_string().into(),
            // It stands behind the requests that the engine has.
            config.update_timeout.max(config.request_timeout),
        )
        .await?;
    let found =
        scored_logprobs(&answer, &probe.token_ids).map_err(|problem| EngineError::Malformed {
            call: "generate",
            problem,
        })?;
    let (mean, largest) = probe.distance(&found);
    // Not `>`, which nothing that is no number is.
    if mean <= config.probe_tolerance {
        return Ok(());
    }
    Err(ProbeError::Differs {
        version,
        tokens: probe.token_ids.len(),
        mean,
        largest,
        tolerance: config.probe_tolerance,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(manifest: &serde_json::Value) -> Result<Option<Probe>, ProbeError> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("manifest.json");
        std::fs::write(&path, manifest.to_string()).expect("writes");
        Probe::read(&path)
    }

    #[test]
    fn a_manifest_may_have_none() {
        assert!(read(&json!({"format": 1})).expect("is read").is_none());
        let short = read(&json!({"probe": {"token_ids": [1, 2], "logprobs": [0.0]}}));
        let error = short.expect_err("is refused").to_string();
        assert!(
            error.contains("1 log-probabilities for 2 tokens"),
            "{error}"
        );
    }

    #[test]
    fn the_first_token_does_not_count() {
        let probe = Probe {
            token_ids: vec![4, 5, 6],
            logprobs: vec![0.0, -1.0, -3.0],
        };
        assert_eq!(probe.distance(&[-9.0, -1.5, -2.0]), (0.75, 1.0));
    }
}
