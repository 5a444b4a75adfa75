//! Rules of the whole, one by one. `Run` plays the shell.

mod admission;
mod advantages;
mod blocked;
mod buffer;
mod evaluations;
mod going_back;
mod groups;
mod leases;
mod metrics;
mod restart;
mod resting;
mod rules;
mod teacher;
mod training;
mod whole_groups;

use crate::Config;
use crate::Core;
use crate::counters::{CancelReason, VoidReason};
use crate::effect::{Effect, LeasedRollout};
use crate::event::{Event, Outcome};
use crate::failure::RolloutError;
use crate::ids::*;
use crate::pack::PackedBatch;
use crate::testing::{config, environment, evaluation, outcome, turn};
use crate::time::{Duration, Time};
use std::sync::Arc;

struct Run {
    core: Core,
    now: Time,
    request: u64,
}

impl Run {
    fn new(config: Config) -> Self {
        Run {
            core: Core::new(config).expect("a valid config"),
            now: Time(0),
            request: 0,
        }
    }

    /// One engine at version 0, one worker (of that number) an environment with 10 examples.
    fn started(config: Config) -> Self {
        let environments = config.environments.len() as u32;
        let mut run = Run::new(config);
        run.send(Event::EngineJoined {
            engine: EngineId(0),
            url: "http://engine".to_owned(),
        });
        for id in 0..environments {
            run.join(u64::from(id), id);
        }
        run.publish(0);
        run.prove(0, 0);
        run
    }

    fn send(&mut self, event: Event) -> Vec<Effect> {
        self.core.handle(event, self.now)
    }

    fn pass(&mut self, seconds: f64) -> Vec<Effect> {
        let end = self.now + Duration::from_secs_f64(seconds);
        let mut effects = Vec::new();
        while let Some(due) = self.core.next_deadline().filter(|due| *due <= end) {
            self.now = due;
            effects.extend(self.send(Event::Tick));
        }
        self.now = end;
        effects
    }

    fn join(&mut self, worker: u64, environment: u32) {
        let (worker, environment) = (WorkerId(worker), EnvironmentId(environment));
        self.send(Event::EnvironmentReady {
            environment,
            examples: 10,
            whole_groups: false,
        });
        self.send(Event::WorkerJoined {
            worker,
            environment,
            name: "worker".to_owned(),
        });
    }

    /// Fetches the step's batch if that was not done, and publishes what came of it.
    fn publish(&mut self, version: u64) -> Vec<Effect> {
        let fetched = self.core.batches.newest_fetched();
        if version > 0 && fetched < Some(Step(version)) {
            self.ask_batch(version, 0);
        }
        self.publish_as(version, &format!("d{version}"))
    }

    fn publish_as(&mut self, version: u64, digest: &str) -> Vec<Effect> {
        self.send(Event::WeightsPublished {
            version: PolicyVersion(version),
            manifest: format!("m{version}"),
            digest: digest.to_owned(),
        })
    }

    fn prove(&mut self, engine: u32, version: u64) -> Vec<Effect> {
        self.send(Event::EngineProved {
            engine: EngineId(engine),
            version: PolicyVersion(version),
        })
    }

    fn ask(&mut self, worker: u64, max: u32) -> Vec<Effect> {
        self.request += 1;
        self.send(Event::LeaseRequested {
            request: RequestId(self.request),
            worker: WorkerId(worker),
            max,
        })
    }

    /// Asks, takes what there is, and hangs up if there is nothing.
    fn lease(&mut self, worker: u64, max: u32) -> Vec<LeasedRollout> {
        let effects = self.ask(worker, max);
        let leased = leased(&effects);
        if leased.is_empty() {
            self.send(Event::RequestDropped {
                request: RequestId(self.request),
            });
        }
        leased
    }

    fn turn(&mut self, rollout: RolloutId, version: u64) -> Vec<Effect> {
        self.send(Event::TurnFinished {
            rollout,
            turn: turn(None, &[1, 2], &[3, 4], version),
        })
    }

