//! Bodies of the environment workers' calls (`docs/architecture.md`, "Env workers"), shared by both ends.
//!
//! Every body is a msgpack map with named fields. Fields that a newer peer adds are ignored by an older one,
//! so workers and orchestrators of neighbouring versions understand each other.

use primerl_core::event::Outcome;
use primerl_core::{EnvironmentId, ExampleIndex, GroupId, RolloutId, WorkerId};
use primerl_service::secret::Secret;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

pub const CONTENT_TYPE: &str = "application/msgpack";

pub const REGISTER: &str = "/envs/register";
pub const LEASE: &str = "/envs/lease";
pub const HEARTBEAT: &str = "/envs/heartbeat";
pub const RESULT: &str = "/envs/result";
pub const LEAVE: &str = "/envs/leave";
/// What a worker that joins learns about its environment (JSON).
pub const CONFIG: &str = "/envs/config";

/// `code` of the 410 that tells a worker to register again: the orchestrator does not know its number (any more).
pub const WORKER_UNKNOWN: &str = "worker_unknown";
/// `code` of the 410 for a worker that was given up because its environment blocked it: if it still does, the process
/// cannot register again and has to end.
pub const WORKER_BLOCKED: &str = "worker_blocked";
/// `code` of the 404 for an environment that the run does not have.
pub const ENVIRONMENT_UNKNOWN: &str = "environment_unknown";
/// `code` of the 409 for a worker that lists other examples than the first worker of its environment, or has other
/// versions of its packages.
pub const EXAMPLES_DIFFER: &str = "examples_differ";
/// `code` of the 409 for a worker that wants whole groups although the first one of its environment did not, or the
/// other way round.
pub const WHOLE_GROUPS_DIFFER: &str = "whole_groups_differ";
/// `code` of the 409 for a worker that wants whole groups for which it, or the run, has no room.
pub const GROUP_TOO_LARGE: &str = "group_too_large";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerRole {
    Train,
    Eval,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterRequest {
    /// The environment's name in the run's config.
    pub environment: String,
    pub role: WorkerRole,
    /// Unique to the process, so that a worker that registers again is recognised.
    pub name: String,
    pub pid: u32,
    /// How many examples the worker can be leased; the same for all workers of an environment.
    pub examples: u32,
    /// Rewards come from all rollouts of a group together, so leases must hold whole groups; the same for all workers of
    /// an environment.
    #[serde(default)]
    pub whole_groups: bool,
    /// Most rollouts that the worker runs at once, if it says so.
    #[serde(default)]
    pub max_concurrent: Option<u32>,
    /// Further values that must be the same for all of them; `None`: an older worker reports none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listing: Option<Listing>,
}

/// Which examples a worker lists, and by which code.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing {
    /// Digest of the examples, in order.
    pub digest: String,
    /// Digest of the first example, and of the last one.
    pub first: String,
    pub last: String,
    /// Versions by name: the environment's package, if it is installed as one, and verifiers.
    pub packages: BTreeMap<String, String>,
    /// A digest of each of the first examples, by which the same one is found in other runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<String>,
    /// The environment's name and the number of its examples, in the file of listings alone.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub environment: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub examples: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RegisterAnswer {
    pub worker: WorkerId,
    pub environment: EnvironmentId,
    /// Name of the model to put into requests.
    pub model: String,
    /// Seconds between heartbeats.
    pub heartbeat_s: f64,
    /// Number of rollouts that are leased only together: those of a group if groups are whole, else 1.
    #[serde(default = "one")]
    pub leased_together: u32,
    /// Seconds after which a lease is answered even if it is empty.
    #[serde(default = "longest")]
    pub long_poll_s: f64,
    /// Where examples have what an expert answered, for the traces that are reported; `None`: it is not asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub demonstration: Option<String>,
}

/// The longest poll of an orchestrator that does not report one: it accepts less.
fn longest() -> f64 {
    120.0
}

