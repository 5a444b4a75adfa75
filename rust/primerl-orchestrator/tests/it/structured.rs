//! Structured outputs from a client's request to the trainer's batch.

use crate::common::engine::Engine;
use crate::common::trainer::{self, Batch};
use crate::common::worker::{Worker, outcome};
use crate::common::{Orchestrator, Place, client, user};
use primerl_core::Event;
use primerl_engine_server::mock::MockConfig;
use primerl_grammar::{Spec, Vocabulary, replay};
use primerl_orchestrator::Config;
use primerl_orchestrator::envs::wire::{Lease, WorkerRole};
use primerl_record::journal;
use primerl_render::Renderer;
use primerl_render::testing::VOCABULARY_SIZE;
use serde_json::{Value, json};

fn config(place: &Place) -> Config {
    let toml = place
        .toml("", "")
        .replace("max_tokens = 12", "max_tokens = 200");
    Config::from_toml(&toml, "test").unwrap()
}

struct Scene {
    place: Place,
    orchestrator: Orchestrator,
    engine: Engine,
    lease: Lease,
}

impl Scene {
    async fn new() -> Scene {
        let place = Place::new();
        Scene::with(config(&place), place).await
    }

    async fn with(config: Config, place: Place) -> Scene {
        let orchestrator = Orchestrator::start(config).await;
        let engine = Engine::start_rendering(MockConfig::default(), &place.path("model")).await;
        orchestrator.join(&engine.url).await;
        trainer::publish(&orchestrator.url, &place.output(), 0).await;
        let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "a").await;
        let lease = worker.one().await;
        Scene {
            place,
            orchestrator,
            engine,
            lease,
        }
    }

    async fn ask(&self, route: &str, body: Value) -> (u16, Value) {
        let request = client()
            .post(format!("{}/{route}", self.lease.base_url))
            .bearer_auth(self.lease.api_key.reveal())
            .json(&body);
        let answer = request.send().await.unwrap();
        let status = answer.status().as_u16();
        (status, answer.json().await.unwrap())
    }

    async fn end(self) -> Place {
        self.orchestrator.shutdown.cancel();
        self.orchestrator.end().await.unwrap();
        self.engine.stop().await;
        self.place
    }
}

fn schema() -> Value {
    json!({"enum": ["yes", "no \"way\""]})
}

