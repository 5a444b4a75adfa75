//! Lost, repeated and late messages, and slow engines: the run ends all the same, and no rule is broken.

use super::scenarios::*;
use super::*;

fn message_faults() -> Faults {
    Faults {
        lease_lost: 0.05,
        message_repeated: 0.2,
        report_late: 0.5,
        engine_slow: 0.3,
        ..Faults::default()
    }
}

#[test]
fn bad_messages_alone_change_nothing_that_counts() {
    let (mut lost, mut late) = (0, 0);
    for seed in 5000..5100 {
        // A slow engine that is crowded too would let every rollout time out, which rightly ends a run.
        let simulator = play(Scenario {
            faults: message_faults(),
            engine_model: EngineModel::Timed { capacity: None },
            ..scenario(seed)
        });
        let failures = simulator.core.status().failures;
        lost += failures.get("lease_lost").copied().unwrap_or(0);
        late += simulator.late_reports;
    }
    assert!(lost > 50 && late > 5, "{lost} {late}");
}

#[test]
fn bad_messages_and_every_other_fault_together() {
    for seed in 6000..6120 {
        let faults = Faults {
            lease_lost: 0.03,
            message_repeated: 0.2,
            report_late: 0.5,
            engine_slow: 0.2,
            ..faults()
        };
        play(Scenario {
            faults,
            engine_model: EngineModel::Timed { capacity: None },
            ..scenario(seed)
        });
    }
}

#[test]
fn slow_engines_take_longer_for_the_same_work() {
    let time = |engine_slow| {
        let faults = Faults {
            engine_slow,
            ..Faults::default()
        };
        let simulator = play_with(faults, 42);
        simulator.now
    };
    assert!(time(1.0) > time(0.0));
}

#[test]
fn without_faults_of_messages_a_seed_gives_the_run_it_always_gave() {
    let run = |seed| {
        let simulator = play(scenario(seed));
        (simulator.events, simulator.now, simulator.message_rng)
    };
    let (_, _, untouched) = run(3);
    assert_eq!(untouched, ChaCha8Rng::seed_from_u64(3 ^ 0x6d65_7373));
}
