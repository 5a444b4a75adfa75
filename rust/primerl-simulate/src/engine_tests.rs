//! Strides change nothing: an engine that makes one step at a time gives the same answers at the same times.

use super::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Call {
    Submit {
        prompt: u64,
        answer: u64,
        cached: u64,
    },
    Abort(u64),
    Update,
}

fn cost() -> Inference {
    Inference {
        engines: 1,
        max_num_seqs: 4,
        kv_cache_tokens: 60,
        max_num_batched_tokens: 16,
        step_s: 10e-6,
        step_per_sequence_s: 1e-6,
        step_per_prefill_token_s: 2e-6,
        update_s: 25e-6,
        prefix_cache_hit: 0.0,
    }
}

/// When which key ended, and how many tokens of which version it has.
type EndedAt = (Time, u64, Vec<(u64, u32)>);

/// What can be seen from outside: who ended when and with which versions, and the sums.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    ended: Vec<EndedAt>,
    steps: u64,
    prefill_tokens: u64,
    kv_tokens_max: u64,
    preemptions: u64,
}

fn play(calls: &[(u64, Call)], longest_stride: u64) -> (Seen, f64) {
    let mut engine = Engine::new(&cost());
    engine.longest_stride = longest_stride;
    engine.load(PolicyVersion(0));
    let (mut seen, mut version) = (Seen::default(), 0);
    let mut calls = calls.iter().enumerate().peekable();
    let mut updated: Option<Time> = None;
    loop {
        let call_at = calls.peek().map(|(_, (at, _))| Time(*at));
        let times = [call_at, updated, engine.stride_end()];
        let Some(now) = times.into_iter().flatten().min() else {
            break;
        };
        if call_at == Some(now) {
            if let Some((key, (_, call))) = calls.next() {
                match call {
                    Call::Submit {
                        prompt,
                        answer,
                        cached,
                    } => engine.submit(RequestKey(key as u64), *prompt, *answer, *cached, now),
                    Call::Abort(key) => engine.abort(RequestKey(*key), now),
                    Call::Update if engine.phase == Phase::Serving => {
                        version += 1;
                        if engine.pause(now) {
                            updated = Some(now + Duration(25));
                        }
                    }
                    Call::Update => {}
                }
            }
        } else if updated == Some(now) {
            updated = None;
            engine.load(PolicyVersion(version));
        } else {
            for Ended { key, versions } in engine.finish_stride() {
                let runs = versions.iter().map(|run| (run.version.0, run.n_tokens));
                seen.ended.push((now, key.0, runs.collect()));
            }
            if engine.phase == Phase::Updating {
                updated = Some(now + Duration(25));
            }
        }
        if engine.phase == Phase::Serving {
            engine.begin(now);
        }
    }
    let measured = engine.measured;
    assert_eq!(engine.requests, 0);
    seen.steps = measured.steps;
    seen.prefill_tokens = measured.prefill_tokens;
    seen.kv_tokens_max = measured.kv_tokens_max;
    seen.preemptions = engine.preemptions();
    (seen, measured.kv_tokens)
}

fn call() -> impl Strategy<Value = (u64, Call)> {
    let submit =
        (1..30_u64, 1..25_u64, 0..30_u64).prop_map(|(prompt, answer, cached)| Call::Submit {
            prompt,
            answer,
            cached,
        });
    let call =
        prop_oneof![8 => submit, 1 => (0..20_u64).prop_map(Call::Abort), 1 => Just(Call::Update)];
    (0..400_u64, call)
}

proptest! {
    #[test]
    fn strides_change_nothing(calls in prop::collection::vec(call(), 1..25)) {
        let mut at = 0;
        let calls: Vec<(u64, Call)> = calls
            .into_iter()
            .map(|(after, call)| { at += after; (at, call) })
            .collect();
        let ((fast, fast_kv), (slow, slow_kv)) = (play(&calls, u64::MAX), play(&calls, 1));
        prop_assert!((fast_kv - slow_kv).abs() <= 1e-6 * slow_kv.max(1e-6) + 1e-2, "{} {}", fast_kv, slow_kv);
        prop_assert_eq!(fast, slow);
    }
}

#[test]
fn versions_change_where_the_update_was() {
    let submit = Call::Submit {
        prompt: 5,
        answer: 10,
        cached: 0,
    };
    // The prompt's step takes 20 us, each further one 11; the update waits for the step under way.
    let calls = [(0, submit), (45, Call::Update)];
    let (seen, _) = play(&calls, u64::MAX);
    let end = Time(20 + 9 * 11 + 25);
    assert_eq!(seen.ended, [(end, 0, vec![(0, 4), (1, 6)])]);
}

#[test]
fn a_full_cache_preempts_the_newest() {
    let submit = |_| {
        let call = Call::Submit {
            prompt: 10,
            answer: 25,
            cached: 0,
        };
        (0, call)
    };
    let calls: Vec<(u64, Call)> = (0..4).map(submit).collect();
    let (seen, _) = play(&calls, u64::MAX);
    let order: Vec<u64> = seen.ended.iter().map(|(_, key, _)| *key).collect();
    assert!(seen.preemptions > 0 && seen.prefill_tokens > 40);
    assert_eq!(order, [0, 1, 2, 3]);
}
