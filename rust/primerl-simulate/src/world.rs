//! The simulated run: the real core, and around it engines, workers and a trainer that take the time the plan says.

mod engines;
mod rollouts;
mod trainer;

use crate::engine::Engine;
use crate::plan::{Plan, PlanError};
use crate::soonest::Soonest;
use crate::tracks::{Doing, Track};
use primerl_core::admission::last_step;
use primerl_core::*;
use primerl_engine_server::numbered::NumberMap;
use rollouts::{Columns, Rollout, Worker};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
pub(crate) use trainer::IN_FLIGHT;
use trainer::Trainer;

/// So many batches' worth of rollouts that end without a batch: the plan never gets anywhere.
const FRUITLESS_BATCHES: u64 = 1_000;
const HEARTBEAT: Duration = Duration::from_secs(4);

/// What happens at its time, unless what it is about has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Action {
    Updated(usize, PolicyVersion),
    Heartbeat(usize),
    /// The environment wants the rollout's next turn, or has reached the rollout's end.
    EnvironmentDone(RolloutId),
    /// The worker has sent the turn's request.
    TurnAsked(RolloutId),
    TrainerDone(Step),
    Published(PolicyVersion),
}

/// A run in virtual time.
pub struct World {
    pub(crate) plan: Plan,
    pub(crate) core: Core,
    pub(crate) now: Time,
    agenda: BinaryHeap<Reverse<(Time, u64, Action)>>,
    planned: u64,
    /// When engines' strides end. Apart from the agenda, because most of them are moved.
    strides: Soonest,
    inbox: VecDeque<Event>,
    pub(crate) engines: Vec<Engine>,
    engine_doing: Vec<Doing>,
    /// The newest version that an engine serves which takes requests.
    served: Option<PolicyVersion>,
    workers: Vec<Worker>,
    /// In flight; looked up, never walked through.
    rollouts: NumberMap<RolloutId, Rollout>,
    /// Turns that wait for an engine that may be used.
    held_back: VecDeque<RolloutId>,
    columns: Columns,
    trainer: Trainer,
    next_request: u64,
    asking: u64,
    in_flight: usize,
    steps_cut: u64,
    proved: Option<PolicyVersion>,
    /// Why nothing more starts.
    reason: Doing,
    ended_at_last_cut: u64,
    pub(crate) measured: Measurements,
}

/// What is written down as the run goes.
#[derive(Debug, Default)]
pub(crate) struct Measurements {
    pub began: Time,
    pub trainer: Track,
    pub engines: Vec<Track>,
    /// All places for rollouts in all workers.
    pub slots: Track,
    pub admission: Track,
    /// What rollouts in flight did while the trainer waited for rollouts.
    pub while_waiting: Track,
    pub staleness: BTreeMap<u64, u64>,
    pub sampled_tokens: u64,
    pub trained_tokens: u64,
    pub events: u64,
    pub cuts: Vec<Time>,
    pub warnings: BTreeMap<String, u64>,
    pub ended: Option<(bool, String)>,
}

impl Measurements {
    /// Everything starts.
    fn begin(engines: usize, slots: u64) -> Measurements {
        let mut measured = Measurements {
            engines: vec![Track::default(); engines],
            ..Measurements::default()
        };
        measured.slots.set(Doing::Start, slots, Time(0));
        measured.admission.set(Doing::Start, 1, Time(0));
        measured.trainer.set(Doing::Start, 1, Time(0));
        let tracks = measured.engines.iter_mut();
        tracks.for_each(|track| track.set(Doing::Start, 1, Time(0)));
        measured
    }
}

