//! Random actions: nothing leaks, and every sequence is answered once.

use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

#[derive(Clone, Debug)]
enum Action {
    Submit {
        prompt: usize,
        max_tokens: u32,
        priority: i32,
    },
    Abort(usize),
    AbortAll,
    Step {
        token: u32,
    },
    Pause,
    Drain,
    Resume,
    ClearCache,
    Load,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        6 => (1usize..20, 1u32..12, -1i32..2).prop_map(|(prompt, max_tokens, priority)| Action::Submit { prompt, max_tokens, priority }),
        1 => (0usize..40).prop_map(Action::Abort),
        1 => Just(Action::AbortAll),
        20 => prop_oneof![9 => Just(5u32), 1 => Just(EOS)].prop_map(|token| Action::Step { token }),
        1 => Just(Action::Pause),
        1 => Just(Action::Drain),
        3 => Just(Action::Resume),
        1 => Just(Action::ClearCache),
        1 => Just(Action::Load),
    ]
}

fn check_batch(batch: &Batch, limits: Limits, running: usize) -> Result<(), TestCaseError> {
    prop_assert!(batch.token_ids.len() <= limits.max_num_batched_tokens as usize);
    prop_assert_eq!(batch.token_ids.len(), batch.positions.len());
    let slots: HashSet<u32> = batch.sequences.iter().map(|s| s.slot).collect();
    prop_assert_eq!(slots.len(), batch.sequences.len(), "a slot is used once");
    prop_assert!(slots.iter().all(|&slot| slot < limits.max_num_seqs));
    prop_assert!(batch.sequences.len() <= running);
    let queries: u32 = batch.sequences.iter().map(|s| s.query_len).sum();
    prop_assert_eq!(queries as usize, batch.token_ids.len());
    let mut row = 0;
    for sequence in &batch.sequences {
        let end = row + sequence.query_len as usize;
        let expected: Vec<i32> = ((sequence.context_len - sequence.query_len) as i32
            ..sequence.context_len as i32)
            .collect();
        prop_assert_eq!(&batch.positions[row..end], &expected[..]);
        row = end;
    }
    Ok(())
}

/// Carries out one action; returns the sequences that ended.
fn act(
    scheduler: &mut Scheduler,
    action: &Action,
    next_key: &mut u64,
) -> Result<Vec<Completion>, TestCaseError> {
    match action {
        Action::Submit {
            prompt,
            max_tokens,
            priority,
        } => {
            scheduler.submit(Submission {
                priority: *priority,
                ..submission(*next_key, *prompt, *max_tokens)
            });
            *next_key += 1;
        }
        Action::Abort(key) => {
            return Ok(scheduler
                .abort(RequestKey(*key as u64))
                .into_iter()
                .collect());
        }
        Action::AbortAll => return Ok(scheduler.abort_all()),
        Action::Step { token } => {
            let (steady, running) = (scheduler.steady_steps(), scheduler.num_running());
            if let Some(batch) = scheduler.plan() {
                let plain = batch.sequences.iter().all(|part| part.query_len == 1);
                let same = batch.sequences.len() == running && scheduler.num_running() == running;
                prop_assert!(
                    steady == 0 || (plain && same),
                    "a steady step is one token for each"
                );
                prop_assert!(scheduler.kv_tokens_held() <= scheduler.limits.kv_cache_tokens);
                check_batch(&batch, scheduler.limits, scheduler.num_running())?;
                let output = answer(&batch, *token);
                let ended = finished(scheduler.apply(batch, output));
                let shorter = !ended.is_empty() || scheduler.steady_steps() + 1 >= steady;
                prop_assert!(shorter, "steady steps are foretold");
                return Ok(ended);
            }
        }
        Action::Pause => scheduler.pause(),
        Action::Drain => scheduler.drain(),
        Action::Resume => scheduler.resume(),
        Action::ClearCache => scheduler.clear_cache(),
        Action::Load => scheduler.weights_changed(),
    }
    Ok(vec![])
}

proptest! {
    #[test]
    fn nothing_leaks_and_everything_is_answered_once(
        actions in prop::collection::vec(action(), 1..200),
        slots in 1u32..6,
        capacity in 32u64..80,
        budget in 6u32..24,
    ) {
        let mut scheduler = scheduler(slots, capacity, budget);
        let (mut next_key, mut answered) = (0u64, HashSet::new());
        let mut record = |completions: Vec<Completion>| {
            for completion in completions {
                let total: u32 = completion.versions.iter().map(|s| s.end - s.start).sum();
                prop_assert_eq!(total as usize, completion.tokens.len(), "version spans add up");
                prop_assert!(answered.insert(completion.key), "answered once");
            }
            Ok(())
        };
        for action in &actions {
            record(act(&mut scheduler, action, &mut next_key)?)?;
            let in_use = scheduler.limits.max_num_seqs as usize - scheduler.free_slots.len();
            prop_assert_eq!(in_use, scheduler.num_running(), "a slot for each running one");
            let running = scheduler.decoding.values().chain(scheduler.prefilling.values());
            let held: u64 = running.map(|(key, _)| scheduler.sequences[key].kv_needed()).sum();
            let behind = |(key, _): &(RequestKey, u32)| scheduler.sequences[key].remaining();
            prop_assert!(scheduler.decoding.values().all(|running| behind(running) == 1));
            prop_assert_eq!(held, scheduler.kv_tokens_held());
        }
        scheduler.resume();
        record(run_out(&mut scheduler))?;
        prop_assert_eq!(answered.len() as u64, next_key, "everything is answered");
        prop_assert_eq!(scheduler.free_slots.len() as u32, slots);
        prop_assert_eq!(scheduler.kv_tokens_held(), 0);
        prop_assert!(scheduler.sequences.is_empty());
    }
}
