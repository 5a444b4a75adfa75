//! The turns of a simulated rollout, and its report.

use super::actors::{Action, Running, RunningTurn, Sampling};
use super::process::Reply;
use super::{Rewards, Simulator};
use crate::event::{Event, Outcome, RolloutError, Trace};
use crate::ids::*;
use crate::testing::observer::SampledToken;
use crate::time::Duration;
use crate::turn::{FinishReason, ForkReason, Turn, VersionRun};
use rand::Rng;
use std::collections::BTreeMap;

/// Prompt tokens start here, sampled ones below: so it shows which is which.
const PROMPT_TOKENS: u32 = 1 << 24;

impl Simulator {
    pub(super) fn begin_turn(&mut self, id: WorkerId, rollout: RolloutId) {
        if self.is_refused(id, rollout) {
            return;
        }
        let running = self
            .workers
            .get(&id)
            .and_then(|worker| worker.running.get(&rollout));
        let Some(running) = running else { return };
        let (slow, is_first) = (running.slow, running.turns.is_empty());
        // As the gateway routes: to an engine that serves the newest version any of them does.
        let newest = self
            .engines
            .values()
            .filter_map(|engine| engine.serves)
            .max();
        let serving: Vec<EngineId> = self
            .engines
            .iter()
            .filter(|(_, engine)| engine.serves.is_some() && engine.serves == newest)
            .map(|(id, _)| *id)
            .collect();
        let Some(began_at) = newest else {
            return self.plan(Duration::from_secs(1), Action::BeginTurn(id, rollout));
        };
        let engine = serving[self.rng.random_range(0..serving.len())];
        if is_first {
            let version = began_at;
            self.send(Event::SamplingStarted { rollout, version });
        }
        let chosen = self.engines.get_mut(&engine).expect("it serves");
        chosen.requests += 1;
        let (life, requests) = (chosen.life, chosen.requests);
        let capacity = self.scenario.engine_capacity.unwrap_or(u32::MAX);
        let crowded = (f64::from(requests) / f64::from(capacity)).max(1.0);
        let after = if slow || self.engines[&engine].slow {
            self.spread(5.0, 30.0)
        } else {
            self.spread(0.1, 2.0)
        };
        let after = Duration::from_secs_f64(after.as_secs_f64() * crowded);
        self.plan(
            after,
            Action::EndTurn(
                id,
                rollout,
                Sampling {
                    engine,
                    life,
                    began_at,
                },
            ),
        );
    }

    pub(super) fn end_turn(&mut self, id: WorkerId, rollout: RolloutId, sampling: Sampling) {
        if let Some(engine) = self.engines.get_mut(&sampling.engine)
            && engine.life == sampling.life
        {
            engine.requests -= 1;
        }
        if self.is_refused(id, rollout) {
            return;
        }
        let Some(running) = self
            .workers
            .get(&id)
            .and_then(|worker| worker.running.get(&rollout))
            .cloned()
        else {
            return;
        };
        let engine = &self.engines[&sampling.engine];
        let (true, Some(ended_at)) = (engine.life == sampling.life, engine.serves) else {
            return self.begin_turn(id, rollout);
        };
        let (turn, tokens) = self.sample(rollout, &running, sampling.began_at, ended_at);
        let seat = usize::from(&*turn.session == "judge");
        let known = self
            .workers
            .get_mut(&id)
            .and_then(|worker| worker.running.get_mut(&rollout));
        let known = known.expect("it was there a moment ago");
        let recorded = known.turns.iter().filter(|turn| turn.index.is_some());
        known.turns.push(RunningTurn {
            index: Some(recorded.count() as u32),
            seat,
            tokens,
        });
        known.unanswered = true;
        known.turns_left -= 1;
        let reply = Reply::Turn {
            worker: id,
            rollout,
            is_last: known.turns_left == 0,
            running: Box::new(running),
        };
        self.ask(Event::TurnFinished { rollout, turn }, reply);
    }