fn obeys(text: &Value) {
    let text = text.as_str().expect("is a text");
    let value: Value = serde_json::from_str(text).expect(text);
    assert!(value == "yes" || value == "no \"way\"", "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_dialects_field_for_a_schema_is_enforced_and_recorded() {
    let scene = Scene::new().await;
    let named = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema()}});
    let flat = json!({"type": "json_schema", "name": "n", "schema": schema()});
    let chat = json!({"messages": [user("hi")]});
    for (name, format) in [
        ("response_format", named),
        ("structured_outputs", json!({"json": schema()})),
    ] {
        for stream in [false, true] {
            let mut body = chat.clone();
            body[name] = format.clone();
            if stream {
                body["n"] = json!(2);
            }
            let (status, answer) = scene.ask("chat/completions", body).await;
            assert_eq!(status, 200, "{answer}");
            obeys(&answer["choices"][0]["message"]["content"]);
        }
    }
    let body = json!({"input": "hi", "text": {"format": flat}});
    let (status, answer) = scene.ask("responses", body).await;
    assert_eq!(status, 200, "{answer}");
    obeys(&answer["output"][0]["content"][0]["text"]);
    let body = json!({"max_tokens": 100, "messages": [user("hi")],
        "output_config": {"format": {"type": "json_schema", "schema": schema()}}});
    let (status, answer) = scene.ask("messages", body).await;
    assert_eq!(status, 200, "{answer}");
    obeys(&answer["content"][0]["text"]);
    let body =
        json!({"prompt": "hi", "structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 30});
    let (status, answer) = scene.ask("completions", body).await;
    assert_eq!(status, 200, "{answer}");
    assert!(["yes", "no"].contains(&answer["choices"][0]["text"].as_str().unwrap()));
    let (status, plain) = scene.ask("chat/completions", chat).await;
    assert_eq!(status, 200, "{plain}");

    let place = scene.end().await;
    let mut grammars = Vec::new();
    journal::read_from(
        &place.output().join("journal"),
        0,
        |_, journal::Entry(_, event)| {
            if let Event::TurnFinished { turn, .. } = event {
                grammars.push((turn.grammar.clone(), turn.sampled.clone()));
            }
        },
    )
    .unwrap();
    assert_eq!(grammars.len(), 2 + 2 * 2 + 3 + 1);
    let renderer = Renderer::load(&place.path("model")).unwrap();
    let vocabulary = Vocabulary::new(renderer.tokenizer(), VOCABULARY_SIZE).unwrap();
    let last = grammars.pop().unwrap();
    assert_eq!(last.0, None, "nothing was structured");
    for (grammar, sampled) in grammars {
        let grammar = grammar.expect("is recorded");
        assert_eq!(grammar.masks, *vocabulary.identity());
        let spec: Spec = serde_json::from_str(&grammar.spec).unwrap();
        assert_eq!(
            replay(&vocabulary, &spec, &sampled).unwrap().index.len(),
            sampled.len()
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_promised_is_refused_with_its_reason() {
    let scene = Scene::new().await;
    let unknown = json!({"type": "array", "uniqueItems": true});
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": unknown}});
    let body = json!({"messages": [user("hi")], "response_format": format});
    let (status, answer) = scene.ask("chat/completions", body).await;
    assert_eq!(status, 400, "{answer}");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("uniqueItems"), "{message}");
    // The tiny model has no syntax for calls.
    let body = json!({"messages": [user("hi")], "tool_choice": "required"});
    let (status, answer) = scene.ask("chat/completions", body).await;
    assert_eq!(
        (status, &answer["error"]["param"]),
        (400, &json!("tool_choice"))
    );
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("hermes"), "{message}");
    scene.end().await;
}

/// A family of which the calls are no JSON, and one that answers in channels.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_required_call_is_written_as_the_model_writes_calls() {
    let template = "{{ tools }}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}{{ message.tool_calls }}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    let mode = json!({"type": "object", "properties": {"mode": {"type": "string", "enum": ["5", "b"]}},
        "required": ["mode"], "additionalProperties": false});
    let tool = json!({"type": "function", "function": {"name": "set", "parameters": mode}});
    for parser in ["qwen3_coder", "harmony"] {
        let place = Place::new();
        std::fs::write(place.path("model").join("chat_template.jinja"), template).unwrap();
        let tables = format!("[parsers]\ntool = {parser:?}\nreasoning = \"none\"\n");
        let toml = place
            .toml("", &tables)
            .replace("max_tokens = 12", "max_tokens = 300");
        let scene = Scene::with(Config::from_toml(&toml, "test").unwrap(), place).await;
        for choice in [
            json!("required"),
            json!({"type": "function", "function": {"name": "set"}}),
        ] {
            let body = json!({"messages": [user("hi")], "tools": [tool], "tool_choice": choice});
            let (status, answer) = scene.ask("chat/completions", body).await;
            assert_eq!(status, 200, "{parser}: {answer}");
            let message = &answer["choices"][0]["message"];
            assert_eq!(message["content"], Value::Null, "{answer}");
            let call = &message["tool_calls"][0]["function"];
            let arguments = call["arguments"].as_str().unwrap();
            let arguments: Value = serde_json::from_str(arguments).unwrap();
            let is_mode = arguments == json!({"mode": "5"}) || arguments == json!({"mode": "b"});
            assert!(is_mode && call["name"] == "set", "{answer}");
        }
        let named = json!({"type": "function", "function": {"name": "a>b c", "parameters": mode}});
        let body = json!({"messages": [user("hi")], "tools": [named], "tool_choice": "required"});
        let (status, answer) = scene.ask("chat/completions", body).await;
        let error = &answer["error"];
        assert_eq!((status, &error["param"]), (400, &json!("tool_choice")));
        assert!(
            error["message"].as_str().unwrap().contains("a>b c"),
            "{answer}"
        );
        if parser == "harmony" {
            let body =
                json!({"messages": [user("hi")], "response_format": {"type": "json_object"}});
            let (status, answer) = scene.ask("chat/completions", body).await;
            let param = &answer["error"]["param"];
            assert_eq!(
                (status, param),
                (400, &json!("response_format")),
                "{answer}"
            );
        }
        scene.end().await;
    }
}

