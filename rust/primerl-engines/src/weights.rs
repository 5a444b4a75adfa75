//! An engine's weights over HTTP: read ahead, loaded while it is paused, proved.

use super::client::{EngineClient, parse};
use super::error::{EngineError, STANDS_STILL};
use super::served_version::Named;
use crate::clients::ModelCard;
use primerl_core::PolicyVersion;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::time::Duration;

/// While an engine reads new weights.
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);

#[derive(Deserialize)]
struct WeightInfo {
    weight_version: String,
}

#[derive(Deserialize)]
struct RpcAnswer<T> {
    results: Vec<T>,
}

/// Whether a worker has read the files that it will load.
#[derive(Deserialize)]
struct Ready {
    ready: bool,
}

#[derive(Deserialize)]
pub(super) struct DigestResult {
    digest: String,
    /// For an engine that holds several adapters: how many it computes with at a time.
    pub adapters: Option<u32>,
}

impl EngineClient {
    /// Freeze running requests and keep their KV cache.
    pub async fn pause(&self) -> Result<(), EngineError> {
        self.administer("pause", "/pause?mode=keep&clear_cache=false", None)
            .await
            .map(drop)
    }

    pub async fn resume(&self) -> Result<(), EngineError> {
        self.administer("resume", "/resume", None).await.map(drop)
    }

    /// Let the engine read and check the weights in `folder` while it continues to answer, so that it pauses only to
    /// load them. Where it cannot, or finds them wrong, the load says so.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn prepare(&self, folder: &str) -> Result<(), EngineError> {
        let begin = serde_json::json!({"method": "primerl_prepare", "args": [folder]});
        let look = serde_json::json!({"method": "primerl_is_prepared", "args": []});
        let mut workers = self.workers::<Ready>(&begin).await;
        loop {
            match workers {
                Err(error @ EngineError::StandsStill { .. }) => return Err(error),
                Ok(found) if found.iter().any(|worker| !worker.ready) => {}
                _ => return Ok(()),
            }
            tokio::time::sleep(BETWEEN_LOOKS).await;
            workers = self.workers(&look).await;
        }
    }

    /// Freeze running requests and load the weights in `folder`, labelled `version`. The caller resumes and proves after.
    pub async fn load(&self, folder: &str, version: PolicyVersion) -> Result<(), EngineError> {
        // In one call: vLLM's pause waits for another 20 ms when all has stopped.
        let both = async { tokio::join!(self.pause(), self.start_update()) };
        let (paused, started) = in_time("pause", STANDS_STILL, both).await?;
        paused?;
        if let Err(error) = started {
            // An orchestrator that died in the middle of an update left it open, and no other can begin. The label does
            // not matter: the engine gets no requests before it has proved what is loaded now.
            tracing::info!(engine = self.url(), %error, "closing an update that was left open");
            if self.finish_update("left open").await.is_err() {
                return Err(error);
            }
            self.start_update().await?;
        }
        let update = serde_json::json!({"update_info": {"path": folder}});
        self.administer("update_weights", "/update_weights", Some(&update))
            .await?;
        self.finish_update(&version.to_string()).await
    }

    async fn start_update(&self) -> Result<(), EngineError> {
        let started = self.administer("start_weight_update", "/start_weight_update", None);
        started.await.map(drop)
    }

    async fn finish_update(&self, label: &str) -> Result<(), EngineError> {
        let label = serde_json::json!({"weight_version": label});
        let (call, path) = ("finish_weight_update", "/finish_weight_update");
        self.administer(call, path, Some(&label)).await.map(drop)
    }

    /// The label under which the engine serves its weights now.
    pub(super) async fn weight_label(&self, within: Duration) -> Result<String, EngineError> {
        let info = self
            .get_within("weight_info", "/weight_info", within)
            .await?;
        parse("weight_info", &info).map(|info: WeightInfo| info.weight_version)
    }

    /// Digests of the tensors that each worker of the engine was given.
    pub(super) async fn weight_digests(&self) -> Result<Vec<DigestResult>, EngineError> {
        let call = serde_json::json!({"method": "primerl_weight_digest", "args": []});
        self.workers(&call).await
    }

    /// Checks that every worker of the engine holds tensors of this digest, and that the engine has this label.
    pub async fn prove(&self, named: &Named, expected: &str) -> Result<(), EngineError> {
        check_digests(&self.weight_digests().await?, expected)?;
        self.check_label(named, STANDS_STILL).await
    }

    /// Check that the engine reports the weights that it was asked to load, and has the adapter that it was asked to
    /// load: a process that was started since does not.
    ///
    /// Engines answer between two steps: `within` has room for one.
    pub(super) async fn check_label(
        &self,
        named: &Named,
        within: Duration,
    ) -> Result<(), EngineError> {
        let (served, expected) = (self.weight_label(within).await?, named.label());
        if served != expected {
            return Err(EngineError::Label { served, expected });
        }
        let is_named = |card: &ModelCard| card.id == named.model;
        if named.base.is_some() && !self.models().await?.iter().any(is_named) {
            return Err(EngineError::Forgotten(named.model.clone()));
        }
        Ok(())
    }

    /// What each worker of the engine answers.
    pub(super) async fn workers<T: DeserializeOwned>(
        &self,
        call: &serde_json::Value,
    ) -> Result<Vec<T>, EngineError> {
        let answer = self.administer("collective_rpc", "/collective_rpc", Some(call));
        let answer = in_time("collective_rpc", STANDS_STILL, answer).await??;
        let answer: RpcAnswer<T> = parse("collective_rpc", &answer)?;
        Ok(answer.results)
    }
}

/// The result of a call that should be answered within `limit`.
pub(super) async fn in_time<T>(
    call: &'static str,
    limit: Duration,
    answer: impl Future<Output = T>,
) -> Result<T, EngineError> {
    let answered = tokio::time::timeout(limit, answer).await;
    answered.map_err(|_| EngineError::StandsStill { call, limit })
}

pub(super) fn check_digests(workers: &[DigestResult], expected: &str) -> Result<(), EngineError> {
    let wrong = workers.iter().find(|worker| worker.digest != expected);
    if workers.is_empty() || wrong.is_some() {
        let served = wrong.map_or_else(|| "nothing".into(), |worker| worker.digest.clone());
        return Err(EngineError::Digest {
            served,
            expected: expected.into(),
        });
    }
    Ok(())
}
