//! A disk that takes its time, and deaths in the midst of it.

use super::scenarios::*;
use super::*;

fn disk() -> DiskFaults {
    DiskFaults {
        slow: 0.3,
        power_fails: 0.5,
        ..DiskFaults::default()
    }
}

fn add(sum: &mut Restarts, one: Restarts) {
    sum.kills += one.kills;
    sum.power_losses += one.power_losses;
    sum.disk_failures += one.disk_failures;
    sum.lost_events += one.lost_events;
    sum.lost_batches += one.lost_batches;
    sum.damaged_snapshots += one.damaged_snapshots;
    sum.lost_workers += one.lost_workers;
    sum.lost_leases += one.lost_leases;
    sum.lost_turns += one.lost_turns;
    sum.repeated_reports += one.repeated_reports;
}

#[test]
fn what_was_told_outlives_the_death_of_the_orchestrator() {
    let mut sum = Restarts::default();
    for seed in 7000..7100 {
        let faults = Faults {
            orchestrator_dies: 0.9,
            disk: Some(disk()),
            ..Faults::default()
        };
        let simulator = play_with(faults, seed);
        let failures = simulator.core.status().failures;
        assert_eq!(failures.get("advantages"), None, "they are asked for again");
        add(&mut sum, simulator.restarts);
    }
    // They die at moments that are hard enough.
    assert!(sum.kills > 200 && sum.power_losses > 200, "{sum:?}");
    assert!(sum.lost_events > 2000 && sum.lost_batches > 5, "{sum:?}");
    assert!(sum.lost_workers > 20 && sum.lost_leases > 50, "{sum:?}");
    assert!(sum.lost_turns > 20 && sum.repeated_reports > 100, "{sum:?}");
}

#[test]
fn what_was_told_outlives_every_other_fault_as_well() {
    let mut sum = Restarts::default();
    for seed in 8000..8100 {
        let simulator = play_with(every_fault(), seed);
        add(&mut sum, simulator.restarts);
    }
    let (failed, damaged) = (sum.disk_failures, sum.damaged_snapshots);
    assert!(failed > 50 && damaged > 100, "{sum:?}");
}

#[test]
fn without_a_disk_its_generator_is_not_touched() {
    let mut kills = 0;
    for seed in 2001..2004 {
        let simulator = play_with(
            Faults {
                orchestrator_dies: 0.9,
                ..faults()
            },
            seed,
        );
        kills += simulator.restarts.kills;
        assert_eq!(
            simulator.disk.rng,
            ChaCha8Rng::seed_from_u64(seed ^ 0x6469_736b)
        );
    }
    assert!(kills > 0);
}