impl World {
    /// # Errors
    /// What [`Plan::validate`] finds.
    pub fn new(plan: Plan) -> Result<Self, PlanError> {
        plan.validate()?;
        let core = Core::new(plan.core_config()).map_err(|error| PlanError {
            field: "orchestrator".to_owned(),
            problem: error.to_string(),
        })?;
        let engines = plan.inference.engines as usize;
        let workers = plan.environment.num_workers;
        let slots = u64::from(workers) * u64::from(plan.environment.max_concurrent);
        let mut world = World {
            core,
            now: Time(0),
            agenda: BinaryHeap::new(),
            planned: 0,
            strides: Soonest::new(engines),
            inbox: VecDeque::new(),
            engines: (0..engines).map(|_| Engine::new(&plan.inference)).collect(),
            engine_doing: vec![Doing::Start; engines],
            served: None,
            workers: (0..workers).map(|_| Worker::default()).collect(),
            rollouts: NumberMap::default(),
            held_back: VecDeque::new(),
            columns: Columns::default(),
            trainer: Trainer::default(),
            next_request: 0,
            asking: 0,
            in_flight: 0,
            steps_cut: 0,
            proved: None,
            reason: Doing::Start,
            ended_at_last_cut: 0,
            measured: Measurements::begin(engines, slots),
            plan,
        };
        world.start();
        Ok(world)
    }

    /// Plays on until the run has ended, well or badly.
    pub fn run(&mut self) {
        while self.measured.ended.is_none() && self.step() {}
        self.measured.ended.get_or_insert_with(|| {
            let reason = "nothing is left that could happen".to_owned();
            (false, reason)
        });
        let now = self.now;
        let measured = &mut self.measured;
        let tracks = measured.engines.iter_mut().chain([
            &mut measured.trainer,
            &mut measured.slots,
            &mut measured.admission,
            &mut measured.while_waiting,
        ]);
        tracks.for_each(|track| track.close(now));
    }

    /// Plays on to the next moment at which something happens.
    fn step(&mut self) -> bool {
        let planned = self
            .agenda
            .peek()
            .map(|Reverse((at, number, _))| (*at, *number));
        let stride = self.strides.first();
        let first = planned
            .into_iter()
            .chain(stride.map(|(at, number, _)| (at, number)))
            .min();
        let due = self.core.next_deadline();
        let Some(next) = first.map(|(at, _)| at).into_iter().chain(due).min() else {
            return false;
        };
        self.now = self.now.max(next);
        if first.is_none_or(|(at, _)| at > next) {
            self.inbox.push_back(Event::Tick);
        } else if planned == first {
            if let Some(Reverse((_, _, action))) = self.agenda.pop() {
                self.act(action);
            }
        } else if let Some((_, _, engine)) = stride {
            self.stride_ends(engine);
        }
        self.deliver();
        self.note_reason();
        self.note_trainer();
        true
    }

