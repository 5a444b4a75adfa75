//! One start of a run, with a worker.

use super::Orchestrator;
use super::engine::Engine;
use super::worker::Worker;
use primerl_orchestrator::Prepared;
use primerl_orchestrator::envs::wire::WorkerRole;
use tokio::task::JoinHandle;

pub struct Session {
    pub orchestrator: Orchestrator,
    pub worker: JoinHandle<()>,
}

impl Session {
    pub async fn start(prepared: Prepared, engine: &Engine) -> Session {
        let orchestrator = Orchestrator::start_prepared(prepared).await;
        orchestrator.join(&engine.url).await;
        let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "w").await;
        let worker = tokio::spawn(async move {
            worker.work(2).await;
        });
        Session {
            orchestrator,
            worker,
        }
    }

    pub async fn stop(self) {
        self.worker.abort();
        self.orchestrator.shutdown.cancel();
        self.orchestrator.end().await.unwrap();
    }
}
