//! Sample texts of every family, a model for each, and what holds for every parsed answer.
#![allow(dead_code, reason = "each test file uses its part")]

use primerl_render::testing::TestModel;
use primerl_render::{
    AnswerContext, LoadError, LoadOptions, Parsed, ParserSetting, Renderer, SegmentKind,
};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

/// What the sample calls ask for.
pub const CITY: &str = "Zürich";

/// How a family writes a call of `get_weather` for [`CITY`].
#[derive(Debug)]
pub struct Family {
    pub name: &'static str,
    pub reasoning_parser: &'static str,
    /// A thought `Hm.\nOk`; empty where the family has none.
    pub reasoning: &'static str,
    pub call: &'static str,
    /// The id that the model writes.
    pub id: Option<&'static str>,
    pub arguments: &'static str,
    /// Calls of `get_weather` and `clock`.
    pub two_calls: &'static str,
    /// A call that cannot be read.
    pub broken: &'static str,
    /// What a call begins with.
    pub opener: &'static str,
    pub markers: &'static [&'static str],
    /// Whether a call may follow content.
    pub content_before_call: bool,
    /// Whether markers announce a call, so that one can follow a broken one.
    pub marked: bool,
}

const HERMES: Family = Family {
    name: "hermes",
    reasoning_parser: "think",
    reasoning: "<think>\nHm.\nOk\n</think>\n\n",
    call: "\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\"}}\n</tool_call>",
    id: None,
    arguments: "{\"city\": \"Zürich\"}",
    two_calls: "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"clock\"}\n</tool_call>\n",
    broken: "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": }\n</tool_call>",
    opener: "<tool_call>",
    markers: &["<tool_call>", "</tool_call>"],
    content_before_call: true,
    marked: true,
};