fn one() -> u32 {
    1
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRequest {
    pub worker: WorkerId,
    /// At most this many rollouts, at least 1; with whole groups, the fewest groups that reach this number, and at
    /// least one.
    pub max: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LeaseAnswer {
    /// Empty when the long poll ended without work.
    pub rollouts: Vec<Lease>,
    /// There will be no more work.
    pub finished: bool,
    /// Why `rollouts` is empty, for people.
    pub reason: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lease {
    pub rollout: RolloutId,
    pub group: GroupId,
    pub example: ExampleIndex,
    /// Base URL of the rollout's OpenAI-compatible endpoint, ending in `/v1`.
    pub base_url: String,
    /// The API key for its SDK; valid for this rollout alone.
    pub api_key: Secret,
    /// Sampling parameters as in a chat request: `temperature`, `max_tokens`, ...
    pub sampling: serde_json::Map<String, serde_json::Value>,
    /// Seconds from now after which the orchestrator gives the rollout up.
    pub deadline_s: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeartbeatRequest {
    pub worker: WorkerId,
    /// Leased and not yet reported.
    pub running: Vec<RolloutId>,
    /// Seconds since its event loop last turned; `None`: an older worker does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub still_s: Option<f64>,
    /// Where its event loop is held up, and by which rollout, as far as that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_at: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_by: Option<RolloutId>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatAnswer {
    /// Stop these, and do not report them.
    pub cancel: Vec<RolloutId>,
    pub finished: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResultRequest {
    pub worker: WorkerId,
    pub rollout: RolloutId,
    pub outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResultAnswer {
    /// False when the rollout was over already (cancelled, given to another worker, reported before).
    pub accepted: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaveRequest {
    pub worker: WorkerId,
    /// How it ended, as reported by the process that started it; `None`: the worker says goodbye itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaveAnswer {
    /// The rollouts that it ran, which are leased again.
    #[serde(default)]
    pub rollouts: Vec<LeftRollout>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftRollout {
    pub rollout: RolloutId,
    pub example: ExampleIndex,
}

/// A body as a msgpack map with named fields.
pub fn encode<T: Serialize>(body: &T) -> Result<Vec<u8>, rmp_serde::encode::Error> {
    rmp_serde::to_vec_named(body)
}

pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, rmp_serde::decode::Error> {
    rmp_serde::from_slice(body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use primerl_core::event::Trace;
    use primerl_core::failure::RolloutError;

    fn round_trip<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(
        value: T,
    ) -> serde_json::Value {
        let bytes = encode(&value).expect("encodes");
        assert_eq!(decode::<T>(&bytes).expect("decodes"), value);
        decode(&bytes).expect("is a self-describing map")
    }

    #[test]
    fn bodies_are_maps_with_the_documented_names() {
        let lease = Lease {
            rollout: RolloutId(7),
            group: GroupId(2),
            example: ExampleIndex(5),
            base_url: "http://127.0.0.1:1/rollouts/7/v1".into(),
            api_key: Secret::new("0a"),
            sampling: serde_json::from_str(r#"{"temperature": 1.0, "max_tokens": 28}"#)
                .expect("valid JSON"),
            deadline_s: 120.0,
        };
        let map = round_trip(LeaseAnswer {
            rollouts: vec![lease],
            finished: false,
            reason: String::new(),
        });
        assert_eq!(map["rollouts"][0]["rollout"], 7);
        assert_eq!(map["rollouts"][0]["api_key"], "0a");
        assert_eq!(map["rollouts"][0]["sampling"]["max_tokens"], 28);
        let map = round_trip(RegisterRequest {
            environment: "reverse-text".into(),
            role: WorkerRole::Eval,
            name: "w".into(),
            pid: 1,
            examples: 128,
            whole_groups: true,
            max_concurrent: Some(16),
            listing: None,
        });
        assert_eq!(
            (&map["role"], &map["whole_groups"]),
            (&"eval".into(), &true.into())
        );
    }

    #[test]
    fn a_worker_from_before_whole_groups_is_understood() {
        let body = serde_json::json!(
            {"environment": "e", "role": "train", "name": "w", "pid": 1, "examples": 3}
        );
        let body = rmp_serde::to_vec_named(&body).expect("encodes");
        let request = decode::<RegisterRequest>(&body).expect("decodes");
        assert_eq!(
            (request.whole_groups, request.max_concurrent),
            (false, None)
        );
    }

    #[test]
    fn an_outcome_survives_the_wire() {
        let trace = Trace {
            session: "t".into(),
            trainable: true,
            ok: true,
            reward: 0.5,
            ..Trace::default()
        };
        let error = RolloutError {
            kind: "environment".into(),
            message: "boom".into(),
            ..RolloutError::default()
        };
        let map = round_trip(ResultRequest {
            worker: WorkerId(1),
            rollout: RolloutId(7),
            outcome: Outcome {
                ok: false,
                traces: vec![trace],
                error: Some(error),
                refusal: None,
            },
        });
        assert_eq!(map["outcome"]["traces"][0]["session"], "t");
        assert_eq!(map["outcome"]["error"]["kind"], "environment");
    }

    #[test]
    fn fields_of_a_newer_peer_are_ignored() {
        let body =
            rmp_serde::to_vec_named(&serde_json::json!({"accepted": true, "added_later": [1, 2]}))
                .expect("encodes");
        assert!(decode::<ResultAnswer>(&body).expect("decodes").accepted);
    }
}
