//! What a turn costs the gateway, and a conversation the supervised trainer, with the tiny model.
//!
//! `cargo bench -p primerl-render`. Covered: a full render of short and long conversations, an extension (which must not
//! depend on the length of the conversation), one by a tool's result with four tools, parsing, canonical bytes, and masks.
//! `PRIMERL_BENCH_MODEL=path/to/model` measures the extension with a real tokenizer and template.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use primerl_render::testing::{IM_END, write_tiny_model};
use primerl_render::{ExtensionContext, Message, RenderOptions, Renderer, canonical};
use serde_json::json;
use std::hint::black_box;

fn tiny() -> Renderer {
    let folder = tempfile::tempdir().expect("temporary folder");
    write_tiny_model(folder.path()).expect("model folder");
    Renderer::load(folder.path()).expect("loads")
}

fn conversation(turns: usize) -> Vec<Message> {
    let turn = |index| {
        [
            Message::user(format!("Reverse: qwxyz {index}")),
            Message::assistant("<r>zyxwq</r>"),
        ]
    };
    (0..turns).flat_map(turn).collect()
}

/// Four tools, a call, and a result of about 50 tokens.
fn extension_with_tools(criterion: &mut Criterion) {
    let renderer = match std::env::var_os("PRIMERL_BENCH_MODEL") {
        Some(folder) => Renderer::load(folder.as_ref()).expect("loads"),
        None => tiny(),
    };
    let tool = |index: usize| {
        let property = |name: &str| json!({"type": "string", "description": format!("What the {name} of the file is, in a few words.")});
        let properties = json!({"path": property("path"), "content": property("content"), "mode": {"type": "string", "enum": ["a", "w"]}});
        json!({"type": "function", "function": {"name": format!("write_{index}"), "description": "Writes a file below the working folder and tells how long it is.",
            "parameters": {"type": "object", "properties": properties, "required": ["path", "content"]}}})
    };
    let options = RenderOptions {
        tools: Some((0..4).map(tool).collect()),
        ..RenderOptions::default()
    };
    let call = json!({"role": "assistant", "content": "I write it.", "tool_calls": [{"id": "call00000", "type": "function",
        "function": {"name": "write_1", "arguments": "{\"path\": \"a.py\", \"content\": \"print(1)\"}"}}]});
    let answer: Message = serde_json::from_value(call).expect("a message");
    let mut result = Message::text(
        "tool",
        "a.py has been written and is 9 bytes long; the folder now holds 14 files, of which 3 have changed since the \
         last commit: a.py, tests/test_a.py and README.md. Nothing else was touched by this call.",
    );
    result.tool_call_id = Some("call00000".to_owned());
    let (sampled, new) = ([renderer.stop_token_ids()[0]], [result]);
    let previous = ExtensionContext {
        answer: &answer,
        sampled: &sampled,
        options: &options,
    };
    renderer.extend(&previous, &new).expect("extends");
    criterion.bench_function("extend, 4 tools", |bench| {
        bench.iter(|| renderer.extend(black_box(&previous), &new))
    });
}

fn benches(criterion: &mut Criterion) {
    extension_with_tools(criterion);
    let renderer = tiny();
    let options = RenderOptions::default();
    for turns in [1, 10, 100] {
        let messages = conversation(turns);
        criterion.bench_with_input(
            BenchmarkId::new("render", turns),
            &messages,
            |bench, messages| {
                bench.iter(|| renderer.render(black_box(messages), &options));
            },
        );
    }
    let sampled = renderer
        .tokenizer()
        .encode("<r>zyxwq</r><|im_end|>")
        .expect("encodes");
    assert_eq!(sampled.last(), Some(&IM_END));
    let (answer, new) = (
        Message::assistant("<r>zyxwq</r>"),
        [Message::user("Reverse: abcde")],
    );
    let previous = ExtensionContext {
        answer: &answer,
        sampled: &sampled,
        options: &options,
    };
    criterion.bench_function("extend", |bench| {
        bench.iter(|| renderer.extend(black_box(&previous), &new))
    });
    criterion.bench_function("parse", |bench| {
        bench.iter(|| renderer.parse(black_box(&sampled)))
    });
    criterion.bench_function("canonical", |bench| {
        bench.iter(|| canonical(black_box(&answer)))
    });
    let demonstration = conversation(1);
    criterion.bench_function("mask", |bench| {
        bench.iter(|| renderer.render_with_mask(black_box(&demonstration), &options));
    });
}

criterion_group!(render, benches);
criterion_main!(render);