    fn report(&mut self, worker: u64, rollout: RolloutId, outcome: Outcome) -> Vec<Effect> {
        self.send(Event::RolloutFinished {
            rollout,
            worker: WorkerId(worker),
            outcome,
        })
    }

    /// One turn of that version, and a good end.
    fn succeed(&mut self, worker: u64, rollout: RolloutId, version: u64) -> Vec<Effect> {
        self.turn(rollout, version);
        self.report(worker, rollout, outcome(rollout.0 as f64))
    }

    fn fail(&mut self, worker: u64, rollout: RolloutId) -> Vec<Effect> {
        let error = RolloutError {
            kind: "environment".to_owned(),
            message: "it broke".to_owned(),
            ..RolloutError::default()
        };
        self.report(
            worker,
            rollout,
            Outcome {
                ok: false,
                traces: vec![],
                error: Some(error),
                refusal: None,
            },
        )
    }

    /// Leases a whole batch (4 rollouts) at worker 0 and lets it succeed.
    fn batch(&mut self, version: u64) -> Vec<Effect> {
        self.rollouts(4, version)
    }

    /// The same of so many rollouts.
    fn rollouts(&mut self, count: u32, version: u64) -> Vec<Effect> {
        let rollouts = self.lease(0, count);
        assert_eq!(rollouts.len(), count as usize);
        rollouts
            .iter()
            .flat_map(|leased| self.succeed(0, leased.rollout, version))
            .collect()
    }

    fn ask_batch(&mut self, step: u64, rank: u32) -> Vec<Effect> {
        self.request += 1;
        self.send(Event::BatchRequested {
            request: RequestId(self.request),
            step: Step(step),
            rank,
        })
    }

    fn ask_next_batch(&mut self, step: u64, rank: u32) -> Vec<Effect> {
        self.request += 1;
        self.send(Event::NextBatchRequested {
            request: RequestId(self.request),
            step: Step(step),
            rank,
        })
    }
}

fn leased(effects: &[Effect]) -> Vec<LeasedRollout> {
    let leases = effects.iter().filter_map(|effect| match effect {
        Effect::Lease { rollouts, .. } => Some(rollouts.clone()),
        _ => None,
    });
    leases.flatten().collect()
}

fn cut(effects: &[Effect]) -> Vec<Arc<PackedBatch>> {
    let cut = effects.iter().filter_map(|effect| match effect {
        Effect::BatchCut { batch } => Some(Arc::clone(batch)),
        _ => None,
    });
    cut.collect()
}

fn fetched(effects: &[Effect]) -> Option<Step> {
    effects.iter().find_map(|effect| match effect {
        Effect::Batch { step, .. } => Some(*step),
        _ => None,
    })
}

fn updates(effects: &[Effect]) -> Vec<(u32, u64)> {
    let updates = effects.iter().filter_map(|effect| match effect {
        Effect::UpdateEngine {
            engine,
            version,
            manifest,
            ..
        } => {
            assert_eq!(*manifest, format!("m{version}"));
            Some((engine.0, version.0))
        }
        _ => None,
    });
    updates.collect()
}

fn cancelled(effects: &[Effect]) -> Vec<(RolloutId, CancelReason)> {
    let cancelled = effects.iter().filter_map(|effect| match effect {
        Effect::CancelRollout {
            rollout, reason, ..
        } => Some((*rollout, *reason)),
        _ => None,
    });
    cancelled.collect()
}

/// Texts of refusals and warnings, one a line.
fn said(effects: &[Effect]) -> String {
    let texts = effects.iter().filter_map(|effect| match effect {
        Effect::NoLease { reason, .. }
        | Effect::Finished { reason }
        | Effect::Failed { reason } => Some(reason.clone()),
        Effect::BatchNotReady { waiting_for, .. } => Some(waiting_for.clone()),
        Effect::Warn { message } => Some(message.clone()),
        Effect::WorkerGone { why, .. } => Some(why.clone()),
        _ => None,
    });
    texts.collect::<Vec<_>>().join("\n")
}

#[track_caller]
fn assert_said(effects: &[Effect], part: &str) {
    let said = said(effects);
    assert!(said.contains(part), "{part:?} is not in {said:?}");
}
