//! Demanded calls of every family of models: drawn calls are read by the family's parser, and what its template writes
//! is allowed.

mod models;
mod tools;
mod values;

use super::allowed;
use models::{FAMILIES, Family};
use primerl_grammar::{Reasoning, Spec, Vocabulary};
use primerl_render::testing::TestModel;
use primerl_render::{
    AnswerContext, Content, Demand, LoadOptions, Message, Parsed, ParserSetting, RenderOptions,
    Renderer, tool_parsers,
};
use serde_json::{Map, Value, json};
use tools::{function, obeys, tools};

struct Model {
    renderer: Renderer,
    vocabulary: Vocabulary,
    end: u32,
    markers: Vec<(&'static str, u32)>,
}

impl Model {
    /// `is_shown`: the template writes calls.
    fn new(family: &Family, is_special: bool, is_shown: bool) -> Self {
        let mut added = vec![("<|im_end|>", true), ("<|im_start|>", true)];
        added.extend(family.markers.iter().map(|marker| (*marker, is_special)));
        let calls = if is_shown { family.calls } else { "" };
        let template = format!(
            "{{% for message in messages %}}<|im_start|>{{{{ message.role + '\\n' }}}}{{{{ message.content or '' }}}}{{% if message.tool_calls %}}{{% set calls = message.tool_calls | map(attribute='function') | list %}}{calls}{{% endif %}}<|im_end|>{{{{ '\\n' }}}}{{% endfor %}}{{{{ tools }}}}{{% if add_generation_prompt %}}<|im_start|>{{{{ 'assistant\\n' }}}}{{% endif %}}"
        );
        let named = |name: &str| Some(ParserSetting::Name(name.to_owned()));
        let model = TestModel {
            added: &added,
            merges: &[
                ("\"", ":"),
                ("<", "/"),
                ("\n", "<"),
                ("u", "l"),
                ("n", "ul"),
                ("nul", "l"),
            ],
            template: &template,
            pad: "<|im_end|>",
            options: LoadOptions {
                tool_parser: named(family.parser),
                reasoning_parser: named(family.reasoning),
                ..LoadOptions::default()
            },
            ..TestModel::default()
        };
        let renderer = model.renderer();
        let size = renderer.vocabulary_size().expect("is known");
        let vocabulary = Vocabulary::new(renderer.tokenizer(), size).expect("has bytes");
        let id = |text| renderer.tokenizer().added_token(text).expect("was added");
        let markers = family.markers.iter().filter(|_| is_special);
        let markers = markers.map(|text| (*text, id(text))).collect();
        let end = id("<|im_end|>");
        Model {
            renderer,
            vocabulary,
            end,
            markers,
        }
    }

    fn spec(&self, demand: &Demand<'_>, reasoning: Option<Reasoning>) -> Spec {
        let grammar = self.renderer.call_grammar(demand).expect("has a grammar");
        Spec {
            structured_outputs: json!({"grammar": grammar}),
            reasoning,
            ends: vec![self.end],
        }
    }

    /// An answer of tokens drawn alike among the allowed ones.
    fn drawn(&self, spec: &Spec, seed: &mut u64) -> Vec<u32> {
        let mut masks = self.vocabulary.compile(spec).expect("compiles");
        let mut tokens = Vec::new();
        while tokens.len() < 6000 {
            let allowed = allowed(&masks.mask().unwrap_or_else(|error| {
                panic!("{error} after {:?}", self.text(&tokens));
            }));
            *seed = seed
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let token = allowed[((*seed >> 33) % allowed.len() as u64) as usize];
            tokens.push(token);
            if token == self.end {
                return tokens;
            }
            masks.push(token).expect("is allowed");
        }
        panic!("it does not end: {}", self.text(&tokens));
    }

    fn text(&self, tokens: &[u32]) -> String {
        self.renderer
            .tokenizer()
            .decode(tokens, false)
            .expect("decodes")
    }

    fn parsed(&self, tokens: &[u32], tools: &[Value]) -> Parsed {
        let context = AnswerContext {
            tools: Some(tools),
            starts_in_reasoning: false,
        };
        self.renderer
            .parse_answer(tokens, &context)
            .expect("decodes")
    }

