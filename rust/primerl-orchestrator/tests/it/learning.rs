//! Environments that learn from different things: rewards, teachers, with groups and sampling of their own.

use super::teacher::{joined, letters, talkative};
use crate::common::engine::{Engine, expected_logprobs};
use crate::common::worker::Worker;
use crate::common::{Orchestrator, Place, trainer};
use primerl_orchestrator::Config;
use primerl_orchestrator::envs::wire::WorkerRole;
use trainer::Batch;

/// Rewards, a teacher's log-probabilities and a teacher's answers, in groups of four, two and one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_environment_learns_from_what_it_names() {
    let place = Place::new();
    let scores = Engine::start_rendering(letters(), &place.path("model")).await;
    let says = Engine::start_rendering(talkative(&place), &place.path("model")).await;
    let own = |id: &str, mode: &str, size: u32, url: &str, sampling: &str| {
        format!(
            "[[train.env]]\nid = \"{id}\"\ntraining_mode = \"{mode}\"\ngroup_size = {size}\n\
             teacher.client = {{ base_url = \"{url}/v1\", model = \"m\" }}\n{sampling}\n"
        )
    };
    let tables = own(
        "scored",
        "opd",
        2,
        &scores.url,
        "sampling.temperature = 0.5",
    ) + &own("taught", "sft", 1, &says.url, "");
    let orchestrator = Orchestrator::start(place.config("", &tables)).await;
    let engine = joined(&orchestrator).await;
    let mut working = tokio::task::JoinSet::new();
    for environment in ["task", "scored", "taught"] {
        let worker = Worker::register(
            &orchestrator.url,
            environment,
            WorkerRole::Train,
            environment,
        );
        working.spawn(worker.await.work(1));
    }
    let training = tokio::spawn(trainer::train(orchestrator.url.clone(), place.output()));
    let reason = orchestrator.end().await.unwrap();
    assert!(reason.0.contains("all 4 steps"), "{}", reason.0);
    working.join_all().await;
    drop(engine);
    let batches = training.await.unwrap();
    let mut seen = [0; 3];
    for sequence in batches.iter().flat_map(Batch::sequences) {
        let mask: Vec<f32> = sequence.mask.iter().map(|one| f32::from(*one)).collect();
        let none = vec![0.0; mask.len()];
        let (rl, ref_kl) = (
            &sequence.extra["rl_weights"],
            &sequence.extra["ref_kl_weights"],
        );
        let ce = &sequence.extra["ce_weights"];
        let teacher = &sequence.extra["teacher_logprobs"];
        let kind = match (*rl == mask, *ref_kl == mask) {
            (true, false) => 0,
            (false, true) => 1,
            _ => 2,
        };
        seen[kind] += 1;
        match kind {
            0 => assert_eq!([ref_kl, ce, teacher], [&none; 3]),
            1 => {
                assert_eq!([rl, ce], [&none; 2]);
                let mut expected = expected_logprobs(&sequence.ids, &vec![0; sequence.ids.len()]);
                expected[0] = 0.0;
                assert_eq!(*teacher, expected);
            }
            _ => {
                assert_eq!([rl, ref_kl, teacher], [&none; 3]);
                assert!(ce.contains(&1.0) && mask == none);
            }
        }
    }
    // Groups are begun in turn (the core's tests have the ratios); which of them are trained, their pace decides.
    assert!(seen.iter().all(|one| *one > 0), "{seen:?}");
}

#[test]
fn what_an_environments_sampling_leaves_out_is_the_runs() {
    let place = Place::new();
    let own = "[[train.env]]\nid = \"own\"\nsampling.temperature = 0.5\n";
    let config = place.config("", own);
    let sampling = |at: usize| {
        let sampling = config.train.env[at].sampling.as_ref();
        sampling.map(|own| (own.temperature, own.max_tokens))
    };
    assert_eq!([sampling(0), sampling(1)], [None, Some((0.5, 12))]);
    let refused = |lines: &str| {
        let toml = place.toml("", &format!("[[train.env]]\nid = \"own\"\n{lines}\n"));
        Config::from_toml(&toml, "test").unwrap_err().to_string()
    };
    let teacher = "teacher.client = { base_url = \"http://t/v1\", model = \"m\" }";
    for (lines, said) in [
        (
            "sampling.temperature = 0.0",
            "train.env.own.sampling.temperature",
        ),
        ("sampling.top_p = 0.9", "train.env.own.sampling.top_p"),
        ("sampling.warmth = 1.0", "warmth"),
        ("training_mode = \"opd\"", "train.env.own.training_mode"),
        (teacher, "train.env.own.teacher"),
    ] {
        let found = refused(lines);
        assert!(found.contains(said), "{lines}: {found}");
    }
}
