//! Answers that must call a tool, read by the parser of their family.

use super::allowed;
use primerl_grammar::{Reasoning, Spec, Vocabulary};
use primerl_render::testing::write_model;
use primerl_render::{AnswerContext, Content, Demand, DemandError, Parsed, Renderer};
use serde_json::{Value, json};

const HERMES: &str = "{% for message in messages %}<|im_start|>{{ message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}{{ tools }}<tool_call><think></think>{% if add_generation_prompt %}<|im_start|>assistant\\n{% endif %}";
const LLAMA: &str = "{% for message in messages %}<|start_header_id|>{{ message['role'] + message['content'] + '<|im_end|>' }}{% endfor %}{{ tools }}{# \"parameters\": #}{% if add_generation_prompt %}<|start_header_id|>{% endif %}";

struct Model {
    renderer: Renderer,
    vocabulary: Vocabulary,
    end: u32,
}

fn model(template: &str, is_special: bool) -> Model {
    let folder = tempfile::tempdir().expect("a folder");
    let added = [
        ("<|im_end|>", true),
        ("<|im_start|>", true),
        ("<|start_header_id|>", true),
        ("<tool_call>", is_special),
        ("</tool_call>", is_special),
        ("<think>", is_special),
        ("</think>", is_special),
    ];
    write_model(
        folder.path(),
        &added,
        &[],
        template,
        "<|im_end|>",
        "<|im_end|>",
    )
    .expect("writes");
    let renderer = Renderer::load(folder.path()).expect("loads");
    let size = renderer.vocabulary_size().expect("is known");
    let vocabulary = Vocabulary::new(renderer.tokenizer(), size).expect("has bytes");
    let end = renderer
        .tokenizer()
        .added_token("<|im_end|>")
        .expect("was added");
    Model {
        renderer,
        vocabulary,
        end,
    }
}

fn tools() -> Vec<Value> {
    let flag = json!({"type": "object", "properties": {"on": {"$ref": "#/$defs/flag"}}, "required": ["on"],
        "additionalProperties": false, "$defs": {"flag": {"type": "boolean"}}});
    let count = json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"], "additionalProperties": false});
    vec![
        json!({"type": "function", "function": {"name": "set \"it\"", "parameters": flag}}),
        json!({"type": "function", "function": {"name": "count", "parameters": count}}),
    ]
}

/// Drawn alike among the allowed tokens.
fn drawn(
    model: &Model,
    demand: &Demand<'_>,
    reasoning: Option<Reasoning>,
    mut seed: u64,
) -> Parsed {
    let grammar = model.renderer.call_grammar(demand).expect("has a grammar");
    let spec = Spec {
        structured_outputs: json!({"grammar": grammar}),
        reasoning,
        ends: vec![model.end],
    };
    let mut masks = model.vocabulary.compile(&spec).expect("compiles");
    let mut tokens = Vec::new();
    while tokens.len() < 3000 {
        let allowed = allowed(&masks.mask().expect("has a mask"));
        seed = seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let token = allowed[((seed >> 33) % allowed.len() as u64) as usize];
        tokens.push(token);
        if token == model.end {
            break;
        }
        masks.push(token).expect("is allowed");
    }
    assert_eq!(tokens.last(), Some(&model.end), "it does not end");
    let context = AnswerContext {
        tools: Some(demand.tools),
        starts_in_reasoning: false,
    };
    model
        .renderer
        .parse_answer(&tokens, &context)
        .expect("decodes")
}

fn check(parsed: &Parsed, names: &[&str]) -> usize {
    assert!(parsed.malformed.is_empty(), "{parsed:?}");
    assert_eq!(parsed.message.content, Content::Null, "{parsed:?}");
    let calls = parsed.message.tool_calls.as_deref().expect("calls a tool");
    for call in calls {
        assert!(names.contains(&call.function.name.as_str()), "{call:?}");
        let arguments: Value =
            serde_json::from_str(call.function.arguments.as_str().expect("is text"))
                .expect("is JSON");
        match call.function.name.as_str() {
            "count" => assert!(arguments["n"].as_u64().is_some_and(|n| n < 10)),
            _ => assert!(arguments["on"].is_boolean()),
        }
    }
    calls.len()
}

#[test]
fn demanded_calls_are_calls_to_their_parser() {
    let tools = tools();
    let names = ["count", "set \"it\""];
    for (template, is_special) in [(HERMES, true), (HERMES, false), (LLAMA, false)] {
        let model = model(template, is_special);
        let any = Demand {
            tools: &tools,
            name: None,
            one_call: false,
            or_json: None,
            prompt: &[],
        };
        let one = Demand {
            one_call: true,
            ..any
        };
        let named = Demand {
            name: Some("count"),
            ..any
        };
        let most = (0..30)
            .map(|seed| check(&drawn(&model, &any, None, seed), &names))
            .max();
        assert!(most > Some(1), "several calls are possible");
        for seed in 0..10 {
            assert_eq!(check(&drawn(&model, &one, None, seed), &names), 1);
            assert_eq!(check(&drawn(&model, &named, None, seed), &names[..1]), 1);
        }
    }
}