/// Two rollouts of a group are trained; each answer of theirs has its grammar.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_trainer_gets_the_grammar_of_each_answer() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(config(&place)).await;
    let engine = Engine::start_rendering(MockConfig::default(), &place.path("model")).await;
    orchestrator.join(&engine.url).await;
    let url = orchestrator.url.clone();
    let agent = tokio::spawn(async move {
        let worker = Worker::register(&url, "task", WorkerRole::Train, "a").await;
        loop {
            let Ok(answer) = worker.lease(4).await else {
                return;
            };
            if answer.finished {
                return;
            }
            for lease in answer.rollouts {
                let body =
                    json!({"messages": [user("hi")], "structured_outputs": {"json": schema()}});
                let request = client().post(format!("{}/chat/completions", lease.base_url));
                let request = request.bearer_auth(lease.api_key.reveal()).json(&body);
                let answer = request.header("x-session-id", "seat").send().await;
                if answer.map_or(true, |answer| answer.status() != 200) {
                    return;
                }
                let reward = (lease.rollout.0 % 2) as f64;
                worker.result(lease.rollout, outcome("seat", reward)).await;
            }
        }
    });
    let batches: Vec<Batch> = trainer::train(orchestrator.url.clone(), place.output()).await;
    orchestrator.end().await.unwrap();
    agent.abort();
    engine.stop().await;
    assert_eq!(batches.len(), 4);
    for batch in &batches {
        let mut told = 0;
        for micro_batch in &batch.micro_batches {
            let grammars = &micro_batch.grammars;
            assert!(grammars.kinds.len() <= 1, "equal ones are named once");
            told += grammars
                .runs
                .iter()
                .map(|(begin, end, _)| end - begin)
                .sum::<u64>();
        }
        assert_eq!(told, batch.loss_tokens);
    }
}

/// An engine that enforces the constraints it gets, and does not report them: vLLM is one.
async fn silent_engine(good: &str) -> (String, tokio::task::JoinHandle<()>) {
    let good = good.to_owned();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let handler = move |request: axum::extract::Request| {
        let good = good.clone();
        async move {
            use axum::response::IntoResponse;
            let (parts, body) = request.into_parts();
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            let path = parts.uri.path_and_query().unwrap().to_string();
            let request = client().request(parts.method, format!("{good}{path}"));
            let request = request
                .header("content-type", "application/json")
                .body(body);
            let answer = request.send().await.unwrap();
            let (status, bytes) = (answer.status(), answer.bytes().await.unwrap());
            let Ok(mut body) = serde_json::from_slice::<Value>(&bytes) else {
                return (status, bytes).into_response();
            };
            for choice in body["choices"].as_array_mut().into_iter().flatten() {
                choice.as_object_mut().unwrap().remove("grammar");
            }
            (status, axum::Json(body)).into_response()
        }
    };
    let app = axum::Router::new().fallback(handler);
    let serving = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    (url, serving)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_engine_does_not_record_is_not_trained() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(config(&place)).await;
    let engine = Engine::start_rendering(MockConfig::default(), &place.path("model")).await;
    let (silent, serving) = silent_engine(&engine.url).await;
    orchestrator.join(&silent).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "a").await;
    let scene = Scene {
        lease: worker.one().await,
        place,
        orchestrator,
        engine,
    };
    let body = json!({"messages": [user("hi")], "structured_outputs": {"json": schema()}});
    let (status, answer) = scene.ask("chat/completions", body).await;
    let code = &answer["error"]["code"];
    assert_eq!(
        (status, code),
        (400, &json!("structured_outputs_not_recorded")),
        "{answer}"
    );
    let body = json!({"messages": [user("hi")], "max_tokens": 3});
    assert_eq!(scene.ask("chat/completions", body).await.0, 200);
    let place = scene.end().await;
    serving.abort();
    let mut turns = 0;
    journal::read_from(
        &place.output().join("journal"),
        0,
        |_, journal::Entry(_, event)| {
            turns += usize::from(matches!(event, Event::TurnFinished { .. }));
        },
    )
    .unwrap();
    assert_eq!(turns, 1, "the refused one is not recorded");
}
