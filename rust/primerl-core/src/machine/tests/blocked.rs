//! Workers that their environment's code blocks, and those that end with what they run.

use super::*;
use crate::event::Block;

/// Two workers of one environment, a batch of whose rollouts may be in flight.
fn two_workers() -> Run {
    let mut run = Run::started(config());
    run.join(1, 0);
    run
}

fn block(run: &mut Run, worker: u64, seconds: f64, by: Option<RolloutId>) -> Vec<Effect> {
    let block = Block {
        lasted: Duration::from_secs_f64(seconds),
        at: Some("task/rewards.py:28".to_owned()),
        rollout: by,
    };
    run.send(Event::WorkerBlocked {
        worker: WorkerId(worker),
        block: Some(block),
    })
}

fn unblock(run: &mut Run, worker: u64) -> Vec<Effect> {
    run.send(Event::WorkerBlocked {
        worker: WorkerId(worker),
        block: None,
    })
}

/// Time passes, and both workers' clients live.
fn live(run: &mut Run, seconds: f64) -> Vec<Effect> {
    let mut effects = Vec::new();
    let mut left = seconds;
    while left > 0.0 {
        for worker in [0, 1] {
            if run.core.workers.registered.contains_key(&WorkerId(worker)) {
                let worker = WorkerId(worker);
                effects.extend(run.send(Event::WorkerSeen { worker }));
            }
        }
        effects.extend(run.pass(left.min(5.0)));
        left -= 5.0;
    }
    effects
}

#[test]
fn a_blocked_worker_is_named_and_gets_nothing_until_it_runs_again() {
    let mut run = two_workers();
    let held: Vec<RolloutId> = run.lease(0, 4).iter().map(|one| one.rollout).collect();
    let first = held[0];
    // It waits for more.
    assert_eq!(leased(&run.ask(0, 4)), []);
    assert_eq!(
        block(&mut run, 0, 9.0, None).len(),
        0,
        "so long may a reward take"
    );
    let effects = block(&mut run, 0, 12.0, Some(first));
    assert_said(
        &effects,
        "worker worker of environment \"train\" is blocked by its environment for 12 s (task/rewards.py:28)",
    );
    assert_eq!(block(&mut run, 0, 13.0, None).len(), 0, "that is known");
    assert_said(
        &block(&mut run, 0, 24.0, None),
        "for 24 s (task/rewards.py:28)",
    );
    let wait = run.core.status().waits;
    let wait = wait.iter().find(|wait| wait.who == "worker worker");
    let wait = wait.expect("it is listed");
    assert_eq!(
        wait.waiting_for,
        "its environment's code, which blocks it (task/rewards.py:28)"
    );
    assert!(!wait.is_usual);
    assert_eq!(
        wait.deadline,
        Time(0) + Duration::from_secs(120),
        "of its lease"
    );

    // Another worker gets what there is; what it asked for before is not handed out to it.
    assert_eq!(leased(&run.fail(0, held[3])), []);
    assert_eq!(leased(&run.ask(1, 2)).len(), 1);
    assert_eq!(leased(&run.fail(0, held[2])), []);
    assert_said(
        &live(&mut run, 10.0),
        "the worker is blocked by its environment",
    );
    let asked = leased(&run.ask(0, 4));
    assert_eq!(asked, [], "nor what it asks for now");
    let effects = unblock(&mut run, 0);
    assert_said(&effects, "runs again");
    assert_eq!(leased(&effects).len(), 1, "what was left of the batch");
    assert!(unblock(&mut run, 0).is_empty(), "that is known");
}