pub const FAMILIES: &[Family] = &[
    HERMES,
    Family {
        name: "qwen3_coder",
        call: "\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n</tool_call>",
        two_calls: "<tool_call>\n<function=get_weather>\n</function>\n</tool_call>\n<function=clock></function>",
        broken: "<tool_call>\n<function=get_weather>\n<parameter=city>\nx\n</function>\n</tool_call>",
        markers: &[
            "<tool_call>",
            "</tool_call>",
            "<function=",
            "</function>",
            "<parameter=",
            "</parameter>",
        ],
        ..HERMES
    },
    Family {
        name: "glm",
        reasoning: "\n<think>Hm.\nOk</think>\n",
        call: "\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n</tool_call>",
        two_calls: "\n<tool_call>get_weather\n</tool_call>\n<tool_call>clock</tool_call>",
        broken: "<tool_call>get_weather\n<arg_key>city</arg_key>\n</tool_call>",
        markers: &[
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ],
        ..HERMES
    },
    Family {
        name: "kimi",
        reasoning: "<think>Hm.\nOk</think>",
        call: "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"Zürich\"}<|tool_call_end|><|tool_calls_section_end|>",
        id: Some("functions.get_weather:0"),
        two_calls: "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        broken: "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\"}<|tool_call_end|><|tool_calls_section_end|>",
        opener: "<|tool_calls_section_begin|><|tool_call_begin|>",
        markers: &[
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
        ],
        ..HERMES
    },
    Family {
        name: "deepseek",
        call: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Zürich\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        two_calls: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        broken: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": }\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        opener: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        markers: &[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ],
        ..HERMES
    },
    Family {
        name: "deepseek_v32",
        call: "\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Zürich</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        two_calls: "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"clock\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        broken: "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">x\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        opener: "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"",
        markers: &["｜DSML｜"],
        ..HERMES
    },
    Family {
        name: "gemma4",
        reasoning_parser: "gemma4",
        reasoning: "<|channel>thought\nHm.\nOk\n<channel|>",
        call: "<|tool_call>call:get_weather{city:<|\"|>Zürich<|\"|>}<tool_call|>",
        two_calls: "<|tool_call>call:get_weather{}<tool_call|><|tool_call>call:clock{}<tool_call|>",
        broken: "<|tool_call>call:get_weather{city:Zürich}<tool_call|>",
        opener: "<|tool_call>call:get_weather{",
        markers: &[
            "<|tool_call>",
            "<tool_call|>",
            "<|\"|>",
            "<|channel>",
            "<channel|>",
        ],
        ..HERMES
    },
    Family {
        name: "cohere",
        reasoning_parser: "cohere",
        reasoning: "<|START_THINKING|>Hm.\nOk<|END_THINKING|>",
        call: "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"get_weather\", \"parameters\": {\"city\": \"Zürich\"}}\n]<|END_ACTION|>",
        two_calls: "<|START_ACTION|>[{\"tool_name\": \"get_weather\", \"parameters\": {}}, {\"tool_name\": \"clock\"}]<|END_ACTION|>",
        broken: "<|START_ACTION|>[{\"tool_name\": \"get_weather\", \"parameters\": }]<|END_ACTION|>",
        opener: "<|START_ACTION|>[{",
        markers: &[
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
        ],
        ..HERMES
    },
    Family {
        name: "minimax",
        call: "\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Zürich</parameter>\n</invoke>\n</minimax:tool_call>",
        two_calls: "<minimax:tool_call>\n<invoke name=\"get_weather\">\n</invoke>\n<invoke name=\"clock\"></invoke>\n</minimax:tool_call>",
        broken: "<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">x\n</invoke>\n</minimax:tool_call>",
        opener: "<minimax:tool_call><invoke name=",
        markers: &[
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            "<invoke name=",
            "</invoke>",
            "<parameter name=",
            "</parameter>",
        ],
        ..HERMES
    },
    Family {
        name: "mistral",
        reasoning_parser: "mistral",
        reasoning: "[THINK]Hm.\nOk[/THINK]",
        call: "[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{\"city\": \"Zürich\"}",
        id: Some("a1b2c3d4e"),
        two_calls: "[TOOL_CALLS] [{\"name\": \"get_weather\", \"arguments\": {}}, {\"name\": \"clock\", \"arguments\": {}}]",
        broken: "[TOOL_CALLS]get_weather[ARGS]{\"city\": }",
        opener: "[TOOL_CALLS]get_weather[ARGS]{",
        markers: &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"],
        ..HERMES
    },
    Family {
        name: "llama3_json",
        reasoning_parser: "none",
        reasoning: "",
        call: "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Zürich\"}}",
        two_calls: "<|python_tag|>{\"name\": \"get_weather\", \"parameters\": {}}; {\"name\": \"clock\", \"parameters\": {}}",
        broken: "<|python_tag|>{\"name\": \"get_weather\", \"parameters\": 1}",
        opener: "{\"name\": {",
        markers: &["<|python_tag|>"],
        content_before_call: false,
        marked: false,
        ..HERMES
    },
    Family {
        name: "llama3_pythonic",
        reasoning_parser: "none",
        reasoning: "",
        call: "[get_weather(city='Zürich')]",
        two_calls: "<|python_start|>[get_weather(days=1, area={'a': [True, None]}), clock()]<|python_end|>",
        broken: "[get_weather(city=Zürich)]",
        opener: "[get_weather(",
        markers: &[
            "<|python_start|>",
            "<|python_end|>",
            "<|tool_call_start|>",
            "<|tool_call_end|>",
        ],
        content_before_call: false,
        marked: false,
        ..HERMES
    },
    Family {
        name: "harmony",
        reasoning_parser: "harmony",
        reasoning: "<|channel|>analysis<|message|>Hm.\nOk<|end|><|start|>assistant",
        call: " to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{\"city\": \"Zürich\"}<|call|>",
        two_calls: "<|channel|>commentary to=functions.get_weather<|message|>{}<|call|><|start|>assistant to=functions.clock<|channel|>commentary json<|message|>{}<|call|>",
        broken: " to=functions.get_weather<|channel|>commentary json<|message|>{\"city\": }<|call|>",
        opener: " to=functions.get_weather<|channel|>commentary json<|message|>",
        markers: &[
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ],
        content_before_call: false,
        marked: true,
        ..HERMES
    },
];

pub fn named(name: &str) -> &'static Family {
    FAMILIES
        .iter()
        .find(|family| family.name == name)
        .expect("a family")
}

/// The tokens of a family's model; the markers are special tokens where `special` says so, else bytes.
pub fn tokens(family: &Family, special: bool) -> Vec<(&'static str, bool)> {
    let mut added = vec![
        ("<|im_end|>", true),
        ("<|im_start|>", true),
        ("<think>", false),
        ("</think>", false),
    ];
    if special {
        added.extend(family.markers.iter().map(|marker| (*marker, true)));
    }
    added
}