    /// Whether the grammar allows these tokens, and the answer to end after them.
    fn allows(&self, spec: &Spec, text: &str) -> Result<(), String> {
        let tokens = self.renderer.tokenizer().encode(text).expect("encodes");
        let mut masks = self
            .vocabulary
            .compile(spec)
            .map_err(|error| error.to_string())?;
        for (place, token) in tokens.iter().chain([&self.end]).enumerate() {
            let mask = masks.mask().map_err(|error| error.to_string())?;
            if !allowed(&mask).contains(token) {
                let (before, next) = (self.text(&tokens[..place]), self.text(&[*token]));
                return Err(format!("{next:?} is not allowed after {before:?}"));
            }
            if *token != self.end {
                masks.push(*token).map_err(|error| error.to_string())?;
            }
        }
        Ok(())
    }
}

/// That an answer is calls of these tools; how many.
fn check_read(model: &Model, tokens: &[u32], tools: &[Value]) -> usize {
    let parsed = model.parsed(tokens, tools);
    assert!(parsed.malformed.is_empty(), "{parsed:?}");
    assert_eq!(parsed.message.content, Content::Null, "{parsed:?}");
    for (text, id) in &model.markers {
        let ids = tokens.iter().filter(|token| *token == id).count();
        let count = parsed.text.matches(text).count();
        assert_eq!(count, ids, "{text} is its token: {}", parsed.text);
    }
    let calls = parsed.message.tool_calls.as_deref().expect("calls a tool");
    let names: Vec<_> = tools.iter().map(|tool| &tool["function"]["name"]).collect();
    let is_known = |name: &str| names.iter().any(|known| **known == name);
    assert!(
        calls.iter().all(|call| is_known(&call.function.name)),
        "{calls:?}"
    );
    calls.len()
}

/// Likewise, and that the arguments obey their schema.
fn check(model: &Model, tokens: &[u32], tools: &[Value]) -> usize {
    let count = check_read(model, tokens, tools);
    let parsed = model.parsed(tokens, tools);
    for call in parsed.message.tool_calls.iter().flatten() {
        let tool = tools
            .iter()
            .find(|tool| tool["function"]["name"] == call.function.name);
        let schema = &tool.expect("is known")["function"]["parameters"];
        let arguments = call.function.arguments.as_str().expect("is text");
        let arguments: Value = serde_json::from_str(arguments).expect("is JSON");
        assert!(
            obeys(&arguments, schema, schema),
            "{arguments} of {:?}",
            parsed.text
        );
    }
    count
}

const ANY: Demand<'static> = Demand {
    tools: &[],
    name: None,
    one_call: false,
    or_json: None,
    prompt: &[],
};

#[test]
fn every_family_has_a_grammar() {
    let tested: Vec<_> = FAMILIES.iter().map(|family| family.parser).collect();
    for parser in tool_parsers().filter(|parser| *parser != "none") {
        assert!(tested.contains(&parser), "{parser}");
    }
}

#[test]
fn drawn_calls_are_read_by_their_parser() {
    let tools = tools();
    for family in FAMILIES {
        for (is_special, is_shown) in [(true, true), (false, true), (true, false)] {
            let model = Model::new(family, is_special, is_shown);
            let any = Demand {
                tools: &tools,
                ..ANY
            };
            let one = Demand {
                one_call: true,
                ..any
            };
            let named = Demand {
                name: Some("clock"),
                ..any
            };
            let seed = &mut 1;
            let spec = model.spec(&any, None);
            // Several calls come soon, if they can come at all.
            let mut counts = (0..24).map(|_| check(&model, &model.drawn(&spec, seed), &tools));
            let has_several = counts.any(|count| count > 1);
            assert_eq!(has_several, family.most_calls > 1, "{}", family.parser);
            counts.by_ref().take(6).for_each(drop);
            let spec = model.spec(&one, None);
            for _ in 0..4 {
                assert_eq!(check(&model, &model.drawn(&spec, seed), &tools), 1);
            }
            let spec = model.spec(&named, None);
            for _ in 0..3 {
                assert_eq!(check(&model, &model.drawn(&spec, seed), &tools[1..2]), 1);
            }
        }
    }
}

