//! Servers of OpenAI's chat completions that are no engines of the run: messages in, text out. Whoever is measured against
//! the policy is one.
//!
//! ```text
//! [..client] table ─> Endpoint (URL, model, key) ─ ask ─> body, retries, deadline ─> ChatAnswer
//! ```
//! The key is read from the environment variable that the table names, once, and goes nowhere but into the header of a
//! request: what a server says is searched for it before it is shown.

mod answer;
mod endpoint;

pub use answer::ChatAnswer;
pub(crate) use endpoint::with_messages;
pub use endpoint::{ChatRequest, Endpoint, EndpointError, parse_base_url};

use crate::config::{Config, ConfigError};
use std::sync::Arc;

/// Those of the evaluation environments, by environment.
pub fn of_environments(config: &Config) -> Result<Vec<Option<Arc<Endpoint>>>, ConfigError> {
    let training = config.train.env.iter().map(|_| Ok(None));
    let evaluation = config.eval.env.iter().map(|environment| {
        let Some(client) = &environment.client else {
            return Ok(None);
        };
        let name = format!("eval.env.{}.client", environment.name());
        Ok(Some(Arc::new(Endpoint::open(&name, client)?)))
    });
    training.chain(evaluation).collect()
}
