//! What a turn costs the gateway, and a conversation the supervised trainer, with the tiny model.
//!
//! `cargo bench -p primerl-render`. Covered: a full render of short and long conversations, an extension (which must not
//! depend on the length of the conversation), one by a tool's result with four tools, parsing (an answer of 200 tokens with
//! reasoning and a call, for each family, budget 15 us; and a megabyte without an end, linear time), canonical bytes, masks.
//! `PRIMERL_BENCH_MODEL=path/to/model` measures the extension with a real tokenizer and template.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use primerl_render::testing::{CHATML, IM_END, tiny, write_model};
use primerl_render::{
    AnswerContext, ExtensionContext, LoadOptions, Message, ParserSetting, RenderOptions, Renderer,
    canonical, tool_parsers,
};
use serde_json::json;
use std::hint::black_box;

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

/// Thought, content and a call as each family writes it.
fn answer(tool_parser: &str) -> String {
    let thought = "I should look at the weather there before I give an answer. ".repeat(8);
    let arguments =
        r#"{"city": "Berlin", "days": 3, "note": "a longer text, as the call has a reason"}"#;
    let call = match tool_parser {
        "qwen3_coder" => "\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBerlin\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>".to_owned(),
        "glm" => "\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Berlin</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>".to_owned(),
        "minimax" => "\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Berlin</parameter>\n</invoke>\n</minimax:tool_call>".to_owned(),
        "kimi" => format!("<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|><|tool_calls_section_end|>"),
        "deepseek" => format!("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        "deepseek_v32" => "\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Berlin</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>".to_owned(),
        "gemma4" => "<|tool_call>call:get_weather{city:<|\"|>Berlin<|\"|>,days:3}<tool_call|>".to_owned(),
        "cohere" => format!("<|START_ACTION|>[\n    {{\"tool_call_id\": \"0\", \"tool_name\": \"get_weather\", \"parameters\": {arguments}}}\n]<|END_ACTION|>"),
        "mistral" => format!("[TOOL_CALLS]get_weather[ARGS]{arguments}"),
        "harmony" => {
            return format!("<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{arguments}<|call|>");
        }
        "llama3_json" => return format!(r#"{{"name": "get_weather", "parameters": {{"city": "{thought}"}}}}"#),
        "llama3_pythonic" => return format!("[get_weather(city=\"{thought}\", days=3)]"),
        _ => format!("\n<tool_call>\n{{\"name\": \"get_weather\", \"arguments\": {arguments}}}\n</tool_call>"),
    };
    format!("<think>\n{thought}\n</think>\n\nI look.{call}")
}

fn parsers(criterion: &mut Criterion) {
    let tool = json!({"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "note": {"type": "string"}}}}});
    let tools = vec![tool; 8];
    let context = AnswerContext {
        tools: Some(&tools),
        starts_in_reasoning: false,
    };
    for tool_parser in tool_parsers() {
        let folder = tempfile::tempdir().expect("temporary folder");
        // Words as tokens: about four bytes each, as in a real vocabulary.
        let added = [
            "<|im_end|>",
            "<think>",
            "</think>",
            "I should",
            " look at",
            " the ",
            "weather",
            " there before",
            " I give",
            " an answer. ",
        ];
        let added = added.map(|token| (token, token.starts_with('<')));
        write_model(
            folder.path(),
            &added,
            &[],
            CHATML,
            "<|im_end|>",
            "<|im_end|>",
        )
        .expect("model folder");
        let harmony = tool_parser == "harmony";
        let options = LoadOptions {
            tool_parser: Some(ParserSetting::Name(tool_parser.to_owned())),
            reasoning_parser: Some(ParserSetting::Name(
                if harmony { "harmony" } else { "think" }.to_owned(),
            )),
            ..LoadOptions::default()
        };
        let renderer = Renderer::load_with(folder.path(), &options).expect("loads");
        let encode = |text: &str| renderer.tokenizer().encode(text).expect("encodes");
        let sampled = encode(&answer(tool_parser));
        let parsed = renderer.parse_answer(&sampled, &context).expect("parses");
        assert_eq!(parsed.message.has_tool_calls(), tool_parser != "none");
        criterion.bench_function(
            &format!("parse/{tool_parser}/{}_tokens", sampled.len()),
            |bench| bench.iter(|| renderer.parse_answer(black_box(&sampled), &context)),
        );
        let text = answer(tool_parser);
        let half = &text[..text.find("city").unwrap_or(text.len() / 2)];
        let endless = encode(&format!("{half}{}", "{\"a < [b\": 'c'}\n\n".repeat(60_000)));
        criterion.bench_function(&format!("parse/{tool_parser}/endless"), |bench| {
            bench.iter(|| {
                let mut stream = renderer.answer_stream(&context);
                for ids in endless.chunks(4) {
                    black_box(stream.push(&renderer, ids).expect("pushes"));
                }
                stream.finish(&renderer)
            })
        });
    }
}

fn short() -> Criterion {
    Criterion::default().sample_size(10)
}

criterion_group!(render, benches);
criterion_group! { name = answers; config = short(); targets = parsers }
criterion_main!(render, answers);