#[test]
fn what_the_template_writes_is_allowed() {
    let tools = tools();
    let written = [
        (
            "get_weather",
            json!({"city": "Zürich", "days": 2, "exact": true, "note": null, "kind": "a b",
            "area": {"x": false, "a": "</p"}}),
        ),
        (
            "get_weather",
            json!({"city": "a <b>", "exact": false, "note": "5 m", "area": {"x": true}}),
        ),
        ("clock", json!({})),
        (
            "f.other-2",
            json!({"Tree": {"leaf": true, "next": {"leaf": false}}, "tags": ["a", "b"], "any": 2.5,
            "fixed": 7, "code": "ab/3", "least": "x y", "either": null}),
        ),
        (
            "f.other-2",
            json!({"Tree": {"leaf": true}, "any": [null], "code": "cc/0", "least": 12, "either": true}),
        ),
    ];
    for family in FAMILIES {
        let model = Model::new(family, true, true);
        let spec = model.spec(
            &Demand {
                tools: &tools,
                ..ANY
            },
            None,
        );
        for calls in written
            .chunks(family.most_calls.min(2))
            .chain(written.chunks(1))
        {
            let calls = if family.parser == "llama3_json" {
                &calls[..1]
            } else {
                calls
            };
            let call = |(name, arguments): &(&str, Value)| json!({"type": "function", "id": "call00000", "function": {"name": name, "arguments": arguments.to_string()}});
            let message = json!({"role": "assistant", "content": null, "tool_calls": calls.iter().map(call).collect::<Vec<_>>()});
            let message: Message = serde_json::from_value(message).expect("a message");
            let options = RenderOptions {
                tools: None,
                add_generation_prompt: false,
                template_kwargs: Map::new(),
                ..RenderOptions::default()
            };
            let text = model
                .renderer
                .render_text(&[Message::user("x"), message], &options)
                .expect("renders");
            let (_, answer) = text.split_once("assistant\n").expect("an answer");
            let answer = answer.split_once("<|im_end|>").expect("ends").0;
            model
                .allows(&spec, answer)
                .unwrap_or_else(|problem| panic!("{}: {problem}", family.parser));
            let tokens = model.renderer.tokenizer().encode(answer).expect("encodes");
            assert_eq!(check(&model, &tokens, &tools), calls.len(), "{answer}");
        }
    }
}

#[test]
fn reasoning_may_come_before_a_call() {
    let tools = tools();
    for family in FAMILIES.iter().filter(|family| family.reasoning != "none") {
        let model = Model::new(family, true, true);
        let prompt = model
            .renderer
            .tokenizer()
            .encode("<|im_start|>assistant\n")
            .expect("encodes");
        // Harmony's is a channel of the answer, and part of the grammar.
        let reasoning = model
            .renderer
            .reasoning_ahead(&prompt)
            .map(|(open, close)| Reasoning {
                open,
                close: close.to_owned(),
            });
        assert_eq!(reasoning.is_none(), family.reasoning == "harmony");
        let demand = Demand {
            tools: &tools,
            name: Some("clock"),
            prompt: &prompt,
            ..ANY
        };
        let spec = model.spec(&demand, reasoning);
        let seed = &mut 3;
        let has_reasoning = (0..24).filter(|_| {
            let tokens = model.drawn(&spec, seed);
            assert_eq!(check(&model, &tokens, &tools), 1);
            model
                .parsed(&tokens, &tools)
                .message
                .reasoning_content
                .is_some()
        });
        assert!(has_reasoning.count() > 0, "{}", family.parser);
    }
}

#[test]
fn a_channel_that_the_prompt_opened_is_continued() {
    let tools = tools();
    let family = FAMILIES.iter().find(|family| family.parser == "harmony");
    let model = Model::new(family.expect("a family"), true, true);
    let call = "<|start|>assistant<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}<|call|>";
    let opened = "<|channel|>analysis<|message|>";
    for (prompt, answer, is_allowed) in [
        (opened, format!("Hm.\n<|end|>{call}"), true),
        (opened, call.replace("<|start|>assistant", ""), false),
        (opened, format!("Hm. <|end|>{call}"), true),
        ("", format!("{opened}Hm.<|end|>{call}"), true),
        ("", call.replace("<|start|>assistant", ""), true),
        (
            "",
            format!("{opened}Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"),
            false,
        ),
    ] {
        let prompt = model
            .renderer
            .tokenizer()
            .encode(&format!("<|start|>assistant{prompt}"));
        let prompt = prompt.expect("encodes");
        let demand = Demand {
            tools: &tools,
            prompt: &prompt,
            ..ANY
        };
        let spec = model.spec(&demand, None);
        assert_eq!(model.allows(&spec, &answer).is_ok(), is_allowed, "{answer}");
    }
}
