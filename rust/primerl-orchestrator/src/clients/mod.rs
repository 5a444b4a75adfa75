//! Servers that are no engines of the run: whoever is measured against the policy, and teachers.
//!
//! ```text
//! [..client] table ─> Server (URL, model, key) ─ Endpoint: messages in, text out
//!                                              └ Scorer: token ids in, their log-probabilities out
//! ```
//! The key is read from the environment variable that the table names, once, and goes nowhere but into the header of a
//! request: what a server says is searched for it before it is shown.

mod answer;
mod endpoint;
mod look;
mod outage;
mod scorer;
mod server;

pub use answer::ChatAnswer;
pub(crate) use endpoint::with_messages;
pub use endpoint::{ChatRequest, Endpoint};
pub use look::{LookError, Said, look};
pub use outage::{News, Outage, Pending};
pub use scorer::Scorer;
pub(crate) use scorer::{distance, scored_logprobs};
pub use server::{EndpointError, parse_base_url};
pub(crate) use server::{IDLE_CONNECTION, beginning};

use crate::config::{Config, ConfigError};
use std::sync::Arc;

/// By environment: who answers in place of the engines.
pub fn of_environments(config: &Config) -> Result<Vec<Option<Arc<Endpoint>>>, ConfigError> {
    let teacher = config.answering_teacher();
    let teacher = teacher.map(|client| Endpoint::open("teacher.client", client));
    let teacher = teacher.transpose()?.map(Arc::new);
    let training = config.train.env.iter().map(|_| Ok(teacher.clone()));
    let evaluation = config.eval.env.iter().map(|environment| {
        let Some(client) = &environment.client else {
            return Ok(None);
        };
        let name = format!("eval.env.{}.client", environment.name());
        Ok(Some(Arc::new(Endpoint::open(&name, client)?)))
    });
    training.chain(evaluation).collect()
}
