//! The tokio runtime an orchestrator runs on.

use std::num::NonZero;

/// Threads for half of the cores: the processes of engines, workers and trainer need the others, and a thread that is
/// awake serves a request at less cost than one that has to be woken. `TOKIO_WORKER_THREADS` overrides this.
pub(crate) fn build() -> std::io::Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.enable_all().thread_name("primerl-orchestrator");
    if std::env::var_os("TOKIO_WORKER_THREADS").is_none() {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        builder.worker_threads((cores / 2).max(1));
    }
    builder.build()
}
