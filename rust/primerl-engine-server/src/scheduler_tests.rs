use super::*;
use crate::backend::{ScoredToken, StepOutput};
use crate::batch::Batch;
use crate::request::{FinishReason, SamplingParams};
use crate::sequence::{Completion, Submission};

#[path = "scheduler_property_tests.rs"]
mod property;

const EOS: u32 = 1;

fn sampling(max_tokens: u32) -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
        seed: 0,
        max_tokens,
        min_tokens: 0,
        stop_token_ids: vec![],
        eos_token_id: Some(EOS),
        top_logprobs: 0,
        prompt_logprobs: None,
        experts_from: 0,
    }
}

fn submission(key: u64, prompt_len: usize, max_tokens: u32) -> Submission {
    Submission {
        key: RequestKey(key),
        prompt: vec![5; prompt_len],
        sampling: sampling(max_tokens),
        grammar: None,
        priority: 0,
        stream: false,
    }
}

fn scheduler(max_num_seqs: u32, kv_cache_tokens: u64, max_num_batched_tokens: u32) -> Scheduler {
    Scheduler::new(Limits {
        max_num_seqs,
        kv_cache_tokens,
        max_num_batched_tokens,
    })
}

fn scored(token_id: u32) -> ScoredToken {
    ScoredToken {
        token_id,
        logprob: -1.0,
        rank: 1,
        top: vec![],
    }
}

/// What a backend that always samples `token` answers.
fn answer(batch: &Batch, token: u32) -> StepOutput {
    let sampled = batch
        .sequences
        .iter()
        .filter(|s| s.sample.is_some())
        .map(|_| scored(token))
        .collect();
    let targets = batch
        .sequences
        .iter()
        .filter_map(|s| s.prompt_targets.as_ref());
    StepOutput {
        sampled,
        prompt: targets
            .flat_map(|t| t.targets.iter().map(|&id| scored(id)))
            .collect(),
        experts: None,
    }
}

fn step(scheduler: &mut Scheduler, token: u32) -> Vec<Event> {
    let Some(batch) = scheduler.plan() else {
        return vec![];
    };
    let output = answer(&batch, token);
    scheduler.apply(batch, output)
}

fn finished(events: Vec<Event>) -> Vec<Completion> {
    events
        .into_iter()
        .filter_map(|event| match event {
            Event::Finished(completion) => Some(completion),
            _ => None,
        })
        .collect()
}

fn run_out(scheduler: &mut Scheduler) -> Vec<Completion> {
    let mut all = vec![];
    while scheduler.num_running() + scheduler.num_waiting() > 0 {
        all.extend(finished(step(scheduler, 5)));
    }
    all
}

#[test]
fn first_come_first_served_and_priority_first() {
    let mut scheduler = scheduler(1, 100, 100);
    for key in 0..3 {
        scheduler.submit(submission(key, 3, 2));
    }
    scheduler.submit(Submission {
        priority: -1,
        ..submission(9, 3, 2)
    });
    let order: Vec<u64> = run_out(&mut scheduler)
        .into_iter()
        .map(|c| c.key.0)
        .collect();
    assert_eq!(order, [9, 0, 1, 2]);
}

#[test]
fn newest_is_preempted_and_comes_back_first() {
    let mut scheduler = scheduler(4, 12, 100);
    for key in 0..3 {
        scheduler.submit(submission(key, 3, 6));
    }
    let order: Vec<u64> = run_out(&mut scheduler)
        .into_iter()
        .map(|c| c.key.0)
        .collect();
    assert_eq!(order, [0, 1, 2]);
    assert!(scheduler.preemptions() > 0);
    assert_eq!(scheduler.kv_tokens_held(), 0);
}

#[test]
fn a_long_prompt_is_computed_in_chunks_and_starves_nobody() {
    let mut scheduler = scheduler(4, 1000, 8);
    scheduler.submit(submission(0, 2, 50));
    step(&mut scheduler, 5);
    scheduler.submit(submission(1, 30, 1));
    let mut chunks = vec![];
    for _ in 0..5 {
        let batch = scheduler.plan().expect("work");
        assert_eq!(
            batch.sequences[0].key,
            RequestKey(0),
            "the decoding one runs in every step"
        );
        if let Some(part) = batch
            .sequences
            .iter()
            .find(|part| part.key == RequestKey(1))
        {
            chunks.push((part.query_len, part.sample.is_some()));
        }
        let output = answer(&batch, 5);
        scheduler.apply(batch, output);
    }
    assert_eq!(
        chunks,
        [(7, false), (7, false), (7, false), (7, false), (2, true)]
    );
}

