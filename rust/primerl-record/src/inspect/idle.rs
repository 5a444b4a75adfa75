//! Where trainer, engines and workers waited, and for what. Each event begins a span in which everyone is in one state,
//! so the states of each add up to the whole time.

mod states;

use super::play::{Beginning, JournalSummary, Moment, Observer, play};
use super::spans::{Share, Spans, Timeline};
use super::{InspectError, environment_name};
use primerl_core::*;
use serde::Serialize;
use states::{EngineState, TrainerState, WorkerState};
use std::collections::BTreeMap;
use std::path::Path;

/// Number of the longest waits that are shown.
const LONGEST: usize = 5;

/// One wait of the trainer, from asking for a batch to getting it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LongWait {
    pub step: Step,
    pub from_s: f64,
    pub seconds: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EngineIdle {
    pub engine: EngineId,
    pub states: Vec<Share>,
}

/// All workers of an environment together, in worker-seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkersIdle {
    pub environment: String,
    pub worker_seconds: f64,
    pub states: Vec<Share>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct IdleReport {
    pub story: JournalSummary,
    pub seconds: f64,
    pub trainer: Vec<Share>,
    /// The trainer's longest waits, longest first.
    pub longest_waits: Vec<LongWait>,
    pub engines: Vec<EngineIdle>,
    pub workers: Vec<WorkersIdle>,
    /// Rollouts in flight, mean over time.
    pub mean_in_flight: f64,
}

/// What the trainer's ranks wait for.
#[derive(Default)]
struct Ranks {
    has_asked: bool,
    requests: BTreeMap<RequestId, u32>,
    /// Steps they have requested and not received; their long polls count as one wait.
    waiting: BTreeMap<u32, (Step, Time)>,
}

/// Where the time goes.
pub(super) struct Watch {
    began: Time,
    last: Time,
    ranks: Ranks,
    trainer: Timeline<TrainerState>,
    longest: Vec<LongWait>,
    engines: BTreeMap<EngineId, Timeline<EngineState>>,
    /// The states of workers since the last event: their number by environment and state.
    working: BTreeMap<(EnvironmentId, WorkerState), u64>,
    workers: BTreeMap<EnvironmentId, Spans<WorkerState>>,
    in_flight: u64,
    /// Microseconds times rollouts in flight.
    rollout_time: u128,
}

impl Ranks {
    fn saw_event(&mut self, event: &Event, now: Time) {
        match event {
            Event::BatchRequested {
                request,
                step,
                rank,
            } => {
                self.has_asked = true;
                self.requests.insert(*request, *rank);
                self.wait(*rank, *step, now);
            }
            // It hung up.
            Event::RequestDropped { request } => {
                if let Some(rank) = self.requests.remove(request) {
                    self.waiting.remove(&rank);
                }
            }
            Event::TrainerResumed { .. } => self.waiting.clear(),
            Event::Restarted => self.requests.clear(),
            _ => {}
        }
    }

    /// A rank that asks for the same step again has waited since it first asked.
    fn wait(&mut self, rank: u32, step: Step, now: Time) {
        let since = match self.waiting.get(&rank) {
            Some((asked, since)) if *asked == step => *since,
            _ => now,
        };
        self.waiting.insert(rank, (step, since));
    }

    /// The wait that an answer ends.
    fn saw_effect(&mut self, effect: &Effect) -> Option<(Step, Time)> {
        match effect {
            Effect::Batch { request, .. } | Effect::NoMoreBatches { request } => {
                let rank = self.requests.remove(request)?;
                self.waiting.remove(&rank)
            }
            // The trainer asks again.
            Effect::BatchNotReady { request, .. } => {
                self.requests.remove(request);
                None
            }
            _ => None,
        }
    }

    fn state(&self, core: &Core) -> TrainerState {
        let step = self.waiting.values().map(|(step, _)| *step).min();
        match step {
            _ if core.finished().is_some() => TrainerState::RunOver,
            None if self.has_asked => TrainerState::Busy,
            None => TrainerState::Starting,
            Some(step) if step < core.next_step() => TrainerState::Collects,
            Some(step) => TrainerState::Waits(core.batch_wait(step)),
        }
    }
}

