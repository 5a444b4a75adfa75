//! The live page: its files, its data during a run and afterwards, and who may see them.

use crate::common::engine::{Engine, expected_logprobs};
use crate::common::trainer::{self, Batch};
use crate::common::worker::Worker;
use crate::common::{Orchestrator, PATIENCE, Place, client, get, stranger};
use primerl_engine_server::mock::MockConfig;
use primerl_orchestrator::envs::wire::WorkerRole;
use primerl_orchestrator::page;
use primerl_service::secret::Secret;
use reqwest::Client;
use serde_json::{Value, json};
use std::path::Path;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Repeats the request until `reached`: data on its way to the disk is visible a moment later.
async fn until(url: &str, reached: impl Fn(&Value) -> bool) -> Value {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let answer = get(url).await;
        if reached(&answer) {
            return answer;
        }
        assert!(
            tokio::time::Instant::now() < deadline,
            "not reached: {answer:#}"
        );
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

async fn refusal(http: &Client, url: &str) -> (u16, Value) {
    let answer = http.get(url).send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

/// One rollout, turn by turn, as the trainer got it.
async fn check_rollout(url: &str, id: u64, batch: &Batch, turns: usize) {
    let told = get(&format!("{url}/page/rollouts/{id}")).await;
    assert_eq!(
        (&told["fate"], &told["step"]), // words: allow
        (&json!("trained"), &json!(1))
    );
    assert_eq!(told["turn_list"].as_array().unwrap().len(), turns);
    assert_eq!(told["turn_list"][0]["fork"], "first_turn");
    assert_eq!(told["turn_list"][1]["parent"], 0);
    assert_eq!(told["reports"][0]["reward"], told["reward"]);
    let sequences = batch.sequences();
    let sequence = sequences.iter().find(|one| one.rollout == id).unwrap();
    let expected = expected_logprobs(&sequence.ids, &sequence.versions);
    for (number, turn) in told["turn_list"].as_array().unwrap().iter().enumerate() {
        let path = format!("{url}/page/rollouts/{id}/turns/{number}");
        let tokens = get(&path).await;
        let count = turn["sampled_tokens"].as_u64().unwrap() as usize;
        let before = turn["prompt_tokens"].as_u64().unwrap() as usize;
        let ids: Vec<i32> = serde_json::from_value(tokens["ids"].clone()).unwrap();
        assert_eq!(ids, sequence.ids[before..before + count]);
        let logprobs: Vec<f32> = serde_json::from_value(tokens["logprobs"].clone()).unwrap();
        assert_eq!(logprobs, expected[before..before + count]);
        assert_eq!(tokens["versions"], json!(vec![0; count]));
        let advantages: Vec<f32> = serde_json::from_value(tokens["advantages"].clone()).unwrap();
        assert!(advantages.iter().all(|one| json!(one) == told["advantage"]));
        assert_eq!(tokens["pieces"].as_array().unwrap().len(), count);
        let prompt = tokens["prompt"]["text"].as_str().unwrap();
        assert!(prompt.contains(&format!("turn {number}")), "{prompt}");

        // The same in pages.
        let first = get(&format!("{path}?limit=1")).await;
        assert_eq!(
            first["next"],
            if count > 1 { json!(1) } else { Value::Null }
        );
        let rest = get(&format!("{path}?from=1")).await;
        assert_eq!(rest["prompt"], Value::Null);
        let all = [&first["pieces"], &rest["pieces"]].map(|part| part.as_array().unwrap().clone());
        assert_eq!(json!(all.concat()), tokens["pieces"]);
    }
}

async fn serve_files(output: &Path, model: &Path) -> (String, CancellationToken) {
    let prepared = page::Prepared::new(output, Some(model)).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    tokio::spawn(prepared.serve(listener, stop.clone()));
    (url, stop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_is_shown_during_and_after_it() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", "")).await;
    let url = orchestrator.url.clone();
    let early = get(&format!("{url}/page/rollouts")).await;
    assert_eq!(
        (&early["rollouts"], &early["next"]),
        (&json!([]), &Value::Null)
    );
    let engine = Engine::start(MockConfig::default()).await;
    orchestrator.join(&engine.url).await;
    trainer::publish(&url, &place.output(), 0).await;
    let worker = Worker::register(&url, "task", WorkerRole::Train, "w").await;
    let working = tokio::spawn(worker.work(2));
    let body = trainer::batch_bytes(&url, 1, 0).await.unwrap();
    let batch = Batch::decode(&body);

    let trained = format!("{url}/page/rollouts?step=1&fate=trained&environment=task"); // words: allow
    let list = until(&trained, |list| list["matching"] == 8).await;
    let rollouts = list["rollouts"].as_array().unwrap();
    assert_eq!(rollouts.len(), 8);
    for rollout in rollouts {
        assert_eq!(rollout["versions"], json!([0, 0]));
        assert_eq!(
            (&rollout["staleness"], &rollout["turns"]),
            (&json!(0), &json!(2))
        );
    }
    let ids: Vec<u64> = rollouts
        .iter()
        .map(|one| one["rollout"].as_u64().unwrap())
        .collect();
    assert!(ids.is_sorted_by(|a, b| a > b), "the newest first");
    let page = get(&format!("{trained}&limit=3")).await;
    let rest = get(&format!("{trained}&cursor={}", page["next"])).await;
    assert_eq!(rest["rollouts"].as_array().unwrap().len(), 5);
    assert_eq!((&rest["before"], &rest["next"]), (&json!(3), &Value::Null));
    let back = get(&format!("{trained}&limit=3&until={}", rest["previous"])).await;
    assert_eq!(back["rollouts"], page["rollouts"]);
    let best = get(&format!("{trained}&order=highest_reward&min_reward=0")).await;
    let rewards = best["rollouts"].as_array().unwrap().iter();
    let rewards: Vec<f64> = rewards.map(|one| one["reward"].as_f64().unwrap()).collect();
    assert_eq!(rewards.len(), 8);
    assert!(rewards.is_sorted_by(|a, b| a >= b), "{rewards:?}");
    let group = &rollouts[0]["group"];
    let members = get(&format!("{url}/page/rollouts?group={group}")).await;
    assert_eq!(members["matching"], 4);
    check_rollout(&url, ids[0], &batch, 2).await;

    let curves = get(&format!("{url}/page/curves?names=reward/all/mean,none")).await;
    assert_eq!(curves["curves"]["reward/all/mean"]["x"][0], 1);
    assert_eq!(curves["curves"]["none"]["x"], json!([]));
    assert!(
        curves["names"]
            .as_array()
            .unwrap()
            .contains(&json!("staleness/mean"))
    );
    let health = get(&format!("{url}/page/health")).await;
    assert_eq!(health["findings"], json!([]));
    assert!(health["steps"].as_u64() >= Some(1));
    let now = until(&format!("{url}/page/now"), |now| !now["idle"].is_null()).await;
    assert_eq!(now["is_live"], true);
    assert!(now["status"]["run"]["step"].as_u64() >= Some(1));
    assert_eq!(now["idle"]["engines"][0]["engine"], 0);
    assert_eq!(now["journal"]["problem"], Value::Null);

    for (path, status, word) in [
        ("rollouts/999999", 404, "no rollout 999999"),
        ("rollouts/x", 400, "x"),
        (&format!("rollouts/{}/turns/7", ids[0]), 404, "no turn 7"),
        ("rollouts?fat=trained", 400, "fat"),
        ("rollouts?fate=lost", 400, "lost"), // words: allow
        ("rollouts?order=oldest", 400, "oldest"),
        ("rollouts?min_reward=much", 400, "min_reward"),
        ("curves?points=-1", 400, "points"),
        (
            &format!("curves?names={}", "a,".repeat(65)),
            400,
            "65 curves",
        ),
    ] {
        let (found, answer) = refusal(&client(), &format!("{url}/page/{path}")).await;
        let message = answer["error"]["message"].as_str().unwrap();
        assert_eq!(found, status, "{path}: {message}");
        assert!(message.contains(word), "{path}: {message}");
    }

    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    working.abort();
    engine.stop().await;
    let (url, stop) = serve_files(&place.output(), &place.path("model")).await;
    let trained = format!("{url}/page/rollouts?step=1&fate=trained&environment=task"); // words: allow
    let after = until(&trained, |list| list["is_up_to_date"] == true).await;
    assert_eq!(after["rollouts"], list["rollouts"]);
    check_rollout(&url, ids[0], &batch, 2).await;
    // There is no summary of how it ended: its counts come from the journal.
    let now = until(&format!("{url}/page/now"), |now| !now["status"].is_null()).await;
    assert_eq!(
        (&now["is_live"], &now["end"]),
        (&json!(false), &Value::Null)
    );
    // Steps were cut ahead, too.
    let all = get(&format!("{url}/page/rollouts?fate=trained")).await; // words: allow
    assert_eq!(now["status"]["rollouts"]["trained"], all["matching"]);
    assert!(now["status"]["run"]["step"].as_u64() >= Some(1));
    std::fs::create_dir_all(place.output().join("run")).unwrap();
    let summary = r#"{"exit_code": 1, "reason": "it broke", "wall_s": 9.5, "status": {"rollouts": {"trained": 1}}}"#;
    std::fs::write(place.output().join("run/summary.json"), summary).unwrap();
    let now = get(&format!("{url}/page/now")).await;
    let end = json!({"exit_code": 1, "reason": "it broke", "wall_s": 9.5});
    assert_eq!(now["end"], end);
    assert_eq!(now["status"]["rollouts"]["trained"], all["matching"]);
    stop.cancel();
    let empty = page::Prepared::new(&place.path("model"), None)
        .err()
        .unwrap();
    assert!(empty.to_string().contains("holds no journal"), "{empty}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_needs_no_key_and_its_data_do() {
    let place = Place::new();
    let prepared = primerl_orchestrator::Prepared::new(place.config("", ""), None).unwrap();
    let prepared = prepared.with_run_key(Some(Secret::new("the-key")));
    let orchestrator = Orchestrator::start_prepared(prepared).await;
    let url = orchestrator.url.clone();
    let page = stranger().get(&url).send().await.unwrap();
    assert_eq!(page.status(), 200);
    let policy = page.headers()["content-security-policy"]
        .to_str()
        .unwrap()
        .to_owned();
    assert!(
        policy.starts_with("default-src 'none'; script-src 'self';"),
        "{policy}"
    );
    assert!(!policy.contains("unsafe"));
    let text = page.text().await.unwrap();
    let mut assets = 0;
    for part in text
        .split('"')
        .filter(|part| part.starts_with("/page/assets/"))
    {
        let asset = stranger().get(format!("{url}{part}")).send().await.unwrap();
        assert_eq!(asset.status(), 200, "{part}");
        assert!(asset.headers().contains_key("content-security-policy"));
        assert!(!asset.text().await.unwrap().contains("innerHTML"));
        assets += 1;
    }
    assert_eq!(assets, 3);
    // The page loads nothing from other servers, and its text contains no data.
    assert!(!text.contains("http") && !text.contains("<style") && !text.contains("style="));
    let nothing = stranger()
        .get(format!("{url}/page/assets/../now"))
        .send()
        .await
        .unwrap();
    assert_eq!(nothing.status(), 401);
    for path in [
        "now",
        "curves",
        "evaluations",
        "rollouts",
        "rollouts/0",
        "rollouts/0/turns/0",
    ] {
        let (status, answer) = refusal(&stranger(), &format!("{url}/page/{path}")).await;
        assert_eq!(
            (status, &answer["error"]["code"]),
            (401, &json!("invalid_api_key")),
            "{path}"
        );
    }
    let now = stranger()
        .get(format!("{url}/page/now"))
        .bearer_auth("the-key");
    let now = now.send().await.unwrap();
    assert_eq!(now.status(), 200);
    assert_eq!(now.headers()["cache-control"], "no-store");
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
}
