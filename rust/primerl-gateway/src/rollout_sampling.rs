//! Sampling parameters for the requests of one environment's rollouts.

use primerl_core::Truncation;
use primerl_core::turn::MessageRole;
use serde_json::{Map, Value};
use std::sync::Arc;

/// The same parameters apply to all rollouts of an environment.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    pub temperature: f64,
    pub max_tokens: u32,
    /// Limit over all turns of a rollout.
    pub rollout_max_tokens: Option<u32>,
    /// Truncation of the distribution if a request does not specify it. `None`: requests must not truncate, unless
    /// their samples are not trained on.
    pub replayed: Option<Truncation>,
    /// Variables of the chat template that a request does not set itself; `None`: there are none.
    pub template_kwargs: Option<Arc<Map<String, Value>>>,
    /// Whose messages are learnt, where they follow an answer; empty: the policy learns from its own tokens alone.
    pub observes: Vec<MessageRole>,
}

impl Sampling {
    /// Adds the run's variables of the chat template to those of a request.
    pub fn add_template_kwargs(&self, asked: &mut Map<String, Value>) {
        for (name, value) in self.template_kwargs.iter().flat_map(|own| own.iter()) {
            asked.entry(name).or_insert_with(|| value.clone());
        }
    }

    /// The fields of a chat request that a lease tells the environment to send. Truncation is not included: not every
    /// client can send it, and it applies anyway unless a request overrides it.
    pub fn to_wire(&self) -> Map<String, Value> {
        let mut wire = Map::new();
        wire.insert("temperature".into(), self.temperature.into());
        wire.insert("max_tokens".into(), self.max_tokens.into());
        wire
    }
}