#[test]
fn stop_rules() {
    let mut scheduler = scheduler(8, 1000, 100);
    scheduler.submit(submission(0, 1, 3));
    let mut stopping = submission(1, 1, 3);
    stopping.sampling.stop_token_ids = vec![5];
    scheduler.submit(stopping);
    let mut patient = submission(2, 1, 4);
    patient.sampling.stop_token_ids = vec![5];
    patient.sampling.min_tokens = 2;
    scheduler.submit(patient);
    let batch = scheduler.plan().expect("work");
    let banned: Vec<_> = batch
        .sequences
        .iter()
        .map(|s| s.sample.as_ref().expect("sampled").banned.len())
        .collect();
    assert_eq!(
        banned,
        [0, 0, 2],
        "end of sequence and stop token are banned until min_tokens"
    );
    let output = answer(&batch, 5);
    let mut all = finished(scheduler.apply(batch, output));
    all.extend(finished(step(&mut scheduler, 5)));
    all.extend(finished(step(&mut scheduler, EOS)));
    let ends: Vec<_> = all
        .iter()
        .map(|c| (c.key.0, c.finish, c.stop_token, c.tokens.len()))
        .collect();
    assert_eq!(
        ends,
        [
            (1, FinishReason::Stop, Some(5), 1),
            (2, FinishReason::Stop, Some(5), 2),
            (0, FinishReason::Stop, None, 3)
        ]
    );
}

#[test]
fn drain_holds_later_arrivals_back() {
    let mut scheduler = scheduler(2, 100, 100);
    scheduler.submit(submission(0, 2, 2));
    scheduler.drain();
    scheduler.submit(Submission {
        priority: -5,
        ..submission(1, 2, 2)
    });
    assert!(!scheduler.is_drained());
    let mut keys = vec![];
    while !scheduler.is_drained() {
        keys.extend(
            finished(step(&mut scheduler, 5))
                .into_iter()
                .map(|c| c.key.0),
        );
    }
    assert_eq!(keys, [0]);
    assert_eq!(step(&mut scheduler, 5), []);
    scheduler.resume();
    assert_eq!(run_out(&mut scheduler).len(), 1);
}

#[test]
fn versions_cut_where_weights_changed() {
    let mut scheduler = scheduler(2, 100, 100);
    scheduler.submit(submission(0, 2, 5));
    step(&mut scheduler, 5);
    step(&mut scheduler, 5);
    scheduler.pause();
    assert_eq!(scheduler.plan(), None);
    scheduler.versions.start().unwrap();
    scheduler.weights_changed();
    scheduler.versions.finish(Some("1".into())).unwrap();
    scheduler.resume();
    let batch = scheduler.plan().expect("work");
    assert_eq!(
        batch.positions,
        [3],
        "KV was kept: only the last token is computed"
    );
    let output = answer(&batch, 5);
    scheduler.apply(batch, output);
    let done = run_out(&mut scheduler);
    let spans: Vec<_> = done[0]
        .versions
        .iter()
        .map(|s| (&*s.version, s.start, s.end))
        .collect();
    assert_eq!(spans, [("default", 0, 2), ("1", 2, 5)]);
}

#[test]
fn an_unfinished_prompt_starts_over_with_new_weights() {
    let mut scheduler = scheduler(2, 100, 4);
    scheduler.submit(submission(0, 10, 1));
    step(&mut scheduler, 5);
    scheduler.weights_changed();
    assert_eq!(scheduler.plan().expect("work").positions, [0, 1, 2, 3]);
}

#[test]
fn prompt_is_scored_once_over_chunks_and_preemption() {
    let mut scheduler = scheduler(2, 100, 4);
    let mut scored = submission(0, 10, 3);
    scored.prompt = (10..20).collect();
    scored.sampling.prompt_logprobs = Some(0);
    scheduler.submit(scored);
    step(&mut scheduler, 5);
    scheduler.clear_cache();
    for _ in 0..3 {
        step(&mut scheduler, 5);
    }
    scheduler.clear_cache();
    let done = run_out(&mut scheduler);
    let ids: Vec<u32> = done[0]
        .prompt
        .as_ref()
        .expect("scores")
        .iter()
        .map(|s| s.token_id)
        .collect();
    assert_eq!(ids, (11..20).collect::<Vec<u32>>());
}
