//! Adds an engine to the pool, and starts its task.

use super::client::{EngineClient, parse_url};
use super::engine_records::EngineRecord;
use super::pool::Engines;
use super::state::Engine;
use super::supervisor;
use primerl_core::EngineId;
use std::sync::Arc;
use tokio::sync::mpsc;

impl Engines {
    /// Adds an engine, or notes that a known one was restarted: at the same address, or under the same name at another.
    /// The error says what is wrong with the URL.
    pub fn join(self: &Arc<Self>, url: &str, name: Option<&str>) -> Result<EngineId, String> {
        // Made before anything is locked: for https, the certificate authorities are read from the disk.
        let client = client_of(url)?;
        let mut engines = self.engines.write();
        let at_url = |engine: &&Arc<Engine>| {
            engine.client.url() == client.url() && !engine.gone.is_cancelled()
        };
        let known = engines.iter().find(at_url).cloned();
        let has_name =
            |engine: &Arc<Engine>| name.is_some() && engine.state.lock().name.as_deref() == name;
        let before = engines.iter().position(has_name);
        if let Some(known) = known {
            let mut state = known.state.lock();
            if before.is_none() && state.name.is_none() {
                state.name = name.map(str::to_owned);
            }
            if name.is_none() || state.name.as_deref() == name {
                known.rejoined.notify_one();
                return Ok(known.id);
            }
            // Another engine was here, and has lost its port to this one.
            known.gone.cancel();
        }
        if let Some(before) = before {
            let place = &mut engines[before];
            place.gone.cancel();
            *place = self.add(place.id, client, name, Some(Arc::clone(place)));
            return Ok(place.id);
        }
        let next = engines.iter().map(|engine| engine.id.0 + 1).max();
        let id = EngineId(next.unwrap_or(0));
        engines.push(self.add(id, client, name, None));
        Ok(id)
    }

    /// Whether an engine that would join at this address could be reached. The outer error says what is wrong with the
    /// URL, the inner one why it is not reached.
    pub async fn reach(url: &str) -> Result<Result<(), String>, String> {
        let client = client_of(url)?;
        Ok(client.health().await.map_err(|error| described(&error)))
    }

    /// Looks for an engine that had joined before a restart.
    pub fn restore(self: &Arc<Self>, record: &EngineRecord) -> Result<(), String> {
        let name = record.name.as_deref();
        let engine = self.add(record.engine, client_of(&record.url)?, name, None);
        engine.state.lock().was_known = true;
        self.engines.write().push(engine);
        Ok(())
    }

    /// `before`: the engine that had its number; its last event comes before the first event of the new one.
    fn add(
        self: &Arc<Self>,
        id: EngineId,
        client: EngineClient,
        name: Option<&str>,
        before: Option<Arc<Engine>>,
    ) -> Arc<Engine> {
        let (updates, receiver) = mpsc::unbounded_channel();
        let engine = Arc::new(Engine::new(id, name, client, updates));
        let (pool, supervised) = (Arc::clone(self), Arc::clone(&engine));
        self.tasks.spawn(async move {
            if let Some(before) = before {
                supervised.state.lock().was_known = before.state.lock().was_proved();
                before.ended.cancelled().await;
            }
            supervisor::supervise(pool, supervised, receiver).await;
        });
        engine
    }
}

/// The client for an engine at this URL, or what is wrong with the URL.
/// With its causes: the last one is that of the network.
fn described(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |all, cause| {
        let cause = cause.to_string();
        match all.contains(&cause) {
            true => all,
            false => format!("{all}: {cause}"),
        }
    })
}

fn client_of(url: &str) -> Result<EngineClient, String> {
    EngineClient::new(parse_url(url)?).map_err(|error| error.to_string())
}