impl Watch {
    pub(super) fn begin(beginning: &Beginning<'_>) -> Watch {
        let (core, now) = (beginning.core, beginning.core.now());
        let ranks = Ranks {
            // In a run whose journal begins in the middle, a cut step shows that there was a trainer.
            has_asked: core.next_step() > Step(1),
            ..Ranks::default()
        };
        let mut watch = Watch {
            began: now,
            last: now,
            trainer: Timeline::new(ranks.state(core), now),
            ranks,
            longest: Vec::new(),
            engines: BTreeMap::new(),
            working: BTreeMap::new(),
            workers: BTreeMap::new(),
            in_flight: 0,
            rollout_time: 0,
        };
        watch.look(core, now);
        watch
    }

    /// Ends the span since the last event.
    fn advance(&mut self, now: Time) {
        let span = now.since(self.last);
        self.last = now;
        if span.0 == 0 {
            return;
        }
        self.rollout_time += u128::from(span.0) * u128::from(self.in_flight);
        for ((environment, state), workers) in &self.working {
            let spans = self.workers.entry(*environment).or_default();
            spans.add(*state, span, *workers);
        }
    }

    /// The states of everyone from now on.
    fn look(&mut self, core: &Core, now: Time) {
        self.trainer.turn_to(self.ranks.state(core), now);
        let idle = core.why_no_rollouts();
        let began = self.began;
        for engine in core.engine_views() {
            let timeline = self
                .engines
                .entry(engine.engine)
                .or_insert_with(|| Timeline::new(EngineState::NotJoined, began));
            timeline.turn_to(EngineState::of(&engine, idle), now);
        }
        self.working.clear();
        for worker in core.worker_views() {
            let key = (worker.environment, WorkerState::of(&worker));
            *self.working.entry(key).or_default() += 1;
        }
        let (training, evaluation) = core.in_flight();
        self.in_flight = (training + evaluation) as u64;
    }

    fn waited(&mut self, step: Step, since: Time, until: Time) {
        self.longest.push(LongWait {
            step,
            from_s: super::seconds(since),
            seconds: until.since(since).as_secs_f64(),
        });
        self.longest.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        self.longest.truncate(LONGEST);
    }

    /// The result so far; `story` and `core` are those of the last event.
    pub(super) fn report(&self, story: JournalSummary, core: &Core) -> IdleReport {
        let span = self.last.since(self.began);
        let engines = self.engines.iter().map(|(engine, timeline)| EngineIdle {
            engine: *engine,
            states: timeline.spans.shares(),
        });
        let workers = self.workers.iter().map(|(environment, spans)| WorkersIdle {
            environment: environment_name(core, *environment),
            worker_seconds: spans.seconds(),
            states: spans.shares(),
        });
        IdleReport {
            story,
            seconds: span.as_secs_f64(),
            trainer: self.trainer.spans.shares(),
            longest_waits: self.longest.clone(),
            engines: engines.collect(),
            workers: workers.collect(),
            mean_in_flight: self.rollout_time as f64 / span.0.max(1) as f64,
        }
    }
}

impl Observer for Watch {
    fn saw(&mut self, moment: &Moment<'_>) {
        self.advance(moment.now);
        self.ranks.saw_event(moment.event, moment.now);
        for effect in moment.effects {
            if let Some((step, since)) = self.ranks.saw_effect(effect) {
                self.waited(step, since, moment.now);
            }
        }
        self.look(moment.core, moment.now);
    }
}

/// Reports where the time went.
///
/// # Errors
/// The journal cannot be read.
pub fn idle(output_dir: &Path) -> Result<IdleReport, InspectError> {
    let played = play(output_dir, Watch::begin)?;
    Ok(played.observer.report(played.story, &played.core))
}
