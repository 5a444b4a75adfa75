//! What a turn costs the gateway, and a conversation the supervised trainer, with the tiny model.
//!
//! `cargo bench -p primerl-render`. Covered: a full render of short and long conversations, an extension (which must not
//! depend on the length of the conversation), parsing, canonical bytes, and masks.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use primerl_render::testing::{IM_END, write_tiny_model};
use primerl_render::{ExtensionContext, Message, RenderOptions, Renderer, canonical};
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

fn benches(criterion: &mut Criterion) {
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
