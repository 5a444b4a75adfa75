//! Whether a server answers, before anything depends on it.

use super::ClientConfig;
use super::server::{CONNECT_TIMEOUT, Server};
use primerl_service::config_error::ConfigError;
use primerl_service::tls;
use std::time::Duration;

/// Largest answer in bytes; lists of models are shorter.
const LARGEST: usize = 1 << 20;

/// The server's error, whatever it is.
#[derive(Debug)]
pub struct Said {
    pub status: u16,
    pub body: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LookError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    #[error("{0}")]
    Unanswered(String),
    #[error("cannot start a runtime: {0}")]
    Runtime(#[from] std::io::Error),
}

/// Asks the first server of the table for its models, over the same connection that a run uses; this costs nothing.
/// Blocks.
pub fn look(config: &ClientConfig, within: Duration) -> Result<Said, LookError> {
    let server = Server::open("", config)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let said = runtime.block_on(ask(&server, within));
    // Does not wait for a resolver that hangs.
    runtime.shutdown_background();
    said
}

async fn ask(server: &Server, within: Duration) -> Result<Said, LookError> {
    let url = format!("{}/models", server.base_url());
    match server.look(&url, within, LARGEST).await {
        Ok((status, body)) => Ok(Said { status, body }),
        Err(error) if error.is_timeout() => Err(LookError::Timeout(match error.is_connect() {
            true => within.min(CONNECT_TIMEOUT),
            false => within,
        })),
        Err(error) => {
            let hint = match tls::mend(&error, &url) {
                Some(_) => "",
                // Some servers that speak TLS send no answer at all to a client that does not.
                None if closes_at_once(&error) && !tls::is_https(&url) => {
                    "; does the server speak TLS, and the URL need https:// instead of http://?"
                }
                None => "; give the address of a server that runs",
            };
            Err(LookError::Unanswered(server.told(error) + hint))
        }
    }
}

fn closes_at_once(error: &reqwest::Error) -> bool {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = cause {
        let incomplete = error.downcast_ref::<hyper::Error>();
        let reset = error.downcast_ref::<std::io::Error>();
        if incomplete.is_some_and(hyper::Error::is_incomplete_message)
            || reset.is_some_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
        {
            return true;
        }
        cause = error.source();
    }
    false
}
