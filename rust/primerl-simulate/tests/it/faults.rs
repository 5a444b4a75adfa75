//! The real engine scheduler among all the faults of the core's simulator: batches that are shared, prompts computed in
//! chunks, preemptions, aborts and pauses in mid-answer, and answers with a long tail. The rules are the observer's.

use primerl_core::config::{Admission, LimitRule};
use primerl_core::event::EngineLoad;
use primerl_core::testing::simulator::batching::{Batching, EngineModel, Request, Sampled};
use primerl_core::testing::simulator::scenarios::{every_fault, faults, play, scenario};
use primerl_core::testing::simulator::{Faults, Scenario, Simulator};
use primerl_core::{PolicyVersion, RolloutId, Time};
use primerl_engine_server::request::RequestKey;
use primerl_simulate::{Doing, Engine, Inference};
use std::cell::Cell;

/// Of a prompt and its answer, tokens; the KV cache holds at least one of them.
const LONGEST: u32 = 450;

thread_local! {
    /// Requests that lost their KV cache, in all engines of a test: each has a thread of its own.
    static PREEMPTIONS: Cell<u64> = const { Cell::new(0) };
}

#[derive(Debug)]
struct Scheduled {
    engine: Engine,
    preemptions_reported: u64,
}

/// Small engines, so that they are full.
fn engine(seed: u64, slow: bool) -> Box<dyn Batching> {
    let slower = if slow { 5.0 } else { 1.0 };
    Box::new(Scheduled {
        engine: Engine::new(&Inference {
            engines: 1,
            max_num_seqs: [2, 8, 64][seed as usize % 3],
            kv_cache_tokens: u64::from(LONGEST),
            max_num_batched_tokens: [16, 256][seed as usize % 2],
            step_s: 0.02 * slower,
            step_per_sequence_s: 0.000_1,
            step_per_prefill_token_s: 0.000_1,
            update_s: 0.0,
            prefix_cache_hit: 0.0,
        }),
        preemptions_reported: 0,
    })
}

impl Batching for Scheduled {
    fn submit(&mut self, request: Request, now: Time) {
        let (prompt, answer) = (u64::from(request.prompt), u64::from(request.answer));
        let key = RequestKey(request.rollout.0);
        self.engine.submit(key, prompt, answer, 0, now);
        self.engine.begin(now);
    }

    fn abort(&mut self, rollout: RolloutId, now: Time) {
        self.engine.abort(RequestKey(rollout.0), now);
        self.engine.begin(now);
    }

    fn pause(&mut self, now: Time) {
        self.engine.pause(now);
    }

    fn stands_still(&self) -> bool {
        self.engine.stride_end().is_none()
    }

    fn load(&mut self, version: PolicyVersion, now: Time) {
        self.engine.load(version);
        self.engine.begin(now);
    }

    fn next(&self) -> Option<Time> {
        self.engine.stride_end()
    }

    fn advance(&mut self, now: Time) -> Vec<Sampled> {
        let ended = self.engine.finish_stride();
        self.engine.begin(now);
        let ended = ended.into_iter().map(|ended| Sampled {
            rollout: RolloutId(ended.key.0),
            versions: ended.versions,
        });
        ended.collect()
    }

    fn report(&mut self) -> Option<EngineLoad> {
        let [(Doing::Sampling, running), (Doing::Queued, waiting), _] =
            self.engine.requests_by_doing()
        else {
            unreachable!("in this order")
        };
        let preemptions = self.engine.preemptions();
        let before = std::mem::replace(&mut self.preemptions_reported, preemptions);
        PREEMPTIONS.set(PREEMPTIONS.get() + preemptions - before);
        Some(EngineLoad {
            running: running as u32,
            waiting: waiting as u32,
            kv_cache_usage: self.engine.kv_cache_usage(),
            preemptions: (preemptions - before) as u32,
        })
    }
}

fn scheduled(seed: u64, faults: Faults) -> Scenario {
    let mut scenario = Scenario {
        engine_model: EngineModel::Made(engine),
        longest_answer: 100,
        faults,
        ..scenario(seed)
    };
    scenario.config.run.seq_len = [64, 200, LONGEST][seed as usize / 2 % 3];
    // Half of them have one engine, and more for it than it has room for.
    if seed % 4 < 2 {
        (scenario.engines, scenario.workers_per_environment) = (1, 3);
        scenario.rollouts_per_worker = 20;
        scenario.config.run.batch_size *= 2;
        scenario.config.run.admission = Admission {
            limit: LimitRule::Fixed,
            start_per_engine: 60,
            max_per_engine: 60,
            ..scenario.config.run.admission
        };
    }
    scenario
}

/// What the engines did, from what the observer knows of their tokens.
#[derive(Debug, Default)]
struct Sums {
    /// Turns of which a later version sampled the end.
    over_an_update: usize,
    longest_turn: u32,
}

impl Sums {
    fn add(&mut self, simulator: &Simulator) {
        let mut turn: Option<(PolicyVersion, u32, bool)> = None;
        for token in simulator.observer.sampled.values() {
            let (first, length, crossed) = match (turn, &token.prompt) {
                (Some(turn), None) => turn,
                _ => (token.version, 0, false),
            };
            let crosses = token.version != first;
            self.over_an_update += usize::from(crosses && !crossed);
            self.longest_turn = self.longest_turn.max(length + 1);
            turn = Some((first, length + 1, crosses || crossed));
        }
    }

    /// The scenarios are hard enough.
    fn check(&self) {
        let preemptions = PREEMPTIONS.get();
        assert!(preemptions > 5, "{preemptions} preemptions");
        assert!(
            self.over_an_update > 50 && self.longest_turn > 90,
            "{self:?}"
        );
    }
}

#[test]
fn engines_that_batch_keep_every_rule() {
    let mut sums = Sums::default();
    for seed in 9000..9100 {
        let simulator = play(scheduled(seed, Faults::default()));
        assert_eq!(simulator.core.counters().failed, 0, "seed {seed}");
        sums.add(&simulator);
    }
    sums.check();
}

#[test]
fn engines_that_batch_keep_every_rule_whatever_fails() {
    let mut sums = Sums::default();
    for seed in 9100..9250 {
        let faults = if seed % 2 == 0 {
            faults()
        } else {
            every_fault()
        };
        let faults = Faults {
            engine_slow: 0.2,
            ..faults
        };
        sums.add(&play(scheduled(seed, faults)));
    }
    sums.check();
}
