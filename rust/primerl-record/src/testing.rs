//! A simulated run on disk, for tests of code that reads one.

use crate::batch::encode;
use crate::journal::{Journal, write_snapshot};
use crate::spool::Spool;
use primerl_core::config::{Buffer, RunConfig};
use primerl_core::testing::simulator::batching::EngineModel;
use primerl_core::testing::simulator::{Faults, Rewards, Scenario, Simulator};
use primerl_core::testing::{config, environment, evaluation};
use primerl_core::{Config, Core, Event, Time};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A run with everything that can go wrong.
pub fn scenario(seed: u64) -> Scenario {
    let filtering = Buffer {
        online_difficulty_filtering: seed.is_multiple_of(2),
        easy_fraction: 0.2,
        hard_fraction: 0.2,
        ..config().buffer
    };
    Scenario {
        seed,
        config: Config {
            run: RunConfig {
                seed,
                max_steps: 7, // The trainer saves after each second one.
                batch_size: 8,
                group_size: 4,
                seq_len: 1000,
                data_ranks: 2,
                oversampling_factor: 2.0,
                min_group_size: (!seed.is_multiple_of(3)).then_some(3),
                ..config().run
            },
            buffer: filtering,
            environments: vec![environment("train"), evaluation("evaluation", Some(2))],
            ..config()
        },
        engines: 2,
        workers_per_environment: 2,
        rollouts_per_worker: 4,
        examples: 20,
        whole_groups: false,
        rewards: Rewards::Verdicts,
        engine_model: EngineModel::Timed { capacity: Some(6) },
        longest_answer: 8,
        faults: Faults {
            rollout_fails: 0.1,
            rollout_empty: 0.03,
            rollout_hangs: 0.01,
            rollout_slow: 0.1,
            worker_dies: 0.01,
            engine_fails: 0.05,
            engine_dies: 0.01,
            trainer_forgets: 0.1,
            trainer_dies: 0.05,
            orchestrator_dies: 0.3,
            ..Faults::default()
        },
        kill: None,
        give_up: Time(24 * 3600 * 1_000_000),
    }
}

/// A simulated run on disk.
pub struct Run {
    folder: tempfile::TempDir,
    pub simulator: Simulator,
    pub events: Vec<(Time, Event)>,
}

impl Run {
    pub fn new(seed: u64) -> Run {
        Run::of(scenario(seed))
    }

    pub fn of(scenario: Scenario) -> Run {
        let mut simulator = Simulator::new(scenario.clone());
        simulator.recorded = Some(Vec::new());
        simulator.run().expect("the run comes to its end");
        let run = Run {
            folder: tempfile::tempdir().expect("a temporary folder"),
            events: simulator.recorded.take().expect("was recorded"),
            simulator,
        };
        run.write_journal(&run.events, 0, Core::new(scenario.config).expect("valid"));
        let spool = Spool::new(run.path(), 2);
        let kept_from = run.simulator.core.batches_kept_from();
        for (step, batch) in run.simulator.observer.batches.range(kept_from..) {
            let bodies = [0, 1].map(|rank| encode(batch, rank).expect("encodes"));
            spool.write(*step, &bodies).expect("writes");
        }
        run
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Drops all but the last `keeps` events; returns the core before them, and how many were dropped.
    pub fn prune(&self, keeps: usize) -> (u64, Core) {
        let before = self.events.len() - keeps;
        let config = self.simulator.core.config().clone();
        let mut core = Core::new(config).expect("valid");
        for (now, event) in &self.events[..before] {
            core.handle(event.clone(), *now);
        }
        self.write_journal(&self.events[before..], before as u64, core.clone());
        (before as u64, core)
    }

    pub fn journal(&self) -> PathBuf {
        self.path().join("journal")
    }

    /// One segment with these events, after a snapshot of the core before them.
    pub fn write_journal(&self, events: &[(Time, Event)], before: u64, core: Core) {
        let folder = self.journal();
        let _ = fs::remove_dir_all(&folder);
        let mut journal = Journal::create(&folder).expect("creates");
        for (now, event) in events {
            journal.append(*now, event).expect("appends");
        }
        drop(journal);
        let segment = |number: u64| folder.join(format!("{number:012}.log"));
        if before > 0 {
            fs::rename(segment(0), segment(before)).expect("renames");
        }
        write_snapshot(&folder, before, &BTreeMap::new(), &core).expect("writes");
    }
}
