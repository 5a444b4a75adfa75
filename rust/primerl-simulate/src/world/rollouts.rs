//! Workers and the rollouts they run. A rollout's lengths depend on the seed and its own number only, so two plans that
//! differ in a knob see the same rollouts.

use super::{Action, HEARTBEAT, World};
use crate::stream::Stream;
use crate::tracks::Doing;
use primerl_core::effect::LeasedRollout;
use primerl_core::event::{Outcome, Trace};
use primerl_core::failure::RolloutError;
use primerl_core::turn::FinishReason;
use primerl_core::*;
use primerl_engine_server::numbered::NumberMap;
use rand::Rng;
use std::sync::Arc;

#[derive(Debug, Default)]
pub(crate) struct Worker {
    running: u32,
    asks: Option<RequestId>,
    cpu_free: Time,
}

#[derive(Debug)]
pub(crate) struct Rollout {
    worker: usize,
    rng: Stream,
    turns: u32,
    turns_left: u32,
    /// Tokens of the conversation so far.
    context: u64,
    /// Prompt tokens that the next turn adds.
    added: u32,
    answer: u32,
    cut: bool,
    /// The engine of its last turn.
    engine: Option<usize>,
    doing: Doing,
}

type TokensAndLogprobs = (Arc<[u32]>, Arc<[f32]>);

/// Columns of zeros, shared by turns of equal length: the core does not look at tokens.
#[derive(Debug)]
pub(crate) struct Columns {
    session: Arc<str>,
    known: NumberMap<u32, TokensAndLogprobs>,
    tokens: usize,
}

impl Default for Columns {
    fn default() -> Self {
        Columns {
            session: "".into(),
            known: NumberMap::default(),
            tokens: 0,
        }
    }
}

impl Columns {
    /// 8 bytes each.
    const MOST_TOKENS: usize = 16 << 20;

    fn get(&mut self, length: u32) -> TokensAndLogprobs {
        if let Some(known) = self.known.get(&length) {
            return known.clone();
        }
        let columns: TokensAndLogprobs = (
            vec![0; length as usize].into(),
            vec![-1.0; length as usize].into(),
        );
        if self.tokens + length as usize <= Self::MOST_TOKENS {
            self.tokens += length as usize;
            self.known.insert(length, columns.clone());
        }
        columns
    }
}

impl World {
    pub(super) fn worker_starts(&mut self, worker: usize) {
        let (environment, id) = (EnvironmentId(0), WorkerId(worker as u64));
        let examples = self.plan.environment.examples;
        self.send(Event::EnvironmentReady {
            environment,
            examples,
            whole_groups: false,
        });
        self.send(Event::WorkerJoined {
            worker: id,
            environment,
            name: format!("worker-{worker}"),
        });
        self.ask_for_lease(worker);
        self.plan_at(self.now + HEARTBEAT, Action::Heartbeat(worker));
    }

    pub(super) fn heartbeat(&mut self, worker: usize) {
        self.send(Event::WorkerSeen {
            worker: WorkerId(worker as u64),
        });
        self.plan_at(self.now + HEARTBEAT, Action::Heartbeat(worker));
    }

    fn ask_for_lease(&mut self, index: usize) {
        let free = self.plan.environment.max_concurrent - self.workers[index].running;
        if free == 0 || self.workers[index].asks.is_some() {
            return;
        }
        let request = self.new_request();
        self.workers[index].asks = Some(request);
        self.asking += 1;
        self.send(Event::LeaseRequested {
            request,
            worker: WorkerId(index as u64),
            max: free,
        });
    }

    pub(super) fn worker_gets(&mut self, index: usize, rollouts: &[LeasedRollout]) {
        self.workers[index].asks = None;
        self.asking -= 1;
        for leased in rollouts {
            self.workers[index].running += 1;
            self.in_flight += 1;
            self.add_slots(self.reason, -1);
            self.rollout_begins(index, leased);
        }
        self.ask_for_lease(index);
    }

    pub(super) fn worker_gets_nothing(&mut self, request: RequestId, finished: bool) {
        let asked = |worker: &Worker| worker.asks == Some(request);
        if let Some(index) = self.workers.iter().position(asked) {
            self.workers[index].asks = None;
            self.asking -= 1;
            if !finished {
                self.ask_for_lease(index);
            }
        }
    }

    fn rollout_begins(&mut self, worker: usize, leased: &LeasedRollout) {
        let environment = &self.plan.environment;
        // The prompt is the example's: the same for all rollouts of a group.
        let mut of_group = Stream::new(self.plan.seed, leased.group.0, 1);
        let mut rng = Stream::new(self.plan.seed, leased.rollout.0, 2);
        let turns = environment.turns.draw_count(&mut rng, 1);
        let setup_s = environment.setup_s.draw(&mut rng);
        let rollout = Rollout {
            worker,
            turns: 0,
            turns_left: turns,
            context: 0,
            added: environment.prompt_tokens.draw_count(&mut of_group, 1),
            answer: 0,
            cut: false,
            engine: None,
            doing: Doing::Environment,
            rng,
        };
        self.rollouts.insert(leased.rollout, rollout);
        self.add_slots(Doing::Environment, 1);
        self.plan_after(setup_s, Action::EnvironmentDone(leased.rollout));
    }

