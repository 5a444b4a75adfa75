//! The address on which the orchestrator listens, and the peers that may use it.

use crate::config::Config;
use crate::failure::RunError;
use primerl_gateway as access;
use primerl_record::journal;
use primerl_service::config_error::{ConfigError, field};
use primerl_service::secret::Secret;
use std::net::SocketAddr;
use std::path::Path;
use tokio::net::TcpListener;

/// The URL of the orchestrator for the run's other processes.
pub(crate) const ADDRESS_FILE: &str = "run/orchestrator.json";

/// Binds the address in the config. If it leaves the port to the operating system, a resumed run takes its earlier port
/// if that is free: workers, engines and trainer still know it.
///
/// # Errors
/// The address cannot be bound.
pub(crate) async fn listen(config: &Config) -> Result<TcpListener, RunError> {
    let host = config.host.as_str();
    if config.port == 0
        && let Some(port) = last_port(&config.output_dir)
        && let Ok(listener) = TcpListener::bind((host, port)).await
    {
        return Ok(listener);
    }
    let bound = TcpListener::bind((host, config.port)).await;
    bound.map_err(|source| RunError::Bind {
        address: format!("{host}:{}", config.port),
        source,
    })
}

/// Anyone who reaches the orchestrator can end the run and read its training data.
pub(crate) fn check_exposure(
    address: SocketAddr,
    run_key: Option<&Secret>,
) -> Result<(), ConfigError> {
    if run_key.is_some() || address.ip().to_canonical().is_loopback() {
        return Ok(());
    }
    Err(field(
        "host",
        format!(
            "{} can be reached from other machines, and no key is set",
            address.ip()
        ),
        format!(
            "set {} in the environment of the orchestrator and of everything that talks to it, or listen on 127.0.0.1",
            access::RUN_KEY_VARIABLE
        ),
    ))
}

fn last_port(output_dir: &Path) -> Option<u16> {
    if !journal::exists(&output_dir.join("journal")) {
        return None;
    }
    let file = std::fs::read(output_dir.join(ADDRESS_FILE)).ok()?;
    let address: serde_json::Value = serde_json::from_slice(&file).ok()?;
    address["url"].as_str()?.rsplit(':').next()?.parse().ok()
}
