//! The experts that engines chose: who has to report them, and what the trainer receives.

use crate::common::engine::Engine;
use crate::common::trainer::{self, Batch};
use crate::common::{Orchestrator, Place, trained as trained_in};
use primerl_engine_server::mock::MockConfig;
use primerl_orchestrator::Config;

fn config(place: &Place, lines: &str) -> Config {
    Config::from_toml(&place.toml(lines, ""), "test").unwrap()
}

fn mixture() -> MockConfig {
    MockConfig {
        reports_experts: true,
        ..MockConfig::default()
    }
}

async fn trained(lines: &str) -> Vec<Batch> {
    let place = Place::new();
    let batches = trained_in(&place, config(&place, lines), mixture(), 2).await;
    assert_eq!(batches.len(), 4);
    batches
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_experts_of_every_computed_token_reach_the_trainer() {
    let mut turns = 0;
    for sequence in trained("router_replay = true")
        .await
        .iter()
        .flat_map(Batch::sequences)
    {
        turns = turns.max(
            sequence
                .mask
                .windows(2)
                .filter(|pair| *pair == [0, 1])
                .count(),
        );
        let (last, computed) = sequence.experts.split_last().unwrap();
        assert!(last.is_empty(), "no engine computed it");
        for (id, experts) in sequence.ids.iter().zip(computed) {
            assert_eq!(
                experts[..],
                MockConfig::experts_of(*id as u32),
                "token {id}"
            );
        }
    }
    assert!(turns > 1, "conversations have several turns");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_of_them_is_kept_where_they_are_not_replayed() {
    for batch in trained("").await {
        assert!(!batch.sequences().is_empty());
        let known = |micro_batch: &trainer::MicroBatch| micro_batch.routed_experts.is_some();
        assert!(!batch.micro_batches.iter().any(known));
    }
}

#[test]
fn engines_that_render_are_not_asked() {
    let place = Place::new();
    let lines = "router_replay = true\nclient_type = \"openai_chat_completions_token\"";
    let refused = Config::from_toml(&place.toml(lines, ""), "test").unwrap_err();
    assert!(refused.to_string().contains("router_replay"), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_reports_none_is_refused() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(config(&place, "router_replay = true")).await;
    let silent = Engine::start(MockConfig::default()).await;
    orchestrator.join(&silent.url).await;
    // No engine is left that could serve the run.
    let error = orchestrator.end().await.unwrap_err().to_string();
    assert!(error.contains("--enable-return-routed-experts"), "{error}");
    silent.stop().await;
}