    fn start(&mut self) {
        for engine in 0..self.engines.len() {
            self.send(Event::EngineJoined {
                engine: EngineId(engine as u32),
                url: format!("http://engine-{engine}"),
            });
        }
        for worker in 0..self.workers.len() {
            self.worker_starts(worker);
        }
        self.plan_after(
            self.plan.trainer.publish_s,
            Action::Published(PolicyVersion(0)),
        );
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Updated(engine, version) => self.engine_updated(engine, version),
            Action::Heartbeat(worker) => self.heartbeat(worker),
            Action::EnvironmentDone(rollout) => self.environment_done(rollout),
            Action::TurnAsked(rollout) => self.turn_asked(rollout),
            Action::TrainerDone(step) => self.trainer_done(step),
            Action::Published(version) => self.published(version),
        }
    }

    fn deliver(&mut self) {
        while let Some(event) = self.inbox.pop_front() {
            self.measured.events += 1;
            for effect in self.core.handle(event, self.now) {
                self.carry_out(effect);
            }
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Lease {
                worker, rollouts, ..
            } => self.worker_gets(worker.0 as usize, &rollouts),
            Effect::NoLease {
                request, finished, ..
            } => self.worker_gets_nothing(request, finished),
            Effect::CancelRollout { rollout, .. } => self.rollout_cancelled(rollout),
            Effect::RolloutClosed { .. } => self.in_flight -= 1,
            Effect::UpdateEngine {
                engine, version, ..
            } => self.engine_told(engine.0 as usize, version),
            Effect::Batch { rank, step, .. } => self.trainer_gets(rank, step),
            Effect::BatchNotReady { request, .. } => self.trainer_asks_again(request),
            Effect::BatchCut { batch } => self.batch_cut(&batch),
            Effect::Finished { reason } => self.measured.ended = Some((true, reason)),
            Effect::Failed { reason } => self.measured.ended = Some((false, reason)),
            Effect::Warn { message } => self.warned(&message),
            Effect::NoMoreBatches { .. }
            | Effect::WorkerLost { .. }
            | Effect::WorkerGone { .. }
            | Effect::Evaluated(_)
            | Effect::ForgetBatches { .. }
            | Effect::LimitEngine { .. }
            | Effect::ComputeAdvantages { .. }
            | Effect::ScoreByTeacher { .. }
            | Effect::RolloutFailed { .. }
            | Effect::RolloutVoided { .. }
            | Effect::GroupDropped { .. } => {}
        }
    }

    /// Counts warnings that differ in their numbers only as one.
    fn warned(&mut self, message: &str) {
        let kind: String = message
            .chars()
            .map(|c| if c.is_ascii_digit() { '#' } else { c })
            .collect();
        *self
            .measured
            .warnings
            .entry(kind.replace("##", "#"))
            .or_default() += 1;
        let counters = self.core.counters();
        let fruitless = FRUITLESS_BATCHES * u64::from(self.plan.orchestrator.batch_size);
        if counters.ended() - self.ended_at_last_cut > fruitless {
            let reason =
                format!("{fruitless} rollouts in a row came to nothing; the last: {message}");
            self.measured.ended = Some((false, reason));
        }
    }

    /// Why nothing more starts; who is idle is so for this reason.
    fn note_reason(&mut self) {
        let reason = self.why_nothing_starts();
        if reason == self.reason {
            return;
        }
        let (before, now) = (std::mem::replace(&mut self.reason, reason), self.now);
        if before == Doing::Start {
            self.begin_to_measure();
        }
        self.measured.admission.change(before, reason, now);
        let idle = self.measured.slots.count(before);
        let there = self.measured.slots.count(reason);
        self.measured.slots.set(before, 0, now);
        self.measured.slots.set(reason, there + idle, now);
        for engine in 0..self.engines.len() {
            self.note_engine_doing(engine);
        }
    }

    fn why_nothing_starts(&self) -> Doing {
        let config = self.core.config();
        if self.proved.is_none() {
            Doing::Start
        } else if self.in_flight >= config.max_in_flight() {
            Doing::InFlightLimit
        } else if self.asking == 0 {
            Doing::WorkerSlots
        } else if last_step(config, self.proved) == Some(Step(config.run.max_steps)) {
            Doing::RunEnd
        } else {
            Doing::AsyncLevel
        }
    }

    fn begin_to_measure(&mut self) {
        let now = self.now;
        let measured = &mut self.measured;
        measured.began = now;
        let tracks = measured.engines.iter_mut().chain([
            &mut measured.trainer,
            &mut measured.slots,
            &mut measured.admission,
            &mut measured.while_waiting,
        ]);
        tracks.for_each(|track| track.restart(now));
    }

    /// Adds to the number of places in which a rollout does this.
    fn add_slots(&mut self, doing: Doing, change: i64) {
        if change == 0 {
            return;
        }
        let count = self
            .measured
            .slots
            .count(doing)
            .saturating_add_signed(change);
        self.measured.slots.set(doing, count, self.now);
        if self.trainer.waits == Some(Doing::Rollouts) && IN_FLIGHT.contains(&doing) {
            self.measured.while_waiting.set(doing, count, self.now);
        }
    }

    pub(crate) fn send(&mut self, event: Event) {
        self.inbox.push_back(event);
    }

    fn plan_at(&mut self, at: Time, action: Action) {
        self.planned += 1;
        self.agenda.push(Reverse((at, self.planned, action)));
    }

    fn plan_after(&mut self, seconds: f64, action: Action) {
        self.plan_at(self.now + Duration::from_secs_f64(seconds), action);
    }

    fn new_request(&mut self) -> RequestId {
        self.next_request += 1;
        RequestId(self.next_request)
    }
}
