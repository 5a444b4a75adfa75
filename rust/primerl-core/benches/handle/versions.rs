//! A new policy version with 10,000 rollouts in flight, of which none, a tenth or all become stale.
//!
//! Groups of 8, one group a batch, so that what is cut costs next to nothing. The rollouts that are to become stale have
//! sampled with the version that is just too old once the next step is cut; the others with the newest. Timed is all that
//! makes a new version: the report that cuts the step before it, the publication, the engine's proof. Of nine runs the
//! shortest counts: what another process on the machine took is not the core's.

use crate::{WORKER, joined, unlimited};
use primerl_core::config::RunConfig;
use primerl_core::testing::{config, environment, outcome, turn};
use primerl_core::*;
use std::time::Instant;

const IN_FLIGHT: u32 = 10_000;
const GROUP: u32 = 8;
const LEVEL: u64 = IN_FLIGHT as u64 / GROUP as u64 + 2;
const ENGINE: EngineId = EngineId(0);

struct Versions {
    core: Core,
    now: Time,
    request: u64,
}

impl Versions {
    fn new() -> Versions {
        let config = Config {
            run: RunConfig {
                max_steps: u64::MAX / 2,
                batch_size: GROUP,
                group_size: GROUP,
                max_async_level: LEVEL,
                max_off_policy_steps: LEVEL,
                oversampling_factor: f64::from(IN_FLIGHT / GROUP + 2),
                admission: unlimited(),
                ..config().run
            },
            environments: vec![environment("train")],
            ..config()
        };
        let mut versions = Versions {
            core: Core::new(config).expect("a valid config"),
            now: Time(0),
            request: 0,
        };
        for event in joined(100_000) {
            versions.send(event);
        }
        versions.new_version(0);
        versions
    }

    fn send(&mut self, event: Event) -> Vec<Effect> {
        self.now = self.now + Duration(1);
        self.core.handle(event, self.now)
    }

    fn new_version(&mut self, version: u64) {
        let version = PolicyVersion(version);
        self.send(Event::WeightsPublished {
            version,
            manifest: String::new(),
            digest: String::new(),
        });
        self.send(Event::EngineProved {
            engine: ENGINE,
            version,
        });
    }

    fn fetch(&mut self, step: u64) {
        self.request += 1;
        self.send(Event::BatchRequested {
            request: RequestId(self.request),
            step: Step(step),
            rank: 0,
        });
    }

    fn lease(&mut self, max: u32) -> Vec<RolloutId> {
        self.request += 1;
        let effects = self.send(Event::LeaseRequested {
            request: RequestId(self.request),
            worker: WORKER,
            max,
        });
        let leases = effects.into_iter().filter_map(|effect| match effect {
            Effect::Lease { rollouts, .. } => Some(rollouts),
            _ => None,
        });
        leases.flatten().map(|leased| leased.rollout).collect()
    }

    fn sample(&mut self, rollout: RolloutId, version: u64) {
        let turn = turn(None, &[1; 4], &[2; 4], version);
        self.send(Event::TurnFinished { rollout, turn });
    }

    /// A group ends well, which cuts `step`. Returns the seconds that the last report takes.
    fn cut(&mut self, step: u64) -> f64 {
        let group = self.lease(GROUP);
        assert_eq!(group.len(), GROUP as usize);
        let mut seconds = 0.0;
        for rollout in group {
            self.sample(rollout, step - 1);
            let report = Event::RolloutFinished {
                rollout,
                worker: WORKER,
                outcome: outcome(0.5),
            };
            let started = Instant::now();
            let effects = self.send(report);
            seconds = started.elapsed().as_secs_f64();
            drop(effects);
        }
        seconds
    }
}

/// Milliseconds of the cut, and of the publication and the proof; and how many became stale.
fn new_version(stale: usize) -> (f64, f64, u64) {
    let mut versions = Versions::new();
    let in_flight = versions.lease(IN_FLIGHT);
    assert_eq!(in_flight.len(), IN_FLIGHT as usize);
    for rollout in &in_flight[..stale] {
        versions.sample(*rollout, 0);
    }
    // Version 0 may be trained up to step LEVEL + 1.
    for step in 1..=LEVEL {
        versions.cut(step);
        versions.fetch(step);
        versions.new_version(step);
    }
    for rollout in &in_flight[stale..] {
        versions.sample(*rollout, LEVEL);
    }
    assert_eq!(versions.core.counters().stale, 0);
    let cut = versions.cut(LEVEL + 1);
    versions.fetch(LEVEL + 1);
    let started = Instant::now();
    versions.new_version(LEVEL + 1);
    let version = started.elapsed().as_secs_f64();
    (cut * 1e3, version * 1e3, versions.core.counters().stale)
}

pub fn measure() {
    println!("handle: a new policy version, {IN_FLIGHT} rollouts in flight (least of 9 runs, ms)");
    println!(
        "{:>8} {:>12} {:>22} {:>8}",
        "stale", "cut", "published and proved", "sum"
    );
    for stale in [0, IN_FLIGHT as usize / 10, IN_FLIGHT as usize] {
        let mut runs: Vec<(f64, f64, u64)> = (0..9).map(|_| new_version(stale)).collect();
        assert!(runs.iter().all(|run| run.2 == stale as u64));
        runs.sort_by(|a, b| (a.0 + a.1).total_cmp(&(b.0 + b.1)));
        let (cut, version, _) = runs[0];
        println!(
            "{stale:>8} {cut:>12.3} {version:>22.3} {:>8.3}",
            cut + version
        );
    }
}
