//! Engines that hold several adapters at the same time: each version under its own name.
//!
//! ```text
//! new version: room ─ /v1/load_lora_adapter (checks its files) ─ digest of what is held ─ probe ─> requests name it
//!                                    those before it go on with theirs                                │
//! last request of an old version ends ─────────────────> /v1/unload_lora_adapter, memory freed <──────┘
//! ```
//! Nothing is paused, and nothing of an unproved version is ever asked for: the probe goes first.

use super::client::EngineClient;
use super::error::{EngineError, STANDS_STILL};
use super::pool::Engines;
use super::probe::{self, Probe};
use super::served_version::Named;
use super::state::{Engine, Served, Update};
use super::update::{UpdateError, check_logprob_kind, folder_of, note_proved, within};
use super::weights::check_digests;
use crate::clients::ModelCard;

use std::sync::Arc;
use std::time::Instant;

/// The engine serves the update's version, or is to be given up. `most`: adapters that it can compute with at a time.
pub(super) async fn bring(
    pool: &Engines,
    engine: &Engine,
    update: &Update,
    probe: Option<Probe>,
    most: u32,
) -> Result<(), UpdateError> {
    let started = Instant::now();
    let named = within(pool, load(pool, engine, update, most)).await?;
    check_logprob_kind(pool, engine, &named).await?;
    if let Some(probe) = probe {
        probe::check(&engine.client, &pool.config, &named, &probe).await?;
    }
    engine.serve(named, true);
    pool.changed.send_modify(|count| *count += 1);
    tracing::info!(
        engine = %engine.client.url(), version = %update.version,
        milliseconds = started.elapsed().as_millis() as u64, "engine proved its adapter"
    );
    note_proved(pool, engine, update.version);
    unload_unused(pool, engine).await;
    Ok(())
}

async fn load(
    pool: &Engines,
    engine: &Engine,
    update: &Update,
    most: u32,
) -> Result<Named, EngineError> {
    let (client, model) = (&engine.client, &pool.config.model);
    let base = client.weight_label(STANDS_STILL).await?;
    let named = Named::adapter(model, update.version, &update.digest, base);
    make_room(engine, &named, most);
    let used = engine.adapters_in_use();
    unload_leftovers(client, model, &used).await?;
    client.keep_adapters(&used).await?;
    if !used.contains(&named.model) {
        let folder = folder_of(&update.manifest);
        client.load_adapter(&named.model, &folder).await?;
    }
    client
        .prove_adapter(&named.model, &update.digest)
        .await
        .map(|()| named)
}

/// Adapters that are listed but not in use were loaded by an earlier orchestrator, or by this one before it lost the
/// engine. They are loaded again, because their proof may not have finished.
async fn unload_leftovers(
    client: &EngineClient,
    model: &str,
    used: &[String],
) -> Result<(), EngineError> {
    for name in client.adapters(&Named::prefix(model)).await? {
        if !used.contains(&name) {
            client.unload_adapter(&name).await?;
        }
    }
    Ok(())
}

/// Makes room for another version: requests of the oldest versions end and start again. So do requests on weights that
/// others have replaced.
fn make_room(engine: &Engine, new: &Named, most: u32) {
    let mut state = engine.state.lock();
    state.told = Some(new.version);
    state.doing = format!("loading the adapter of version {}", new.version);
    let is_replaced =
        |served: &Served| served.named.version >= new.version && served.named.model != new.model;
    let room = (most as usize).saturating_sub(1);
    let too_many = state.adapters.len().saturating_sub(room);
    for (index, served) in state.adapters.iter().enumerate() {
        if is_replaced(served) || index < too_many {
            served.lost.cancel();
        }
    }
    state.adapters.retain(|served| !served.lost.is_cancelled());
    let has_gone = |served: &Served| served.lost.is_cancelled();
    if state.served.as_deref().is_some_and(has_gone) {
        state.served = None;
    }
}

fn take_unused(engine: &Engine) -> Vec<Arc<Served>> {
    let mut state = engine.state.lock();
    let serving = state.served.clone();
    let is_used = |served: &Arc<Served>| {
        served.running() > 0 || serving.as_ref().is_some_and(|own| Arc::ptr_eq(own, served))
    };
    let (used, unused): (Vec<_>, Vec<_>) = state.adapters.drain(..).partition(is_used);
    state.adapters = used;
    unused
}

/// Unloads the adapters that no request names any more, and never will.
pub(super) async fn unload_unused(pool: &Engines, engine: &Engine) {
    let unused = take_unused(engine);
    if unused.is_empty() {
        return;
    }
    let unloading = async {
        let kept = engine.adapters_in_use();
        for served in unused
            .iter()
            .filter(|served| !kept.contains(&served.named.model))
        {
            engine.client.unload_adapter(&served.named.model).await?;
        }
        engine.client.keep_adapters(&kept).await
    };
    if let Err(error) = within(pool, unloading).await {
        // They take up room until the next version comes, which looks for unused adapters.
        tracing::warn!(engine = %engine.client.url(), %error, "unused adapters could not be unloaded");
    }
}

