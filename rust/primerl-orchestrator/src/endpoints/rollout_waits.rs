//! What rollouts wait for: the model, or the code of their environment. The gateway knows when each rollout made its
//! last request.

use crate::app::App;
use primerl_core::WorkerId;
use primerl_gateway::Rollout;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

/// Shorter waits are normal for rollouts.
const WORTH_NAMING_S: f64 = 10.0;
/// Number of workers that are named.
const MOST_NAMED: usize = 3;

/// Rollouts of one environment that all wait for the same thing.
struct Waiting {
    rollouts: Vec<Arc<Rollout>>,
    /// The longest wait among them.
    seconds: f64,
}

impl Waiting {
    /// Rollouts that have waited for long; `None` if there are none.
    fn long(rollouts: Vec<(Arc<Rollout>, Instant)>) -> Option<Waiting> {
        let timed = rollouts.into_iter();
        let timed = timed.map(|(rollout, since)| (rollout, since.elapsed().as_secs_f64()));
        let long: Vec<_> = timed
            .filter(|(_, seconds)| *seconds >= WORTH_NAMING_S)
            .collect();
        let seconds = long.iter().map(|(_, seconds)| *seconds).reduce(f64::max)?;
        Some(Waiting {
            rollouts: long.into_iter().map(|(rollout, _)| rollout).collect(),
            seconds,
        })
    }

    /// `rollouts of "task" (16, worker env_task_0, the oldest since 38 s)`
    fn who(&self, environment: &str, names: &BTreeMap<WorkerId, String>) -> String {
        let ids = self.rollouts.iter().map(|rollout| rollout.worker);
        let ids: BTreeSet<WorkerId> = ids.collect();
        let named = ids.iter().take(MOST_NAMED).map(|id| {
            let name = names.get(id);
            name.cloned().unwrap_or_else(|| id.to_string())
        });
        let named: Vec<String> = named.collect();
        let others = match ids.len().saturating_sub(MOST_NAMED) {
            0 => String::new(),
            others => format!(" and {others} others"),
        };
        let ages = self.rollouts.iter().map(|rollout| rollout.began.elapsed());
        let oldest = ages.max().unwrap_or_default().as_secs_f64();
        let s = if ids.len() > 1 { "s" } else { "" };
        format!(
            "rollouts of {environment:?} ({}, worker{s} {}{others}, the oldest since {oldest:.0} s)",
            self.rollouts.len(),
            named.join(", ")
        )
    }

    fn told(&self, environment: &str, names: &BTreeMap<WorkerId, String>, what: &str) -> Value {
        json!({
            "who": self.who(environment, names),
            "for": what,
            "since_s": self.seconds,
            "deadline_s": self.left(),
        })
    }

    /// Seconds until the first of them must have ended.
    fn left(&self) -> f64 {
        let now = Instant::now();
        let ends = self.rollouts.iter().map(|rollout| rollout.deadline);
        let first = ends.min().unwrap_or(now);
        first.saturating_duration_since(now).as_secs_f64()
            - now.saturating_duration_since(first).as_secs_f64()
    }
}

/// Each environment's rollouts that are in its own code, and those that wait for the model. The core names the
/// `blocked` workers.
pub fn waits(
    app: &App,
    environments: &[String],
    names: &BTreeMap<WorkerId, String>,
    blocked: &BTreeSet<WorkerId>,
) -> Vec<Value> {
    let (in_code, asking) = by_environment(app, blocked);
    let name = |environment: u32| {
        let name = environments.get(environment as usize);
        name.map_or("", String::as_str)
    };
    let in_code = in_code.into_iter().filter_map(|(environment, rollouts)| {
        let waiting = Waiting::long(rollouts)?;
        let seconds = waiting.seconds;
        let what = format!("its environment's code: no model call for {seconds:.0} s");
        Some(waiting.told(name(environment), names, &what))
    });
    let asking = asking.into_iter().filter_map(|(environment, rollouts)| {
        let waiting = Waiting::long(rollouts)?;
        let mut told = waiting.told(name(environment), names, "answers of the model");
        told["usual"] = json!(true);
        Some(told)
    });
    in_code.chain(asking).collect()
}

/// By environment; with each rollout, since when it waits.
type ByEnvironment = BTreeMap<u32, Vec<(Arc<Rollout>, Instant)>>;

/// The rollouts that are in their environments' code, and those that wait for the model.
fn by_environment(app: &App, blocked: &BTreeSet<WorkerId>) -> (ByEnvironment, ByEnvironment) {
    let (mut in_code, mut asking) = (ByEnvironment::new(), ByEnvironment::new());
    for rollout in app.gateway.gateway.rollouts.all() {
        if rollout.over.is_cancelled() || blocked.contains(&rollout.worker) {
            continue;
        }
        let doing = rollout.doing();
        let of = match doing.asks {
            true => &mut asking,
            false => &mut in_code,
        };
        of.entry(rollout.environment.0)
            .or_default()
            .push((rollout, doing.since));
    }
    (in_code, asking)
}
