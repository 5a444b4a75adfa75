//! The layout of a snapshot: [`Core`] as a map with one entry a line of this table.
//!
//! Later versions read snapshots of earlier ones. So a name here, and what it stands for, stays when a field of
//! [`Core`] moves, and an entry that is new gets `#[serde(default)]`. What is not listed is not part of the state.

use super::Core;
use crate::admission::Limits;
use crate::advantage::Baselines;
use crate::batch::{Batches, Trainer};
use crate::config::Config;
use crate::counters::{Counters, Discards, Interval};
use crate::curriculum::Curriculum;
use crate::deadlines::Deadlines;
use crate::environment::Environments;
use crate::evaluation::Round;
use crate::group::{Group, UsualTokens};
use crate::ids::*;
use crate::policy::Ledger;
use crate::rollout::{LeaseRequest, Rollout};
use crate::time::Time;
use crate::wait::{Armed, Waits};
use crate::worker::Worker;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::{BTreeMap, BTreeSet};

macro_rules! layout {
    ($($(#[$attribute:meta])* $name:ident: $type:ty = $($field:ident).+;)*) => {
        #[derive(Serialize)]
        #[serde(rename = "Core")]
        struct Written<'a> {
            $($name: &'a $type,)*
        }

        #[derive(Deserialize)]
        #[serde(rename = "Core")]
        struct Read {
            $($(#[$attribute])* $name: $type,)*
        }

        impl Serialize for Core {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let written = Written {
                    $($name: &self.$($field).+,)*
                };
                written.serialize(serializer)
            }
        }

        impl<'de> Deserialize<'de> for Core {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let read = Read::deserialize(deserializer)?;
                let mut core = Core::begin(read.config.clone());
                $(core.$($field).+ = read.$name;)*
                core.groups.count_again();
                Ok(core)
            }
        }
    };
}

layout! {
    config: Config = config;
    rng: ChaCha8Rng = rng;
    now: Time = now;
    curriculum: Curriculum = curriculum;
    sites: Environments = environments;
    groups: BTreeMap<GroupId, Group> = groups.live;
    ready: BTreeSet<(u64, GroupId)> = groups.ready;
    next_ready: u64 = groups.next_ready;
    #[serde(default)]
    usual_tokens: UsualTokens = groups.usual;
    computing: BTreeMap<GroupId, Armed> = signals.custom;
    #[serde(default)]
    scoring: BTreeMap<GroupId, Armed> = signals.teacher;
    rollouts: BTreeMap<RolloutId, Box<Rollout>> = rollouts.in_flight;
    by_age: BTreeMap<(PolicyVersion, RolloutId), (GroupId, usize)> = rollouts.by_age;
    in_flight_evaluation: usize = rollouts.evaluating;
    workers: BTreeMap<WorkerId, Worker> = workers.registered;
    lease_requests: BTreeMap<RequestId, LeaseRequest> = leases.requests;
    next_place: u64 = leases.next_place;
    ledger: Ledger = ledger;
    limits: Limits = limits;
    round: Option<Round> = evaluations.round;
    #[serde(default)]
    measured: Option<Round> = evaluations.measured;
    evaluated: Option<PolicyVersion> = evaluations.evaluated;
    next_step: Step = next_step;
    batches: Batches = batches;
    trainer: Trainer = trainer;
    #[serde(default)]
    signal_at: Time = signals.at;
    #[serde(default)]
    baselines: Baselines = signals.baselines;
    counters: Counters = tally.counters;
    losses: Discards = tally.discards;
    #[serde(default)]
    sampled_tokens: u64 = tally.sampled_tokens;
    last_cut: Interval = tally.last_cut;
    next_group: u64 = groups.next;
    next_rollout: u64 = rollouts.next;
    next_worker: u64 = workers.next;
    deadlines: Deadlines = deadlines;
    waits: Waits = waits;
    ignored: BTreeMap<String, u64> = tally.ignored;
    finished: Option<String> = ending.finished;
    failed: bool = ending.failed;
    hopeless: Option<String> = ending.hopeless;
}