    pub(super) fn turn_answered(
        &mut self,
        id: WorkerId,
        rollout: RolloutId,
        running: &Running,
        is_last: bool,
    ) {
        let worker = self.workers.get_mut(&id);
        let known = worker.and_then(|worker| worker.running.get_mut(&rollout));
        let waits = known.map(|known| std::mem::replace(&mut known.unanswered, false));
        // One that is cancelled meanwhile notices later, where nothing takes time.
        if !waits.unwrap_or(self.disk.is_instant()) {
            return;
        }
        match is_last {
            false => {
                let after = self.spread(0.01, 0.5);
                self.plan(after, Action::BeginTurn(id, rollout));
            }
            true => self.report(id, rollout, running),
        }
    }

    /// A turn that is in the journal has its answer there.
    pub(super) fn ask_for_answer(&mut self, id: WorkerId, rollout: RolloutId) {
        if self.is_refused(id, rollout) {
            return;
        }
        let worker = self.workers.get(&id);
        let running = worker
            .and_then(|worker| worker.running.get(&rollout))
            .cloned();
        if let Some(running) = running {
            let is_last = running.turns_left == 0;
            self.turn_answered(id, rollout, &running, is_last);
        }
    }

    /// The gateway answers for open rollouts only. Whoever runs another one ends it, and tells so.
    fn is_refused(&mut self, id: WorkerId, rollout: RolloutId) -> bool {
        if self.disk.is_instant() || self.process.is_open(rollout, id) {
            return false;
        }
        let worker = self.workers.get_mut(&id);
        if worker.is_some_and(|worker| worker.running.remove(&rollout).is_some()) {
            self.plan(Duration(1_000), Action::AskForLease(id));
            let outcome = failure("engine", "410: the rollout is over");
            self.tell(id, rollout, outcome);
        }
        true
    }

    /// What the engine answers: mostly an extension of the seat's last turn, sometimes of an earlier one or of none.
    fn sample(
        &mut self,
        rollout: RolloutId,
        running: &Running,
        began_at: PolicyVersion,
        ended_at: PolicyVersion,
    ) -> (Turn, Vec<u32>) {
        let seat = usize::from(running.two_seats && running.turns.len() % 2 == 1);
        let own: Vec<usize> = (0..running.turns.len())
            .filter(|index| running.turns[*index].seat == seat)
            .collect();
        let parent = match self.rng.random_range(0..10) {
            0 => None,
            1 if !own.is_empty() => Some(own[self.rng.random_range(0..own.len())]),
            _ => own.last().copied(),
        };
        let suffix: Vec<u32> = (0..self.rng.random_range(1..4))
            .map(|_| PROMPT_TOKENS + self.rng.random_range(0..1000))
            .collect();
        let mut prompt = parent.map_or_else(Vec::new, |index| running.turns[index].tokens.clone());
        prompt.extend_from_slice(&suffix);
        // What the orchestrator has lost it is told anew.
        let (parent, suffix) = match parent.map(|index| running.turns[index].index) {
            None => (None, suffix),
            Some(None) => (None, prompt.clone()),
            Some(Some(index)) => (Some(TurnIndex(index)), suffix),
        };
        let (n, first) = (self.rng.random_range(1..8_u32), self.next_token);
        self.next_token += n;
        let versions = self.versions_of(n, began_at, ended_at);
        let logprobs = self.note_sampled(rollout, first, &versions, prompt.clone());
        let sampled: Vec<u32> = (first..first + n).collect();
        prompt.extend_from_slice(&sampled);
        let turn = Turn {
            session: if seat == 1 {
                "judge".into()
            } else {
                "player".into()
            },
            parent,
            fork: parent.is_none().then_some(ForkReason::FirstTurn),
            prompt_suffix: suffix.into(),
            sampled: sampled.into(),
            logprobs: logprobs.into(),
            versions,
            temperature: 1.0,
            finish: FinishReason::Stop,
            start_digest: 0,
            context_digest: 0,
            answer_digest: 0,
        };
        (turn, prompt)
    }