#[test]
fn reasoning_may_come_before_a_call() {
    let tools = tools();
    for is_special in [true, false] {
        let model = model(HERMES, is_special);
        let prompt = model
            .renderer
            .tokenizer()
            .encode("<|im_start|>assistant\n")
            .expect("encodes");
        let (open, close) = model.renderer.reasoning_ahead(&prompt).expect("may reason");
        assert_eq!((open.as_deref(), close), (Some("<think>"), "</think>"));
        let begun = model
            .renderer
            .tokenizer()
            .encode("assistant\n<think>\n")
            .expect("encodes");
        assert_eq!(
            model.renderer.reasoning_ahead(&begun),
            Some((None, "</think>"))
        );
        let over = model
            .renderer
            .tokenizer()
            .encode("<think>\n\n</think>\n\n")
            .expect("encodes");
        assert_eq!(model.renderer.reasoning_ahead(&over), None);
        let reasoning = Reasoning {
            open,
            close: close.to_owned(),
        };
        let demand = Demand {
            tools: &tools,
            name: None,
            one_call: true,
            or_json: None,
            prompt: &[],
        };
        for seed in 0..5 {
            let parsed = drawn(&model, &demand, Some(reasoning.clone()), seed);
            assert_eq!(parsed.message.tool_calls.map(|calls| calls.len()), Some(1));
        }
    }
}

/// GLM's prompts end before the newline that its template writes before a block.
#[test]
fn a_newline_that_the_template_writes_before_reasoning_is_allowed() {
    let template = "{% for message in messages %}<|im_start|>{{ message['role'] }}{% if message.reasoning_content %}{{ '\\n<think>' + message.reasoning_content + '</think>\\n' }}{% endif %}{{ message['content'] }}<|im_end|>{% endfor %}{{ tools }}<tool_call>{% if add_generation_prompt %}<|im_start|>assistant{% endif %}";
    let renderer = model(template, true).renderer;
    let ahead = |prompt: &str| {
        let prompt = renderer.tokenizer().encode(prompt).expect("encodes");
        renderer.reasoning_ahead(&prompt).expect("may reason").0
    };
    assert_eq!(ahead("<|im_start|>assistant").as_deref(), Some("\n<think>"));
    assert_eq!(ahead("<|im_start|>assistant\n").as_deref(), Some("<think>"));
    assert_eq!(ahead("<|im_start|>assistant<think>"), None);
}

#[test]
fn an_answer_is_a_call_or_has_its_format() {
    let (tools, schema) = (
        tools(),
        json!({"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
        "additionalProperties": false}),
    );
    let model = model(HERMES, false);
    let demand = Demand {
        tools: &tools,
        name: None,
        one_call: true,
        or_json: Some(&schema),
        prompt: &[],
    };
    let (mut calls, mut answers) = (0, 0);
    for seed in 0..40 {
        let parsed = drawn(&model, &demand, None, seed);
        match &parsed.message.content {
            Content::Null => calls += check(&parsed, &["count", "set \"it\""]),
            Content::Text(text) => {
                let value: Value = serde_json::from_str(text).expect("is JSON");
                assert!(value["x"].is_boolean());
                answers += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(calls > 0 && answers > 0, "{calls} {answers}");
}

#[test]
fn what_cannot_be_demanded_is_told() {
    let tools = tools();
    let refused = |template: &str, demand: &Demand<'_>| {
        model(template, false)
            .renderer
            .call_grammar(demand)
            .expect_err("is refused")
    };
    let any = Demand {
        tools: &tools,
        name: None,
        one_call: false,
        or_json: None,
        prompt: &[],
    };
    let plain = "{% for message in messages %}{{ message['content'] }}{% endfor %}";
    assert_eq!(refused(plain, &any), DemandError::Family("none"));
    assert!(refused(plain, &any).to_string().contains("hermes"));
    assert_eq!(
        refused(HERMES, &Demand { tools: &[], ..any }),
        DemandError::NoTools
    );
    let unknown = Demand {
        name: Some("f"),
        ..any
    };
    assert_eq!(
        refused(HERMES, &unknown),
        DemandError::UnknownTool("f".to_owned())
    );
    let bad = [json!({"type": "function", "function": {"name": "f", "parameters": []}})];
    assert_eq!(
        refused(HERMES, &Demand { tools: &bad, ..any }),
        DemandError::Malformed(0)
    );
}