impl EngineClient {
    /// How many adapters the engine computes with at a time; `None` for one that is sent whole weights, or merges
    /// adapters into its own.
    pub(super) async fn most_adapters(&self) -> Result<Option<u32>, EngineError> {
        let workers = self.weight_digests().await?;
        Ok(workers.iter().filter_map(|worker| worker.adapters).min())
    }

    /// Names of the loaded adapters that begin with this.
    async fn adapters(&self, prefix: &str) -> Result<Vec<String>, EngineError> {
        let ours = |card: &ModelCard| card.parent.is_some() && card.id.starts_with(prefix);
        let cards = self.models().await?.into_iter().filter(ours);
        Ok(cards.map(|card| card.id).collect())
    }

    /// The engine checks the files in `folder` before it loads them.
    async fn load_adapter(&self, name: &str, folder: &str) -> Result<(), EngineError> {
        let adapter = serde_json::json!({"lora_name": name, "lora_path": folder});
        let (call, path) = ("load_lora_adapter", "/v1/load_lora_adapter");
        self.administer(call, path, Some(&adapter)).await.map(drop)
    }

    /// Requests that have it keep it; it takes up memory until [`EngineClient::keep_adapters`].
    async fn unload_adapter(&self, name: &str) -> Result<(), EngineError> {
        let adapter = serde_json::json!({"lora_name": name});
        let (call, path) = ("unload_lora_adapter", "/v1/unload_lora_adapter");
        match self.administer(call, path, Some(&adapter)).await {
            Err(EngineError::Status { status: 404, .. }) => Ok(()), // it is not there
            other => other.map(drop),
        }
    }

    /// Frees the memory of all other adapters.
    async fn keep_adapters(&self, names: &[String]) -> Result<(), EngineError> {
        let call = serde_json::json!({"method": "primerl_keep_adapters", "args": [names]});
        let _: Vec<serde_json::Value> = self.workers(&call).await?;
        Ok(())
    }

    /// Check that every worker holds this adapter with tensors of this digest.
    async fn prove_adapter(&self, name: &str, expected: &str) -> Result<(), EngineError> {
        let call = serde_json::json!({"method": "primerl_adapter_digest", "args": [name]});
        check_digests(&self.workers(&call).await?, expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use primerl_core::{EngineId, PolicyVersion};
    use tokio::sync::mpsc;

    fn named(version: u64, digest: &str) -> Named {
        Named::adapter("m", PolicyVersion(version), digest, "default".into())
    }

    /// An engine that serves the last of these versions; a request has a place on each.
    fn engine(versions: &[u64]) -> (Engine, Vec<Arc<Served>>) {
        let client = EngineClient::new("http://127.0.0.1:1".into()).expect("is a URL");
        let engine = Engine::new(EngineId(0), None, client, mpsc::unbounded_channel().0);
        for version in versions {
            engine.serve(named(*version, "a"), true);
        }
        let adapters = engine.state.lock().adapters.clone();
        adapters.iter().for_each(|served| served.take_place());
        (engine, adapters)
    }

    fn lost(adapters: &[Arc<Served>]) -> Vec<bool> {
        let lost = adapters.iter().map(|served| served.lost.is_cancelled());
        lost.collect()
    }

    #[test]
    fn requests_of_older_versions_continue_while_there_is_room() {
        let (engine, adapters) = engine(&[1, 2, 4]);
        make_room(&engine, &named(5, "a"), 4);
        assert_eq!(lost(&adapters), [false; 3]);
        assert_eq!(engine.adapters_in_use(), ["m@1-a", "m@2-a", "m@4-a"]);
        let state = engine.state.lock();
        assert!(state.usable().is_none(), "its health has not been checked");
        assert_eq!(state.proved(), Some(PolicyVersion(4)));
    }

    #[test]
    fn the_oldest_give_way_where_there_is_none() {
        let (engine, adapters) = engine(&[1, 2, 4]);
        make_room(&engine, &named(5, "a"), 2);
        assert_eq!(lost(&adapters), [true, true, false]);
        assert_eq!(engine.adapters_in_use(), ["m@4-a"]);
        assert!(!engine.state.lock().lost.is_cancelled(), "it is well");
    }

    #[test]
    fn a_version_that_has_other_weights_now_is_answered_by_no_more() {
        let (engine, adapters) = engine(&[3, 4]);
        make_room(&engine, &named(4, "b"), 8);
        assert_eq!(lost(&adapters), [false, true]);
        let state = engine.state.lock();
        assert!(state.served.is_none() && state.proved().is_none());
    }

    #[test]
    fn the_same_weights_again_disturb_no_request() {
        let (engine, adapters) = engine(&[3, 4]);
        make_room(&engine, &named(4, "a"), 8);
        assert_eq!(lost(&adapters), [false; 2]);
        assert_eq!(engine.state.lock().proved(), Some(PolicyVersion(4)));
    }

    #[test]
    fn an_engine_that_is_lost_loses_the_requests_of_all_its_adapters() {
        let (engine, adapters) = engine(&[3, 4]);
        engine.state.lock().lost.cancel();
        assert_eq!(lost(&adapters), [true; 2]);
    }
}
