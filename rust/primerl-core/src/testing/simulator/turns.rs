//! The turns of a simulated rollout, and its report.

use super::actors::{Action, Asked, Engine, Running, RunningTurn};
use super::batching::Request;
use super::process::Reply;
use super::{Rewards, Simulator};
use crate::event::{Event, Outcome, Trace};
use crate::failure::RolloutError;
use crate::ids::*;
use crate::testing::observer::SampledToken;
use crate::testing::turn;
use crate::time::Duration;
use crate::turn::{ForkReason, MessageRole, Observed, Turn, VersionRun, VersionRuns};
use rand::Rng;
use std::collections::BTreeMap;
use std::sync::Arc;

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
        let running = running.clone();
        let Some((engine, version)) = self.route() else {
            return self.plan(Duration::from_secs(1), Action::BeginTurn(id, rollout));
        };
        if running.turns.is_empty() {
            self.send(Event::SamplingStarted { rollout, version });
        }
        let (turn, tokens) = self.compose(&running);
        let takes = match running.slow || self.engines[&engine].slow {
            true => self.spread(5.0, 30.0),
            false => self.spread(0.1, 2.0),
        };
        let answer = turn.sampled.len();
        let request = Request {
            rollout,
            prompt: (tokens.len() - answer) as u32,
            answer: answer as u32,
            takes,
        };
        let asked = Asked {
            engine,
            worker: id,
            turn,
            tokens,
        };
        let before = self.asked.insert(rollout, asked);
        assert!(before.is_none(), "{rollout} samples one turn at a time");
        self.submit(engine, request);
    }

    /// As the gateway does: to an engine that serves the newest version any of them does.
    fn route(&mut self) -> Option<(EngineId, PolicyVersion)> {
        let serves = |engine: &Engine| engine.serves.filter(|_| engine.told.is_none());
        let newest = self.engines.values().filter_map(serves).max()?;
        let engines = self.engines.iter();
        let serving = engines.filter(|(_, engine)| serves(engine) == Some(newest));
        let serving: Vec<EngineId> = serving.map(|(id, _)| *id).collect();
        let engine = serving[self.rng.random_range(0..serving.len())];
        Some((engine, newest))
    }

    pub(super) fn end_turn(&mut self, rollout: RolloutId, asked: Asked, versions: VersionRuns) {
        let Asked {
            worker: id,
            mut turn,
            tokens,
            ..
        } = asked;
        if self.is_refused(id, rollout) {
            return;
        }
        let worker = self.workers.get(&id);
        let Some(running) = worker
            .and_then(|worker| worker.running.get(&rollout))
            .cloned()
        else {
            return;
        };
        let prompt = tokens[..tokens.len() - turn.sampled.len()].to_vec();
        turn.logprobs = self
            .note_sampled(rollout, &turn.sampled, &versions, prompt)
            .into();
        turn.versions = versions;
        let worker = self.workers.get_mut(&id);
        let known = worker.and_then(|worker| worker.running.get_mut(&rollout));
        let known = known.expect("it was there a moment ago");
        let recorded = known.turns.iter().filter(|turn| turn.index.is_some());
        known.turns.push(RunningTurn {
            index: Some(recorded.count() as u32),
            seat: usize::from(&*turn.session == "judge"),
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

    /// The gateway answers for open rollouts only. A worker that runs another one ends it, and reports that.
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

    /// What is asked and will be answered: mostly an extension of the seat's last turn, sometimes of an earlier one or of
    /// none.
    fn compose(&mut self, running: &Running) -> (Turn, Vec<u32>) {
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
        // What the orchestrator has lost is sent again.
        let (parent, suffix) = match parent.map(|index| running.turns[index].index) {
            None => (None, suffix),
            Some(None) => (None, prompt.clone()),
            Some(Some(index)) => (Some(TurnIndex(index)), suffix),
        };
        let (n, first) = (self.answer_length(), self.next_token);
        self.next_token += n;
        let sampled: Vec<u32> = (first..first + n).collect();
        prompt.extend_from_slice(&sampled);
        let session = if seat == 1 { "judge" } else { "player" };
        let turn = Turn {
            session: session.into(),
            parent,
            fork: parent.is_none().then_some(ForkReason::FirstTurn),
            observed: said(parent, suffix.len()),
            prompt_suffix: suffix.into(),
            logprobs: Arc::default(),
            versions: VersionRuns::new(),
            ..turn(None, &[], &sampled, 0)
        };
        (turn, prompt)
    }

    /// Tokens. Where the scenario has long answers, every other one is: half as many are twice as long.
    fn answer_length(&mut self) -> u32 {
        let short = self.rng.random_range(1..8_u32);
        let longest = self.scenario.longest_answer;
        if longest <= 8 || self.chance(0.5) {
            return short;
        }
        let longer = 8.0 / self.rng.random_range(8.0 / f64::from(longest)..1.0);
        longer as u32
    }

    /// Tells the observer what the engine knows of the tokens. Returns their log-probabilities.
    fn note_sampled(
        &mut self,
        rollout: RolloutId,
        tokens: &[u32],
        versions: &[VersionRun],
        prompt: Vec<u32>,
    ) -> Vec<f32> {
        let (mut logprobs, mut prompt) = (Vec::new(), Some(prompt));
        let by_token = versions
            .iter()
            .flat_map(|run| std::iter::repeat_n(run.version, run.n_tokens as usize));
        for (token, version) in tokens.iter().zip(by_token) {
            let logprob = -self.rng.random_range(0.0..3.0_f32);
            logprobs.push(logprob);
            let sampled = SampledToken {
                rollout,
                version,
                logprob,
                prompt: prompt.take(),
            };
            self.observer.sampled.insert(*token, sampled);
        }
        assert_eq!(logprobs.len(), tokens.len(), "a version for each token");
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
            refusal: None,
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
                .for_each(|trace| trace.session = "unknown".to_owned());
            outcome.traces.push(trace("another unknown", true, 1.0));
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
            ..RolloutError::default()
        }),
        ..Outcome::default()
    }
}

/// All but the first token of what follows an answer is what a tool said.
fn said(parent: Option<TurnIndex>, tokens: usize) -> Vec<Observed> {
    let observed = Observed {
        role: MessageRole::Tool,
        begin: 1,
        end: tokens as u32,
    };
    Vec::from_iter((parent.is_some() && tokens > 1).then_some(observed))
}
