//! `/metrics`: counters from all parts, and the current state of core and engines, as OpenMetrics.

use crate::app::App;
use primerl_core::counters::Counters;
use primerl_core::status::RolloutStatus;
use primerl_core::{ErrorKind, Status};
use primerl_engines::EngineStatus;
use primerl_service::cpu::process_cpu_seconds;
use std::fmt::{self, Write};

/// The type of a metric.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A gauge may decrease.
    Gauge,
    /// A counter only grows, within one start of the run or, for the core's counters, over all of them.
    Counter,
}

/// Samples: labels, in their text form, and a value.
type Samples = Vec<(String, f64)>;

struct Text(String);

impl Text {
    fn family(&mut self, kind: Kind, name: &str, help: &str, samples: Samples) -> fmt::Result {
        let (kind, suffix) = match kind {
            Kind::Gauge => ("gauge", ""),
            Kind::Counter => ("counter", "_total"),
        };
        writeln!(
            self.0,
            "# HELP primerl_{name} {help}\n# TYPE primerl_{name} {kind}"
        )?;
        samples.into_iter().try_for_each(|(labels, value)| {
            writeln!(self.0, "primerl_{name}{suffix}{labels} {value}")
        })
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.family(Kind::Gauge, name, help, vec![(String::new(), value)])
    }

    fn counter(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.family(Kind::Counter, name, help, vec![(String::new(), value)])
    }
}

pub fn exposition(app: &App, status: &Status) -> Result<String, fmt::Error> {
    let mut counted = app.telemetry.encode()?;
    let end = counted.rfind("# EOF").unwrap_or(counted.len());
    counted.truncate(end);
    let mut text = Text(counted);
    run(&mut text, status)?;
    rollouts(&mut text, &status.rollouts)?;
    process(&mut text, app)?;
    environments(&mut text, status)?;
    engines(&mut text, &app.engines.status())?;
    text.0.push_str("# EOF\n");
    Ok(text.0)
}

fn run(text: &mut Text, status: &Status) -> fmt::Result {
    let version = status.run.policy_version;
    let version = version.map_or(-1.0, |version| version.0 as f64);
    let steps = (status.run.next_step.0 - 1) as f64;
    text.gauge("step", "Steps whose batch was cut", steps)?;
    text.gauge(
        "policy_version",
        "Newest proved version, -1 before the first",
        version,
    )?;
    text.gauge(
        "groups_ready",
        "Complete groups that wait for the cut",
        status.groups.ready as f64,
    )
}

fn rollouts(text: &mut Text, rollouts: &RolloutStatus) -> fmt::Result {
    let RolloutStatus {
        in_flight,
        limit,
        in_flight_evaluation,
        finished,
        queued,
        counters,
    } = rollouts;
    for (name, help, value) in [
        ("in_flight", "Rollouts that run", in_flight),
        ("limit", "Rollouts that may run at the same time", limit),
        (
            "in_flight_evaluation",
            "Rollouts of evaluations that run",
            in_flight_evaluation,
        ),
        (
            "finished",
            "Rollouts that ended well and wait for their group or for a cut",
            finished,
        ),
        ("queued", "Rollouts that wait for a worker", queued),
    ] {
        text.gauge(&format!("rollouts_{name}"), help, *value as f64)?;
    }
    rollout_counters(text, *counters)
}

fn rollout_counters(text: &mut Text, counters: Counters) -> fmt::Result {
    let Counters {
        dispatched,
        trained,
        filtered,
        stale,
        failed,
        cancelled,
        evaluated,
        truncated,
        empty,
        errored,
    } = counters;
    for (name, help, value) in [
        ("dispatched", "Rollouts leased to workers", dispatched),
        ("trained", "Rollouts in a batch", trained),
        (
            "filtered",
            "Rollouts that ended well and are not trained",
            filtered,
        ),
        ("stale", "Rollouts that became too old to be trained", stale),
        ("failed", "Rollouts that failed", failed),
        (
            "cancelled",
            "Rollouts that were not needed any more, or lost with their worker",
            cancelled,
        ),
        ("evaluated", "Rollouts in an evaluation's report", evaluated),
        (
            "truncated",
            "Rollouts to be trained that the environment cut short",
            truncated,
        ),
        (
            "empty",
            "Failed rollouts in which nothing trainable was sampled",
            empty,
        ),
        (
            "errored",
            "Rollouts whose environment reported a failure",
            errored,
        ),
    ] {
        text.counter(&format!("rollouts_{name}"), help, value as f64)?;
    }
    Ok(())
}

