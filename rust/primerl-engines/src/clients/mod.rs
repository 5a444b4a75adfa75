//! Servers that are not engines of the run: models measured against the policy, and teachers.
//!
//! ```text
//! [..client] table ─> Server (URL, model, key) ─ Endpoint: messages in, text out
//!                                              └ Scorer: token ids in, their log-probabilities out
//! ```
//! The key is read from the environment variable that the table names, once, and is used only in the header of a
//! request: it is removed from a server's messages before they are shown.

mod answer;
mod config;
mod endpoint;
mod look;
mod models;
mod outage;
mod scorer;
mod server;

pub use answer::ChatAnswer;
pub use config::{ClientConfig, ClientType};
pub use endpoint::{ChatRequest, Endpoint, with_messages};
pub use look::{LookError, Said, look};
pub use models::{ModelCard, Models};
pub use outage::{News, Outage, Pending, Unanswered};
pub use scorer::{Scorer, distance, scored_logprobs};
pub use server::{EndpointError, IDLE_CONNECTION, beginning, parse_base_url};
