use super::*;
use crate::counters::CancelReason;

fn whole(seed: u64, faults: Faults) -> Simulator {
    play(Scenario {
        whole_groups: true,
        faults,
        ..scenario(seed)
    })
}

#[test]
fn whole_groups_stay_whole_whatever_fails() {
    let (mut restarted, mut incomplete, mut siblings, mut evaluated) = (0, 0, 0, 0);
    for seed in 7000..7080 {
        let simulator = whole(seed, faults());
        let discards = simulator.core.discards();
        restarted += discards.groups_restarted;
        let voided = discards.voided.get(&VoidReason::GroupIncomplete);
        incomplete += voided.copied().unwrap_or(0);
        let cancelled = discards.cancelled.get(&CancelReason::GroupRestarted);
        siblings += cancelled.copied().unwrap_or(0);
        evaluated += simulator.core.counters().evaluated;
    }
    assert!(
        restarted > 100 && incomplete > 50 && siblings > 100 && evaluated > 100,
        "{restarted} {incomplete} {siblings} {evaluated}"
    );
}

#[test]
fn whole_groups_stay_whole_over_restarts_and_lost_messages() {
    for seed in 7100..7130 {
        whole(seed, every_fault());
    }
}