/// A byte-level model with these parsers.
pub fn renderer(family: &'static Family, special: bool) -> &'static Renderer {
    static LOADED: LazyLock<Mutex<HashMap<(&str, bool), &'static Renderer>>> =
        LazyLock::new(Mutex::default);
    let mut loaded = LOADED.lock().expect("no panic under the lock");
    loaded.entry((family.name, special)).or_insert_with(|| {
        let added = tokens(family, special);
        let loaded = load_added(&added, family.name, family.reasoning_parser);
        Box::leak(Box::new(loaded.expect("loads")))
    })
}

pub fn load(tool: &str, reasoning: &str) -> Result<Renderer, LoadError> {
    load_added(&[("<|im_end|>", true)], tool, reasoning)
}

fn load_added(added: &[(&str, bool)], tool: &str, reasoning: &str) -> Result<Renderer, LoadError> {
    load_with(
        added,
        ParserSetting::Name(tool.to_owned()),
        Some(ParserSetting::Name(reasoning.to_owned())),
    )
}

pub fn load_with(
    added: &[(&str, bool)],
    tool: ParserSetting,
    reasoning: Option<ParserSetting>,
) -> Result<Renderer, LoadError> {
    let model = TestModel {
        added,
        merges: &[
            ("t", "h"),
            ("th", "e"),
            ("\n", "\n"),
            (" ", "\n"),
            ("\"", ":"),
        ],
        pad: "<|im_end|>",
        options: LoadOptions {
            tool_parser: Some(tool),
            reasoning_parser: reasoning,
            ..LoadOptions::default()
        },
        ..TestModel::default()
    };
    model.load()
}

/// Id, name and arguments.
pub type WrittenCall<'a> = (Option<&'a str>, &'a str, &'a str);

pub fn tools() -> Vec<Value> {
    vec![
        json!({"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"},
        "area": {"type": "object"}, "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}}}),
    ]
}

pub fn parse_ids(
    renderer: &Renderer,
    ids: &[u32],
    has_tools: bool,
    starts_in_reasoning: bool,
) -> Parsed {
    let tools = tools();
    let context = AnswerContext {
        tools: has_tools.then_some(&tools),
        starts_in_reasoning,
    };
    renderer.parse_answer(ids, &context).expect("parses")
}

pub fn calls(parsed: &Parsed) -> Vec<WrittenCall<'_>> {
    parsed
        .message
        .tool_calls
        .iter()
        .flatten()
        .map(|call| {
            (
                call.id.as_deref(),
                call.function.name.as_str(),
                call.function.arguments.as_str().expect("JSON text"),
            )
        })
        .collect()
}

pub fn shown(parsed: &Parsed, kind: SegmentKind) -> String {
    let of_kind = parsed
        .segments
        .iter()
        .filter(|segment| segment.kind == kind);
    of_kind
        .map(|segment| &parsed.text[segment.text_range.clone()])
        .collect()
}

/// What holds for every parsed answer.
pub fn check(renderer: &Renderer, ids: &[u32], parsed: &Parsed) {
    let answer = &ids[..ids.len() - usize::from(parsed.stop_token.is_some())];
    let decoded = renderer.tokenizer().decode(answer, false).expect("decodes");
    assert_eq!(parsed.text, decoded);
    let (mut text, mut token) = (0, 0);
    for segment in &parsed.segments {
        assert_eq!(segment.text_range.start, text, "segments tile the text");
        text = segment.text_range.end;
        assert!(segment.token_range.start <= token, "no token is left out");
        assert!(segment.token_range.end >= token);
        token = segment.token_range.end;
        if !decoded.contains('\u{fffd}') {
            let tokens = &answer[segment.token_range.clone()];
            let touched = renderer.tokenizer().decode(tokens, false).expect("decodes");
            assert!(touched.contains(&parsed.text[segment.text_range.clone()]));
        }
    }
    assert_eq!((text, token), (decoded.len(), answer.len()));
    let content = parsed.message.content.joined().expect("text");
    assert_eq!(shown(parsed, SegmentKind::Content), content);
    let reasoning = parsed.message.reasoning_content.as_deref().unwrap_or("");
    assert_eq!(shown(parsed, SegmentKind::Reasoning), reasoning);
    for (index, _) in parsed.message.tool_calls.iter().flatten().enumerate() {
        assert!(!shown(parsed, SegmentKind::ToolCall(index)).is_empty());
    }
    for malformed in &parsed.malformed {
        assert!(malformed.text_range.end <= decoded.len());
    }
}