#[test]
fn a_blocked_worker_is_given_up_with_its_first_lease_and_only_who_blocks_it_has_failed() {
    let mut run = two_workers();
    let held: Vec<RolloutId> = run.lease(0, 4).iter().map(|one| one.rollout).collect();
    live(&mut run, 60.0);
    block(&mut run, 0, 50.0, Some(held[2]));
    let effects = live(&mut run, 65.0);
    let lost = effects.iter().find_map(|effect| match effect {
        Effect::WorkerLost {
            worker,
            is_blocked: true,
            reason,
        } => Some((*worker, reason.clone())),
        _ => None,
    });
    let (worker, reason) = lost.expect("it is given up");
    assert_eq!(worker, WorkerId(0));
    assert!(
        reason.contains("was blocked by its environment for 110 s (task/rewards.py:28), until the time of a rollout"),
        "{reason}"
    );
    let failed: Vec<(RolloutId, String)> = effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::RolloutFailed { rollout, error } => Some((*rollout, error.kind.clone())),
            _ => None,
        })
        .collect();
    assert_eq!(failed, [(held[2], "environment".to_owned())]);
    let lost = [held[0], held[1], held[3]].map(|id| (id, CancelReason::WorkerLost));
    let mut others = cancelled(&effects);
    others.retain(|(_, reason)| *reason == CancelReason::WorkerLost);
    assert_eq!(others, lost);
    assert_eq!(run.lease(1, 4).len(), 4, "all are handed out again");
    let first = &run.core.status().environments[0].first_errors[&crate::ErrorKind::Environment];
    assert_eq!(first.rollout, held[2]);
    assert!(
        first.message.contains("task/rewards.py:28"),
        "{}",
        first.message
    );
}

#[test]
fn where_nobody_knows_who_blocks_a_worker_nobody_has_failed() {
    let mut run = two_workers();
    run.lease(0, 4);
    live(&mut run, 60.0);
    block(&mut run, 0, 50.0, None);
    live(&mut run, 65.0);
    let status = run.core.status();
    assert_eq!((status.failures.len(), status.workers.len()), (0, 1));
    assert_eq!(run.core.counters().cancelled, 4);
}

#[test]
fn another_block_is_named_anew() {
    let mut run = two_workers();
    run.lease(0, 1);
    block(&mut run, 0, 40.0, None);
    live(&mut run, 60.0);
    // The word that it ran again was lost on its way.
    assert_said(&block(&mut run, 0, 11.0, None), "for 11 s");
}

#[test]
fn what_a_worker_ran_is_named_when_it_is_gone() {
    let mut run = two_workers();
    let held = run.lease(0, 4);
    let effects = run.send(Event::WorkerLeft {
        worker: WorkerId(0),
        reason: Some("exited with code 3".to_owned()),
    });
    let why = effects.iter().find_map(|effect| match effect {
        Effect::WorkerGone { why, .. } => Some(why.clone()),
        _ => None,
    });
    let named: Vec<String> = held
        .iter()
        .map(|one| format!("rollout {} (example {})", one.rollout, one.example))
        .collect();
    assert_eq!(
        why.expect("has a reason"),
        format!(
            "worker worker of environment \"train\" exited with code 3; its 4 rollouts are handed out again: {}",
            named.join(", ")
        )
    );
    run.join(2, 0);
    let effects = run.send(Event::WorkerLeft {
        worker: WorkerId(2),
        reason: None,
    });
    assert!(effects.is_empty(), "it had nothing: {effects:?}");
}

#[test]
fn an_environment_has_a_time_limit_of_its_own() {
    let mut run = Run::started(Config {
        environments: vec![environment("quick"), environment("slow")],
        timeouts: crate::config::Timeouts {
            rollout_of: vec![Some(Duration::from_secs(20)), None],
            ..config().timeouts
        },
        ..config()
    });
    let (quick, slow) = (run.lease(0, 1)[0].clone(), run.lease(1, 1)[0].clone());
    assert_eq!(
        (quick.deadline, slow.deadline),
        (Duration::from_secs(20), Duration::from_secs(120))
    );
    let effects = live(&mut run, 25.0);
    assert_eq!(
        cancelled(&effects),
        [(quick.rollout, CancelReason::Timeout)]
    );
    assert_eq!(run.core.status().failures["timeout"], 1);
}

#[test]
fn who_holds_the_places_is_said() {
    let mut run = Run::started(Config {
        environments: vec![environment("a"), environment("b")],
        ..config()
    });
    run.lease(0, 2);
    live(&mut run, 30.0);
    run.lease(1, 2);
    run.ask(0, 1);
    assert_said(
        &live(&mut run, 10.0),
        "4 rollouts are in flight, the most allowed by oversampling_factor * batch_size: 2 of \"a\", the oldest since 40 \
         s, 2 of \"b\", the oldest since 10 s",
    );
}