fn process(text: &mut Text, app: &App) -> fmt::Result {
    let trainer = &app.telemetry.trainer;
    text.gauge(
        "trainer_idle_share",
        "Share of time waiting for batches",
        trainer.idle_share().unwrap_or(0.0),
    )?;
    text.counter(
        "trainer_waited_seconds",
        "Time the trainer has waited for batches",
        trainer.waited().as_secs_f64(),
    )?;
    text.counter(
        "engine_failovers",
        "Requests sent again after a failure",
        app.engines.failovers() as f64,
    )?;
    text.counter(
        "engine_sampled_again",
        "Answers sampled again because an engine that renders loaded weights meanwhile",
        app.engines.crossed() as f64,
    )?;
    text.counter(
        "process_cpu_seconds",
        "CPU time of the orchestrator",
        process_cpu_seconds().unwrap_or(0.0),
    )
}

fn environments(text: &mut Text, status: &Status) -> fmt::Result {
    // Names are escaped like a Rust string.
    let of_each = |value: &dyn Fn(&primerl_core::status::EnvironmentStatus) -> f64| -> Samples {
        let each = status.environments.iter();
        each.map(|one| (format!("{{environment={:?}}}", one.name), value(one)))
            .collect()
    };
    text.family(
        Kind::Gauge,
        "workers",
        "Env workers that are registered",
        of_each(&|one| one.workers as f64),
    )?;
    let blocked = |environment| {
        let workers = status.workers.iter();
        let blocked = workers.filter(|one| one.environment == environment && one.blocked.is_some());
        blocked.count()
    };
    text.family(
        Kind::Gauge,
        "workers_blocked",
        "Env workers whose environment keeps their event loop from running",
        of_each(&|one| blocked(one.environment) as f64),
    )?;
    let errors = status.environments.iter().flat_map(|one| {
        ErrorKind::ALL.into_iter().map(|kind| {
            let count = one.errors.get(&kind).copied().unwrap_or(0);
            let labels = format!("{{environment={:?},kind=\"{}\"}}", one.name, kind.name());
            (labels, count as f64)
        })
    });
    text.family(
        Kind::Counter,
        "rollout_errors",
        "Rollouts that failed or were lost with their worker, by who is to blame",
        errors.collect(),
    )
}

fn engines(text: &mut Text, engines: &[EngineStatus]) -> fmt::Result {
    let of_each = |value: &dyn Fn(&EngineStatus) -> f64| -> Samples {
        let each = engines.iter();
        each.map(|one| (format!("{{engine=\"{}\"}}", one.engine), value(one)))
            .collect()
    };
    for (name, help, samples) in [
        (
            "engine_running",
            "Requests in flight",
            of_each(&|engine| f64::from(engine.running)),
        ),
        (
            "engine_healthy",
            "1 when it answers",
            of_each(&|engine| f64::from(u8::from(engine.healthy))),
        ),
        (
            "engine_idle_share",
            "Share of time without a request",
            of_each(&|engine| engine.idle_share.unwrap_or(0.0)),
        ),
        (
            "engine_version",
            "Version it proved, -1 for none",
            of_each(&|engine| engine.version.map_or(-1.0, |version| version.0 as f64)),
        ),
    ] {
        text.family(Kind::Gauge, name, help, samples)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_typed_as_such_and_every_metric_has_its_own_help() {
        let mut text = Text(String::new());
        let status = RolloutStatus {
            in_flight: 3,
            limit: 8,
            in_flight_evaluation: 0,
            finished: 2,
            queued: 1,
            counters: Counters {
                trained: 7,
                ..Counters::default()
            },
        };
        rollouts(&mut text, &status).expect("is written");
        let text = text.0;
        assert!(
            text.contains(
                "# TYPE primerl_rollouts_in_flight gauge\nprimerl_rollouts_in_flight 3\n"
            )
        );
        assert!(text.contains(
            "# TYPE primerl_rollouts_trained counter\nprimerl_rollouts_trained_total 7\n"
        ));
        let mut helps: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# HELP ")?.split_once(' '))
            .map(|(_, help)| help)
            .collect();
        let all = helps.len();
        helps.sort_unstable();
        helps.dedup();
        assert_eq!((helps.len(), all), (15, 15));
    }
}
