//! How the requests of one environment's rollouts are sampled.

use primerl_core::Truncation;
use serde_json::{Map, Value};
use std::sync::Arc;

/// The same for all rollouts of an environment.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    pub temperature: f64,
    pub max_tokens: u32,
    /// Over all turns of a rollout.
    pub rollout_max_tokens: Option<u32>,
    /// What is left out where a request does not say. `None`: requests must not leave anything out, unless nobody trains
    /// on what they sample.
    pub replayed: Option<Truncation>,
    /// Variables of the chat template where a request does not name them; `None`: there are none.
    pub template_kwargs: Option<Arc<Map<String, Value>>>,
}

impl Sampling {
    /// Adds the run's variables of the chat template to those of a request.
    pub fn add_template_kwargs(&self, asked: &mut Map<String, Value>) {
        for (name, value) in self.template_kwargs.iter().flat_map(|own| own.iter()) {
            asked.entry(name).or_insert_with(|| value.clone());
        }
    }

    /// As in a chat request: what a lease tells the environment to ask for. What is left out is not said: not every
    /// client has words for it, and it is left out unless a request says otherwise.
    pub fn to_wire(&self) -> Map<String, Value> {
        let mut wire = Map::new();
        wire.insert("temperature".into(), self.temperature.into());
        wire.insert("max_tokens".into(), self.max_tokens.into());
        wire
    }
}
