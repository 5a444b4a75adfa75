//! The orchestrator is killed, and started again with the same command: the run resumes, nothing is lost, nothing is
//! trained twice.

use crate::common::engine::{Engine, expected_logprobs};
use crate::common::trainer::{self, Batch};
use crate::common::worker::{self, Worker};
use crate::common::{PATIENCE, Place, read_lines, user};
use primerl_core::Event;
use primerl_engine_server::mock::MockConfig;
use primerl_orchestrator::envs::wire::{Lease, WorkerRole};
use primerl_record::journal;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The native binary, with one output folder for all its starts.
struct Process {
    config: PathBuf,
    output: PathBuf,
    child: Child,
    url: String,
}

impl Process {
    fn start(place: &Place, extra: &str) -> Process {
        let config = place.path("orchestrator.toml");
        std::fs::write(&config, place.toml(extra, "")).unwrap();
        let child = spawn(&config, &place.output());
        let mut process = Process {
            config,
            output: place.output(),
            child,
            url: String::new(),
        };
        process.url = process.wait_until_up().expect("it has just begun");
        process
    }

    /// Its address; `None` if it has ended: the run was over.
    fn wait_until_up(&mut self) -> Option<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let file = std::fs::read(self.output.join("run/orchestrator.json")).unwrap_or_default();
            let address: Value = serde_json::from_slice(&file).unwrap_or_default();
            if address["pid"] == self.child.id() {
                return Some(address["url"].as_str().unwrap().to_owned());
            }
            if let Some(status) = self.child.try_wait().unwrap() {
                assert!(status.success(), "{}", self.log());
                return None;
            }
            assert!(Instant::now() < deadline, "{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn restart(&mut self) {
        self.child = spawn(&self.config, &self.output);
        if let Some(url) = self.wait_until_up() {
            assert_eq!(url, self.url, "it is found where it was");
        }
    }

    /// SIGKILL, and the same command again.
    fn kill_and_restart(&mut self) {
        self.kill();
        self.restart();
    }

    fn log(&self) -> String {
        std::fs::read_to_string(log_file(&self.output)).unwrap_or_default()
    }

    fn journal_bytes(&self) -> u64 {
        let files = std::fs::read_dir(self.output.join("journal")).unwrap();
        files
            .map(|file| file.unwrap().metadata().map_or(0, |it| it.len()))
            .sum()
    }

    /// Waits until this much more was written, or the process has ended.
    fn wait_for_growth(&mut self, bytes: u64) -> bool {
        let enough = self.journal_bytes() + bytes;
        let deadline = Instant::now() + PATIENCE;
        while self.journal_bytes() < enough {
            if self.child.try_wait().unwrap().is_some() {
                return false;
            }
            assert!(Instant::now() < deadline, "{}", self.log());
            std::thread::sleep(Duration::from_micros(200));
        }
        true
    }
}

