//! What the environment reports of a rollout.

use crate::advantage::mean;
use crate::failure::{Refusal, RolloutError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What the environment reports of one rollout.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The environment ran to its end. `ok` does not mean trainable: there may be no sampled token.
    pub ok: bool,
    pub traces: Vec<Trace>,
    /// The first error, if any.
    pub error: Option<RolloutError>,
    /// What the gateway last refused the rollout, if it answered nothing since. Reported by the gateway, not the worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<Refusal>,
}

impl Outcome {
    /// Which trace each turn is of, `None` where that is not trained; `sessions` are those of the turns, in order. A client
    /// that sends no session name has one conversation, and its one trace is named otherwise: those two belong together.
    pub fn trained_traces<'a>(
        &self,
        sessions: impl Iterator<Item = &'a str> + Clone,
    ) -> Vec<Option<usize>> {
        let mut others = sessions.clone();
        let first = others.next();
        if let [trace] = &self.traces[..]
            && others.all(|session| Some(session) == first)
        {
            return sessions.map(|_| trace.is_trained().then_some(0)).collect();
        }
        let named = self.traces.iter().enumerate();
        let named: BTreeMap<&str, usize> = named
            .map(|(index, trace)| (trace.session.as_str(), index))
            .collect();
        let of = |session: &str| {
            let trace = named.get(session).copied();
            trace.filter(|trace| self.traces[*trace].is_trained())
        };
        sessions.map(of).collect()
    }

    /// Means over the trainable traces, or over all if none is; 0 without traces.
    pub fn score(&self) -> Score {
        let any = self.traces.iter().any(|trace| trace.trainable);
        let traces = self.traces.iter().filter(|trace| trace.trainable || !any);
        let mut metrics: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for (name, value) in traces.clone().flat_map(|trace| &trace.metrics) {
            metrics.entry(name.clone()).or_default().push(*value);
        }
        let means = metrics.into_iter();
        Score {
            reward: mean(traces.map(|trace| trace.reward)),
            metrics: means
                .map(|(name, values)| (name, mean(values.into_iter())))
                .collect(),
        }
    }
}

/// What one rollout adds to an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Score {
    pub reward: f64,
    pub metrics: BTreeMap<String, f64>,
}

/// One seat of a rollout: one conversation with its own reward.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// Equals the `session` of its turns (`X-Session-ID`).
    pub session: String,
    /// Which part of the episode it played; rewards are compared with those of the same one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub seat: String,
    pub trainable: bool,
    pub ok: bool,
    pub reward: f64,
    pub metrics: BTreeMap<String, f64>,
    pub stop_condition: Option<String>,
    pub truncated: bool,
    /// What an expert answered to the example, where the policy learns from itself having seen it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub demonstration: Option<Arc<str>>,
}

impl Trace {
    pub fn is_trained(&self) -> bool {
        self.trainable && self.ok
    }
}