    pub(super) fn environment_done(&mut self, id: RolloutId) {
        let room = u64::from(self.plan.seq_len);
        let Some(rollout) = self.rollouts.get_mut(&id) else {
            return;
        };
        if rollout.turns_left == 0 || rollout.context + u64::from(rollout.added) >= room {
            return self.report(id);
        }
        let cpu = Duration::from_secs_f64(self.plan.environment.cpu_s);
        if cpu.0 == 0 {
            rollout.doing = Doing::WeightUpdate;
            self.add_slots(Doing::Environment, -1);
            return self.turn_asked(id);
        }
        rollout.doing = Doing::WorkerCpu;
        let worker = &mut self.workers[rollout.worker];
        worker.cpu_free = worker.cpu_free.max(self.now) + cpu;
        let at = worker.cpu_free;
        self.add_slots(Doing::Environment, -1);
        self.add_slots(Doing::WorkerCpu, 1);
        self.plan_at(at, Action::TurnAsked(id));
    }

    /// The next turn goes to an engine, or waits for one. Its rollout is counted nowhere, or as using CPU.
    pub(super) fn turn_asked(&mut self, id: RolloutId) {
        let Some(rollout) = self.rollouts.get(&id) else {
            return;
        };
        let (own, used_cpu) = (rollout.engine, rollout.doing == Doing::WorkerCpu);
        if used_cpu {
            self.add_slots(Doing::WorkerCpu, -1);
        }
        let picked = self.pick_engine(own);
        let Some(rollout) = self.rollouts.get_mut(&id) else {
            return;
        };
        let Some(engine) = picked else {
            rollout.doing = Doing::WeightUpdate;
            self.held_back.push_back(id);
            return self.add_slots(Doing::WeightUpdate, 1);
        };
        let hit = match own == Some(engine) {
            true => self.plan.inference.prefix_cache_hit,
            false => 0.0,
        };
        let environment = &self.plan.environment;
        let drawn = environment.answer_tokens.draw_count(&mut rollout.rng, 1);
        let cached = (rollout.context as f64 * hit) as u64;
        let prompt = rollout.context + u64::from(rollout.added);
        let room = u64::from(self.plan.seq_len) - prompt;
        rollout.answer = drawn.min(room as u32);
        rollout.cut = rollout.answer < drawn;
        rollout.engine = Some(engine);
        rollout.doing = Doing::Sampling;
        let answer = u64::from(rollout.answer);
        self.submit(engine, id, (prompt, answer, cached));
    }

    pub(super) fn turn_ended(&mut self, id: RolloutId, versions: VersionRuns) {
        let Some(rollout) = self.rollouts.get_mut(&id) else {
            return;
        };
        let turn = turn_of(rollout, versions, &mut self.columns);
        let environment = &self.plan.environment;
        rollout.context += u64::from(rollout.added) + u64::from(rollout.answer);
        rollout.turns += 1;
        rollout.turns_left -= 1;
        rollout.added = environment
            .observation_tokens
            .draw_count(&mut rollout.rng, 1);
        rollout.doing = Doing::Environment;
        let turn_s = environment.turn_s.draw(&mut rollout.rng);
        self.measured.sampled_tokens += u64::from(rollout.answer);
        self.add_slots(Doing::Environment, 1);
        self.send(Event::TurnFinished { rollout: id, turn });
        self.plan_after(turn_s, Action::EnvironmentDone(id));
    }

    fn report(&mut self, id: RolloutId) {
        let Some(mut rollout) = self.rollouts.remove(&id) else {
            return;
        };
        self.add_slots(Doing::Environment, -1);
        let failed = rollout
            .rng
            .random_bool(self.plan.environment.failure_probability);
        let reward = rollout.rng.random();
        let outcome = match failed {
            true => failure(),
            false => success(reward, rollout.cut),
        };
        self.send(Event::RolloutFinished {
            rollout: id,
            worker: WorkerId(rollout.worker as u64),
            outcome,
        });
        self.slot_is_free(rollout.worker);
    }

    pub(super) fn rollout_cancelled(&mut self, id: RolloutId) {
        let Some(rollout) = self.rollouts.remove(&id) else {
            return;
        };
        match (rollout.doing, rollout.engine) {
            (Doing::Sampling, Some(engine)) => self.abort(engine, id),
            (doing, _) => {
                self.held_back.retain(|held| *held != id);
                self.add_slots(doing, -1);
            }
        }
        self.slot_is_free(rollout.worker);
    }

    fn slot_is_free(&mut self, worker: usize) {
        self.workers[worker].running -= 1;
        self.add_slots(self.reason, 1);
        self.ask_for_lease(worker);
    }
}

fn turn_of(rollout: &Rollout, versions: VersionRuns, columns: &mut Columns) -> Turn {
    let (sampled, logprobs) = columns.get(rollout.answer);
    let parent = rollout.turns.checked_sub(1).map(TurnIndex);
    let session = Arc::clone(&columns.session);
    let added = columns.get(rollout.added).0;
    Turn {
        finish: match rollout.cut {
            true => FinishReason::Length,
            false => FinishReason::Stop,
        },
        ..Turn::of_ids(session, parent, added, sampled, logprobs, versions)
    }
}

fn success(reward: f64, truncated: bool) -> Outcome {
    Outcome {
        ok: true,
        traces: vec![Trace {
            trainable: true,
            ok: true,
            reward,
            truncated,
            ..Trace::default()
        }],
        error: None,
        refusal: None,
    }
}

fn failure() -> Outcome {
    Outcome {
        error: Some(RolloutError {
            kind: "environment".to_owned(),
            message: "failure_probability".to_owned(),
            ..RolloutError::default()
        }),
        ..Outcome::default()
    }
}