    /// Where in its tokens a turn that met a weight update changed versions.
    fn versions_of(
        &mut self,
        n: u32,
        began_at: PolicyVersion,
        ended_at: PolicyVersion,
    ) -> Vec<VersionRun> {
        let before_update = if began_at == ended_at {
            n
        } else {
            self.rng.random_range(0..=n)
        };
        let runs = [(began_at, before_update), (ended_at, n - before_update)].into_iter();
        let runs = runs.filter(|(_, n_tokens)| *n_tokens > 0);
        runs.map(|(version, n_tokens)| VersionRun { version, n_tokens })
            .collect()
    }

    /// Tells the observer what the engine knows of the tokens from `first` on. Returns their log-probabilities.
    fn note_sampled(
        &mut self,
        rollout: RolloutId,
        first: u32,
        versions: &[VersionRun],
        prompt: Vec<u32>,
    ) -> Vec<f32> {
        let (mut logprobs, mut prompt) = (Vec::new(), Some(prompt));
        let by_token = versions
            .iter()
            .flat_map(|run| std::iter::repeat_n(run.version, run.n_tokens as usize));
        for (token, version) in (first..).zip(by_token) {
            let logprob = -self.rng.random_range(0.0..3.0_f32);
            logprobs.push(logprob);
            let sampled = SampledToken {
                rollout,
                version,
                logprob,
                prompt: prompt.take(),
            };
            self.observer.sampled.insert(token, sampled);
        }
        logprobs
    }

    fn reward(&mut self, example: ExampleIndex) -> f64 {
        match self.scenario.rewards {
            Rewards::Numbers => self.rng.random_range(0.0..1.0),
            Rewards::Verdicts => {
                let probability = [0.1, 0.9, 0.5][example.0 as usize % 3];
                f64::from(u8::from(self.chance(probability)))
            }
            Rewards::Ones => 1.0,
        }
    }

    fn report(&mut self, id: WorkerId, rollout: RolloutId, running: &Running) {
        if self.chance(self.scenario.faults.rollout_hangs) {
            return;
        }
        let trace = |session: &str, trainable: bool, reward: f64| Trace {
            session: session.to_owned(),
            trainable,
            ok: true,
            reward,
            metrics: BTreeMap::from([("length".to_owned(), 3.0)]),
            ..Trace::default()
        };
        let mut traces = vec![trace("player", true, self.reward(running.example))];
        if running.two_seats {
            traces.insert(0, trace("judge", false, 0.0));
        }
        let mut outcome = Outcome {
            ok: true,
            traces,
            error: None,
        };
        if self.chance(self.scenario.faults.rollout_truncated) {
            outcome
                .traces
                .iter_mut()
                .for_each(|trace| trace.truncated = true);
        }
        if self.chance(self.scenario.faults.rollout_fails) {
            outcome = failure("environment", "it broke");
        } else if self.chance(self.scenario.faults.rollout_empty) {
            outcome
                .traces
                .iter_mut()
                .for_each(|trace| trace.session = "nobody".to_owned());
            outcome.traces.push(trace("nobody else", true, 1.0));
        }
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.running.remove(&rollout);
        }
        self.plan(Duration(1_000), Action::AskForLease(id));
        self.tell(id, rollout, outcome);
    }

    fn tell(&mut self, id: WorkerId, rollout: RolloutId, outcome: Outcome) {
        let repeated = outcome.clone();
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.reporting.insert(rollout, outcome.clone());
        }
        match self.disk.is_instant() {
            true => self.send_result(id, rollout, outcome),
            false => self.tell_result(id, rollout),
        }
        if self.chance(0.05) || self.message_fault(self.scenario.faults.message_repeated) {
            self.send_result(id, rollout, repeated);
        }
    }
}

fn failure(kind: &str, message: &str) -> Outcome {
    Outcome {
        error: Some(RolloutError {
            kind: kind.to_owned(),
            message: message.to_owned(),
        }),
        ..Outcome::default()
    }
}
