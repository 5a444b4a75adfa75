//! Compares what an engine computes with new weights to what the trainer computed with them: a digest proves what an
//! engine was given, not what it uses (vLLM's CPU build keeps packed copies of its weights, for example).
//!
//! ```text
//! manifest.json: "probe": {"token_ids": [N], "logprobs": [N]}     of each token after those before it, nats; the first 0
//! engine:        prompt_logprobs of the same tokens               right after the update
//! accepted:      mean |difference| <= `probe_tolerance`
//! ```
//! Answers with tokens of the new weights are held back until then (`Engines::unless_probe_fails`, `Follow`). In half
//! precision that finds weights that are broken or of another model; the weights of the previous version differ by no
//! more than rounding.

use super::client::EngineClient;
use super::config::EnginesConfig;
use super::error::EngineError;
use super::score::scored;
use super::served_version::Named;
use crate::clients::distance;
use primerl_core::PolicyVersion;
use serde::Deserialize;
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
    /// The trainer's log-probabilities, nats. The first is 0.
    logprobs: Vec<f32>,
}

/// The file of an adapter, in peft's layout.
const ADAPTER_FILE: &str = "adapter_model.safetensors";

#[derive(Deserialize)]
struct Manifest {
    probe: Option<Probe>,
    #[serde(default)]
    files: Vec<File>,
}

#[derive(Deserialize)]
struct File {
    name: String,
}

/// What an engine's update needs, from a manifest that was checked when it was published.
#[derive(Debug)]
pub(super) struct Published {
    /// `None` if the publisher gave none.
    pub probe: Option<Probe>,
    /// Loaded in place of whole weights.
    pub is_adapter: bool,
}

impl Published {
    pub(crate) fn read(manifest: &Path) -> Result<Published, ProbeError> {
        let failed = |problem: String| ProbeError::Read {
            path: manifest.to_owned(),
            problem,
        };
        let bytes = std::fs::read(manifest).map_err(|error| failed(error.to_string()))?;
        let read: Manifest =
            serde_json::from_slice(&bytes).map_err(|error| failed(error.to_string()))?;
        let is_adapter = read.files.iter().any(|file| file.name == ADAPTER_FILE);
        let Some(probe) = read.probe else {
            let probe = None;
            return Ok(Published { probe, is_adapter });
        };
        let (ids, logprobs) = (probe.token_ids.len(), probe.logprobs.len());
        if ids != logprobs || ids < 2 {
            let problem = format!("it has {logprobs} log-probabilities for {ids} tokens");
            return Err(failed(problem));
        }
        let probe = Some(probe);
        Ok(Published { probe, is_adapter })
    }
}

/// Checks that what the engine has just loaded, under this name, computes what the trainer does.
pub(super) async fn check(
    client: &EngineClient,
    config: &EnginesConfig,
    named: &Named,
    probe: &Probe,
) -> Result<(), ProbeError> {
    // The probe waits behind the requests that the engine has.
    let timeout = config.update_timeout.max(config.request_timeout);
    let found = scored(client, named, "primerl-probe", &probe.token_ids, timeout).await?;
    let (mean, largest) = distance(&probe.logprobs, &found);
    // `!(x <= max)` instead of `x > max`, so that NaN fails.
    if mean <= config.probe_tolerance {
        return Ok(());
    }
    Err(ProbeError::Differs {
        version: named.version,
        tokens: probe.token_ids.len(),
        mean,
        largest,
        tolerance: config.probe_tolerance,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(manifest: &serde_json::Value) -> Result<Published, ProbeError> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("manifest.json");
        std::fs::write(&path, manifest.to_string()).expect("writes");
        Published::read(&path)
    }

    #[test]
    fn a_manifest_may_have_none() {
        let none = read(&json!({"format": 1})).expect("is read");
        assert!(none.probe.is_none() && !none.is_adapter);
        let adapter = read(&json!({"files": [{"name": "adapter_model.safetensors", "bytes": 3}]}));
        assert!(adapter.expect("is read").is_adapter);
        let short = read(&json!({"probe": {"token_ids": [1, 2], "logprobs": [0.0]}}));
        let error = short.expect_err("is refused").to_string();
        assert!(
            error.contains("1 log-probabilities for 2 tokens"),
            "{error}"
        );
    }
}