impl Process {
    /// Runs the command until it ends by itself; returns its output.
    fn spawn_and_wait(place: &Place) -> String {
        let before = std::fs::read_to_string(log_file(&place.output())).unwrap_or_default();
        let mut child = spawn(&place.path("orchestrator.toml"), &place.output());
        let deadline = Instant::now() + PATIENCE;
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > deadline {
                child.kill().unwrap();
                panic!("it did not end");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let after = std::fs::read_to_string(log_file(&place.output())).unwrap();
        after[before.len()..].to_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn log_file(output: &Path) -> PathBuf {
    output.with_extension("log")
}

fn spawn(config: &Path, output: &Path) -> Child {
    let log = std::fs::File::options()
        .create(true)
        .append(true)
        .open(log_file(output))
        .unwrap();
    crate::common::orchestrate()
        .arg("--config")
        .arg(config)
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap()
}

async fn join(process: &Process, engine: &Engine) {
    let request = crate::common::client()
        .post(format!("{}/engines/join", process.url))
        .json(&json!({"url": engine.url}));
    assert_eq!(crate::common::persistently(request).await.status(), 200);
}

/// An orchestrator with an engine that serves version 0, and a worker.
async fn begun(place: &Place) -> (Process, Engine, Worker) {
    let process = Process::start(place, "");
    let engine = Engine::start(MockConfig::default()).await;
    join(&process, &engine).await;
    let worker = Worker::register(&process.url, "task", WorkerRole::Train, "a").await;
    trainer::publish(&process.url, &place.output(), 0).await;
    (process, engine, worker)
}

/// No gap, no repeat, every token as the engine sampled it.
fn check(batches: &[Batch], output: &Path, steps: u64) {
    let cut: Vec<u64> = batches.iter().map(|batch| batch.step).collect();
    assert_eq!(cut, (1..=steps).collect::<Vec<_>>());
    let mut rollouts = BTreeSet::new();
    for batch in batches {
        let own: BTreeSet<u64> = batch.sequences().iter().map(|it| it.rollout).collect();
        assert_eq!(own.len(), 8);
        for sequence in batch.sequences() {
            let expected = expected_logprobs(&sequence.ids, &sequence.versions);
            assert_eq!(sequence.logprobs, expected);
        }
        assert!(rollouts.is_disjoint(&own), "a rollout is trained twice");
        rollouts.extend(own);
    }
    let lines = read_lines(&output.join("steps.jsonl"));
    let told: Vec<u64> = lines
        .iter()
        .map(|it| it["step"].as_u64().unwrap())
        .collect();
    assert_eq!(told, cut);
    let restored = journal::restore(&output.join("journal")).unwrap();
    restored.core.check().unwrap();
    let counters = restored.core.counters();
    assert_eq!(counters.trained, steps * 8);
    assert_eq!(counters.dispatched, counters.ended());
}

fn events(output: &Path) -> Vec<Event> {
    let mut events = Vec::new();
    let folder = output.join("journal");
    journal::read_from(&folder, 0, |_, journal::Entry(_, event)| events.push(event)).unwrap();
    events
}

/// Rollouts that had a turn before a restart, and another one after it.
fn carried_over(output: &Path) -> usize {
    let (mut began, mut carried) = (BTreeMap::new(), BTreeSet::new());
    let mut restarts = 0;
    for event in events(output) {
        match event {
            Event::Restarted => restarts += 1,
            Event::TurnFinished { rollout, .. }
                if *began.entry(rollout).or_insert(restarts) < restarts =>
            {
                carried.insert(rollout);
            }
            _ => {}
        }
    }
    carried.len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_survives_kills_at_any_moment() {
    const STEPS: u64 = 30;
    let place = Place::new();
    let extra = format!("max_async_level = 1\nmax_steps = {STEPS}");
    let mut process = Process::start(&place, &extra);
    let mock = MockConfig {
        step_latency: Duration::from_millis(1),
        ..MockConfig::default()
    };
    let engine = Engine::start(mock).await;
    join(&process, &engine).await;
    let workers = ["a", "b"].map(|name| {
        let url = process.url.clone();
        tokio::spawn(async move {
            let worker = Worker::register(&url, "task", WorkerRole::Train, name).await;
            worker.work(3).await;
        })
    });
    let training = tokio::spawn(trainer::train(process.url.clone(), place.output()));
    let killing = tokio::task::spawn_blocking(move || {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(4);
        let mut kills = 0;
        while process.wait_for_growth(rng.random_range(1_000..20_000)) {
            process.kill_and_restart();
            kills += 1;
        }
        (process, kills)
    });
    let batches = training.await.unwrap();
    let (process, kills) = killing.await.unwrap();
    assert!(kills >= 10, "{kills} kills only");
    for worker in workers {
        worker.await.unwrap();
    }
    check(&batches, &place.output(), STEPS);
    let carried = carried_over(&place.output());
    assert!(carried >= 10, "{carried} rollouts continued over a restart");
    assert!(process.log().contains("the run has finished"));
    engine.stop().await;
}

/// One turn of a rollout; the answer with its ids.
async fn turn(lease: &Lease, messages: &[Value], retries: u32) -> Value {
    let body =
        json!({"model": "m", "messages": messages, "return_token_ids": true, "logprobs": true});
    let request = crate::common::client()
        .post(format!("{}/chat/completions", lease.base_url))
        .bearer_auth(lease.api_key.reveal())
        .header("x-stainless-retry-count", retries)
        .json(&body);
    let answer = request.send().await.unwrap();
    assert_eq!(answer.status(), 200);
    answer.json().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_in_mid_rollout_continues_after_a_restart() {
    let place = Place::new();
    let (mut process, engine, worker) = begun(&place).await;
    let lease = worker.one().await;
    let mut messages = vec![user("first")];
    let first = turn(&lease, &messages, 0).await;
    process.kill_and_restart();
    let again = turn(&lease, &messages, 1).await;
    assert_eq!(again["choices"], first["choices"], "the recorded answer");
    messages.extend([first["choices"][0]["message"].clone(), user("second")]);
    let second = turn(&lease, &messages, 0).await;
    let ids = |answer: &Value, pointer: &str| -> Vec<u64> {
        serde_json::from_value(answer.pointer(pointer).unwrap().clone()).unwrap()
    };
    let mut prefix = ids(&first, "/prompt_token_ids");
    prefix.extend(ids(&first, "/choices/0/token_ids"));
    assert!(ids(&second, "/prompt_token_ids").starts_with(&prefix));
    assert!(worker.result(lease.rollout, worker::outcome("", 1.0)).await);
    let turns = events(&place.output());
    let turns = turns
        .iter()
        .filter(|it| matches!(it, Event::TurnFinished { .. }));
    assert_eq!(turns.count(), 2, "no turn is sampled twice");
    engine.stop().await;
}

/// A call of a rollout; the status and the body.
async fn call(lease: &Lease, method: reqwest::Method, path: &str, body: Value) -> (u16, Value) {
    let request = crate::common::client()
        .request(method, format!("{}/{path}", lease.base_url))
        .bearer_auth(lease.api_key.reveal())
        .json(&body);
    let answer = request.send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stored_responses_outlive_restarts() {
    use reqwest::Method;
    let place = Place::new();
    let (mut process, engine, worker) = begun(&place).await;
    let lease = worker.one().await;
    let ask = |body: Value| call(&lease, Method::POST, "responses", body);
    let look = |id: &Value, more: &str| {
        let path = format!("responses/{}{more}", id.as_str().unwrap());
        let lease = lease.clone();
        async move { call(&lease, Method::GET, &path, Value::Null).await }
    };
    // One that continues by reference, with another's instructions between, and one that sends its items again.
    let (_, first) =
        ask(json!({"input": "one", "instructions": "be brief", "metadata": {"a": "b"}})).await;
    let (_, second) = ask(json!({"input": "two", "previous_response_id": first["id"]})).await;
    let mut items = vec![json!({"role": "user", "content": "x"})];
    let (_, third) = ask(json!({"input": items})).await;
    items.extend(third["output"].as_array().unwrap().clone());
    items.push(json!({"role": "user", "content": "y"}));
    let (_, fourth) = ask(json!({"input": items})).await;
    let (_, gone) = ask(json!({"input": "z"})).await;
    let (_, after) = ask(json!({"input": "w", "previous_response_id": gone["id"]})).await;
    let path = format!("responses/{}", gone["id"].as_str().unwrap());
    assert_eq!(
        call(&lease, Method::DELETE, &path, Value::Null).await.0,
        200
    );
    let (_, unstored) = ask(json!({"input": "v", "store": false})).await;
    let kept = [&first, &second, &third, &fourth, &after];
    let mut lists = Vec::new();
    for response in kept {
        lists.push(look(&response["id"], "/input_items").await);
    }
    for lives in 2..4 {
        process.kill_and_restart();
        for (response, list) in kept.iter().zip(&lists) {
            let (status, again) = look(&response["id"], "").await;
            assert_eq!((status, &again), (200, *response));
            assert_eq!(&look(&response["id"], "/input_items").await, list);
        }
        for lost in [&gone, &unstored] {
            assert_eq!(look(&lost["id"], "").await.0, 404);
        }
        for response in kept {
            let body =
                json!({"input": format!("life {lives}"), "previous_response_id": response["id"]});
            let (status, next) = ask(body).await;
            assert_eq!(status, 200, "{next}");
        }
    }
    assert!(worker.result(lease.rollout, worker::outcome("", 1.0)).await);
    let events = events(&place.output());
    let turns: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            Event::TurnFinished { turn, .. } => Some(turn),
            _ => None,
        })
        .collect();
    // A request that continues a response continues from its turn, before a restart and after.
    let extended = turns.iter().filter(|turn| turn.parent.is_some()).count();
    // The first is continued without its instructions, so under another system message.
    assert_eq!((turns.len(), extended), (17, 10));
    let notes = |words: &str| {
        let of =
            |event: &&Event| matches!(event, Event::Noted { note, .. } if note.contains(words));
        events.iter().filter(of).count()
    };
    assert_eq!(notes("\"x\""), 1, "what was noted is not noted again");
    engine.stop().await;
}

/// The same body three times, to sample it again each time; what is marked is a retry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retries_of_repeats_get_their_own_answers_after_a_restart() {
    let place = Place::new();
    let mut process = Process::start(&place, "");
    let slow = MockConfig {
        eos_token_id: None,
        first_token: 64,
        last_token: 90,
        step_latency: Duration::from_millis(40),
        ..MockConfig::default()
    };
    let engine = Engine::start(slow).await;
    join(&process, &engine).await;
    let worker = Worker::register(&process.url, "task", WorkerRole::Train, "a").await;
    trainer::publish(&process.url, &place.output(), 0).await;
    let lease = worker.one().await;
    let messages = [user("again")];
    let first = turn(&lease, &messages, 0).await;
    let second = turn(&lease, &messages, 0).await;
    let said = |answer: &Value| answer["choices"][0]["token_ids"].clone();
    assert_ne!(said(&first), said(&second));
    assert_eq!(turn(&lease, &messages, 1).await["id"], second["id"]);
    process.kill_and_restart();
    let again = turn(&lease, &messages, 1).await;
    assert_eq!((&again["id"], said(&again)), (&second["id"], said(&second)));
    // The third is being sampled when the orchestrator dies: its retry is different from the others.
    engine.pause().await;
    let status = crate::common::get(&format!("{}/status", process.url)).await;
    let before = status["tokens"]["sampled"].as_u64();
    let (lease_, messages_) = (lease.clone(), messages.clone());
    let third = tokio::spawn(async move {
        let body = json!({"model": "m", "messages": messages_, "return_token_ids": true, "logprobs": true});
        let request = crate::common::client()
            .post(format!("{}/chat/completions", lease_.base_url))
            .bearer_auth(lease_.api_key.reveal())
            .header("x-stainless-retry-count", 0)
            .json(&body);
        request.send().await.map(|answer| answer.status())
    });
    let deadline = Instant::now() + PATIENCE;
    loop {
        let status = crate::common::get(&format!("{}/status", process.url)).await;
        assert_eq!(status["tokens"]["sampled"].as_u64(), before);
        if status["engines"][0]["running"] == 1 {
            break;
        }
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    process.kill();
    engine.resume().await;
    process.restart();
    assert!(third.await.unwrap().is_err(), "its connection was cut");
    let third = turn(&lease, &messages, 1).await;
    assert!(said(&third) != said(&first) && said(&third) != said(&second));
    assert_ne!(third["id"], second["id"]);
    assert_eq!(turn(&lease, &messages, 1).await["id"], third["id"]);
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_orchestrator_and_another_config_are_refused() {
    let place = Place::new();
    let mut process = Process::start(&place, "");
    let second = Process::spawn_and_wait(&place);
    assert!(
        second.contains("another orchestrator that still runs"),
        "{second}"
    );
    process.kill();
    let config = place.toml("seed = 7", "");
    std::fs::write(&process.config, config).unwrap();
    let other = Process::spawn_and_wait(&place);
    assert!(other.contains("seed = 0, and now seed = 7"), "{other}");
    let log = place.output().join("journal/000000000000.log");
    let mut bytes = std::fs::read(&log).unwrap();
    bytes[0] ^= 1;
    std::fs::write(&log, bytes).unwrap();
    std::fs::write(&process.config, place.toml("", "")).unwrap();
    let damaged = Process::spawn_and_wait(&place);
    assert!(
        damaged.contains("was not written by this version"),
        "{damaged}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_is_over_says_so_and_continues_with_more_steps() {
    let place = Place::new();
    let mut process = Process::start(&place, "max_steps = 2");
    let engine = Engine::start(MockConfig::default()).await;
    let mut batches = Vec::new();
    for steps in [2, 5] {
        join(&process, &engine).await;
        let worker = Worker::register(&process.url, "task", WorkerRole::Train, "a").await;
        let worker = tokio::spawn(worker.work(1));
        let from = batches.len() as u64;
        let training = trainer::train_after(from, process.url.clone(), place.output());
        batches.extend(training.await);
        worker.await.unwrap();
        assert!(process.child.wait().unwrap().success());
        check(&batches, &place.output(), steps);
        if steps == 2 {
            let again = Process::spawn_and_wait(&place);
            assert!(again.contains("all 2 steps are trained"), "{again}");
            std::fs::write(&process.config, place.toml("max_steps = 5", "")).unwrap();
            process.restart();
        }
    }
    engine.stop().await;
}

/// A run of 4 steps, and its result.
async fn run_to_the_end(process: &Process, place: &Place) {
    let url = process.url.clone();
    let worker = Worker::register(&url, "task", WorkerRole::Train, "a").await;
    let worker = tokio::spawn(worker.work(2));
    trainer::resume(&url, 0).await;
    let batches = trainer::train(url, place.output()).await;
    worker.await.unwrap();
    check(&batches, &place.output(), 4);
}

/// `hinder` does something to the folder of a running orchestrator, which ends with `words`; once `repair` has undone
/// it, the run resumes and completes.
async fn hindered(hinder: impl Fn(&Path), words: [&str; 2], repair: impl Fn(&Path)) {
    let place = Place::new();
    let mut process = Process::start(&place, "");
    let engine = Engine::start(MockConfig::default()).await;
    join(&process, &engine).await;
    hinder(&place.output());
    let worker = Worker::register(&process.url, "task", WorkerRole::Train, "a").await;
    let worker = tokio::spawn(worker.work(2));
    trainer::publish(&process.url, &place.output(), 0).await;
    let (mut process, code) = tokio::task::spawn_blocking(move || {
        let deadline = Instant::now() + 2 * PATIENCE;
        while process.child.try_wait().unwrap().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let code = process.child.try_wait().unwrap().and_then(|it| it.code());
        (process, code)
    })
    .await
    .unwrap();
    worker.abort();
    let log = process.log();
    assert_eq!(code, Some(1), "{log}");
    assert!(words.iter().all(|word| log.contains(word)), "{log}");
    repair(&place.output());
    process.restart();
    run_to_the_end(&process, &place).await;
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_named_and_nothing_is_lost() {
    let steps = |output: &Path| output.join("steps.jsonl");
    hindered(
        |output| std::os::unix::fs::symlink("/dev/full", steps(output)).unwrap(),
        [
            "the disk mounted at /dev has ",
            "steps.jsonl needs at least ",
        ],
        |output| std::fs::remove_file(steps(output)).unwrap(),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_hangs_is_named() {
    let steps = |output: &Path| output.join("steps.jsonl");
    hindered(
        |output| {
            // Without a reader, a process that opens it to write waits.
            let made = Command::new("mkfifo").arg(steps(output)).status().unwrap();
            assert!(made.success());
        },
        ["the recorder", "the disk to take the batch of step 1"],
        |output| std::fs::remove_file(steps(output)).unwrap(),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_update_that_was_left_open_is_closed() {
    let place = Place::new();
    let process = Process::start(&place, "");
    let engine = Engine::start(MockConfig::default()).await;
    let open = crate::common::client().post(format!("{}/start_weight_update", engine.url));
    assert_eq!(open.send().await.unwrap().status(), 200);
    join(&process, &engine).await;
    run_to_the_end(&process, &place).await;
    engine.stop().await;
}

/// An example's limit, and the conversation that met it, are the same after a restart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_of_a_rollout_outlive_restarts() {
    let place = Place::new();
    let (mut process, engine, worker) = begun(&place).await;
    let lease = worker.one().await;
    let url = lease.base_url.strip_suffix("/v1").unwrap();
    let told = crate::common::client()
        .post(format!("{url}/limits"))
        .json(&json!({"turns": 2}));
    assert_eq!(told.send().await.unwrap().status(), 200);
    let ask = async |session: &str, words: &str| {
        let body = json!({"model": "m", "messages": [user(words)]});
        crate::common::chat(&lease, session, &body).await
    };
    assert_eq!(ask("a", "one").await.0, 200);
    process.kill_and_restart();
    join(&process, &engine).await;
    assert_eq!(ask("a", "two").await.0, 200);
    let (status, refusal) = ask("b", "three").await;
    assert_eq!(
        (status, &refusal["error"]["param"]),
        (400, &json!("limits.turns"))
    );
    process.kill_and_restart();
    let mut outcome = primerl_core::testing::outcome(1.0);
    outcome.traces = ["a", "b"]
        .map(|session| primerl_core::testing::trace(session, 1.0))
        .into();
    assert!(worker.result(lease.rollout, outcome).await);
    let ends: Vec<Vec<(bool, Option<String>)>> = events(&place.output())
        .into_iter()
        .filter_map(|event| match event {
            Event::RolloutFinished { outcome, .. } => Some(outcome.traces),
            _ => None,
        })
        .map(|traces| {
            traces
                .into_iter()
                .map(|one| (one.truncated, one.stop_condition))
                .collect()
        })
        .collect();
    assert_eq!(
        ends,
        [[(false, None), (true, Some("limit_turns".to_owned()))]]
    );
    engine.stop().await;
}
