//! Single values: what the parser reads otherwise than the schema means is not allowed, and what no syntax holds is
//! refused by name.

use super::{ANY, FAMILIES, Model, function};
use primerl_render::{Content, Demand, DemandError, ParserSetting};
use serde_json::{Value, json};

fn model(parser: &str) -> Model {
    let family = FAMILIES.iter().find(|family| family.parser == parser);
    Model::new(family.expect("a family"), true, true)
}

fn tool() -> Value {
    let any_of = |types: [&str; 2]| json!({"anyOf": types.map(|name| json!({"type": name}))});
    let properties = json!({"s": {"type": "string"}, "n": any_of(["string", "null"]), "m": {},
        "k": any_of(["number", "string"]), "b": {"type": "boolean"}, "o": {"type": "object"},
        "e": {"enum": ["5", "a</parameter>", null, "null"]}});
    function("f", properties, &[])
}

/// The value that the parser reads, if the grammar allows the text that `write` makes of it.
fn read(model: &Model, key: &str, text: &str) -> Option<Value> {
    let tools = [tool()];
    let demand = Demand {
        tools: &tools,
        ..ANY
    };
    model.allows(&model.spec(&demand, None), text).ok()?;
    let tokens = model.renderer.tokenizer().encode(text).expect("encodes");
    assert_eq!(super::check(model, &tokens, &tools), 1, "{text:?}");
    let parsed = model.parsed(&tokens, &tools);
    let calls = parsed.message.tool_calls.expect("calls a tool");
    let arguments = calls[0].function.arguments.as_str().expect("is text");
    let arguments: Value = serde_json::from_str(arguments).expect("is JSON");
    assert_eq!(
        arguments.as_object().map(|arguments| arguments.len()),
        Some(1),
        "{text:?}"
    );
    Some(arguments[key].clone())
}

/// Key, value as it is written, and what it is; `None`: it must not be sampled.
type Case = (&'static str, &'static str, Option<Value>);

fn check_cases(parser: &str, write: impl Fn(&str, &str) -> String, cases: &[Case]) {
    let model = model(parser);
    for (key, value, meant) in cases {
        assert_eq!(
            read(&model, key, &write(key, value)),
            *meant,
            "{parser}, {key}: {value:?}"
        );
    }
}

fn text(text: &str) -> Option<Value> {
    Some(json!(text))
}

#[test]
fn texts_between_markers_are_read_as_they_are_meant() {
    let cases = [
        ("s", "5", text("5")),
        ("s", "", text("")),
        ("s", "null", text("null")),
        ("s", " \"a\" \t", text(" \"a\" \t")),
        ("s", "a\n\n<b>{&}</b>\n", text("a\n\n<b>{&}</b>\n")),
        ("n", "null", Some(Value::Null)),
        ("n", "None", Some(Value::Null)),
        ("n", "nullable", text("nullable")),
        ("n", "12 m", text("12 m")),
        ("n", "\"null\"", text("null")),
        ("n", "\"a", None),
        ("n", " null", None),
        ("m", "5", Some(json!(5))),
        ("m", "fast", text("fast")),
        ("m", "true", Some(json!(true))),
        ("m", "True", None),
        ("m", "[1, {\"a\": \"b\"}]", Some(json!([1, {"a": "b"}]))),
        ("m", "[1", None),
        ("k", "5", Some(json!(5))),
        ("k", "\"5\"", text("5")),
        ("k", "5 m", None),
        ("k", "five", text("five")),
        ("b", "True", Some(json!(true))),
        ("b", "false", Some(json!(false))),
        ("b", "yes", None),
        ("o", "{\"a\": [null]}", Some(json!({"a": [null]}))),
        ("o", "{'a': 1}", None),
        ("e", "null", Some(Value::Null)),
        ("e", "\"null\"", text("null")),
        ("e", "5", text("5")),
        ("e", "6", None),
    ];
    let qwen = |key: &str, value: &str| {
        format!(
            "<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
        )
    };
    check_cases("qwen3_coder", qwen, &cases);
    let glm = |key: &str, value: &str| {
        format!("<tool_call>f<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>")
    };
    check_cases("glm", glm, &cases);
    let minimax = |key: &str, value: &str| {
        format!(
            "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"{key}\">{value}</parameter>\n</invoke>\n</minimax:tool_call>"
        )
    };
    check_cases("minimax", minimax, &cases);
    // What ends a value or a call for the parser cannot be part of a text.
    let ends = |end: &'static str| {
        [
            ("s", end, None),
            ("n", end, None),
            ("m", end, None),
            ("e", end, None),
        ]
    };
    for end in ["a</parameter>", "a\n</parameter>\n", "a</tool_call>b"] {
        check_cases("qwen3_coder", qwen, &ends(end));
    }
    check_cases("glm", glm, &ends("a</arg_value>b"));
    check_cases("minimax", minimax, &ends("a</invoke>b"));
}

#[test]
fn a_parameter_that_says_what_it_is_is_read_so() {
    let write = |kind: &str| {
        let kind = kind.to_owned();
        move |key: &str, value: &str| {
            format!(
                "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"{key}\" string=\"{kind}\">{value}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
            )
        }
    };
    let texts = [
        ("s", "5", text("5")),
        ("n", "null", text("null")),
        ("m", "[1", text("[1")),
        ("k", "5", text("5")),
        ("b", "true", None),
        ("o", "{}", None),
        ("e", "5", text("5")),
        ("e", "6", None),
        ("s", "a</｜DSML｜invoke>", None),
    ];
    check_cases("deepseek_v32", write("true"), &texts);
    let values = [
        ("s", "\"5\"", None),
        ("n", "null", Some(Value::Null)),
        ("m", "[1]", Some(json!([1]))),
        ("k", "5", Some(json!(5))),
        ("b", "true", Some(json!(true))),
        ("b", "True", None),
        ("o", "{}", Some(json!({}))),
        ("e", "null", Some(Value::Null)),
    ];
    check_cases("deepseek_v32", write("false"), &values);
}

#[test]
fn literals_are_read_as_they_are_meant() {
    let python =
        |key: &str, value: &str| format!("<|tool_call_start|>[f({key}={value})]<|tool_call_end|>");
    let cases = [
        ("s", "'it\\'s \"\\n'", text("it's \"\n")),
        ("s", "\"\\u00e9)]\\x41\"", text("é)]A")),
        ("s", "\"\\ud83d\"", None),
        ("s", "\"\\q\"", None),
        ("s", "'a\nb'", None),
        ("s", "a", None),
        ("n", "None", Some(Value::Null)),
        ("n", "''", text("")),
        (
            "m",
            "{\"a\": [1, None, 'x', true]}",
            Some(json!({"a": [1, null, "x", true]})),
        ),
        ("m", "{1: 2}", None),
        ("k", "-2.5e3", Some(json!(-2.5e3))),
        ("b", "False", Some(json!(false))),
        ("o", "{'a': {}}", Some(json!({"a": {}}))),
        ("e", "'5'", text("5")),
        ("e", "5", None),
    ];
    check_cases("llama3_pythonic", python, &cases);
    let gemma = |key: &str, value: &str| format!("<|tool_call>call:f{{{key}:{value}}}<tool_call|>");
    let cases = [
        ("s", "<|\"|>a,}\"\n<|\"|>", text("a,}\"\n")),
        ("s", "<|\"|><|\"|>", text("")),
        ("s", "a", None),
        ("n", "null", Some(Value::Null)),
        (
            "m",
            "{a:[1,null,<|\"|>x<|\"|>,{}]}",
            Some(json!({"a": [1, null, "x", {}]})),
        ),
        ("m", "\"x\"", None),
        ("k", "-2.5", Some(json!(-2.5))),
        ("b", "true", Some(json!(true))),
        ("b", "True", None),
        ("e", "<|\"|>null<|\"|>", text("null")),
    ];
    check_cases("gemma4", gemma, &cases);
}

/// What is wrong with a tool, and where.
fn refused(
    parser: &str,
    name: &str,
    parameter: &str,
    schema: Value,
) -> (String, Option<String>, String) {
    let mut properties = serde_json::Map::new();
    properties.insert(parameter.to_owned(), schema);
    let tools = [function(name, Value::Object(properties), &[])];
    let demand = Demand {
        tools: &tools,
        ..ANY
    };
    match model(parser).renderer.call_grammar(&demand) {
        Err(error @ DemandError::Unwritable { .. }) => {
            let message = error.to_string();
            let DemandError::Unwritable {
                tool,
                parameter,
                problem,
            } = error
            else {
                unreachable!()
            };
            assert!(
                message.contains(&format!("tool {tool:?}")) && message.contains(&problem),
                "{message}"
            );
            (tool, parameter, problem)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_a_syntax_cannot_hold_is_refused_by_tool_and_parameter() {
    let string = json!({"type": "string"});
    for (parser, name) in [
        ("qwen3_coder", "a>b"),
        ("glm", "a\nb"),
        ("minimax", "'a'"),
        ("kimi", "a<|tool_call_argument_begin|>b"),
        ("harmony", "a b"),
        ("llama3_pythonic", "my tool"),
        ("llama3_pythonic", "2a"),
        ("gemma4", "a{b"),
        ("deepseek_v32", "a\">b"),
    ] {
        let (tool, parameter, _) = refused(parser, name, "x", string.clone());
        assert_eq!((tool.as_str(), parameter), (name, None), "{parser}");
    }
    for (parser, name) in [
        ("qwen3_coder", "a>b"),
        ("glm", " a"),
        ("minimax", "\"a"),
        ("llama3_pythonic", "a b"),
        ("gemma4", "a:b"),
        ("deepseek_v32", "a\""),
    ] {
        let (tool, parameter, _) = refused(parser, "f", name, string.clone());
        assert_eq!(
            (tool.as_str(), parameter.as_deref()),
            ("f", Some(name)),
            "{parser}"
        );
    }
    let tree = json!({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/tree"}]});
    for (parser, schema, problem) in [
        (
            "qwen3_coder",
            json!({"type": "string", "format": "shoe-size"}),
            "shoe-size",
        ),
        (
            "qwen3_coder",
            json!({"type": "string", "pattern": "(?=a)b"}),
            "look-around",
        ),
        (
            "qwen3_coder",
            json!({"type": "string", "pattern": "^a|b"}),
            "parentheses",
        ),
        (
            "qwen3_coder",
            json!({"type": "string", "not": {"const": "a"}}),
            "\"not\"",
        ),
        ("qwen3_coder", tree, "$ref"),
        ("glm", json!({"$ref": "#/properties/x"}), "#/properties/x"),
        (
            "gemma4",
            json!({"type": "object", "properties": {"a:b": {"type": "null"}}}),
            "a:b",
        ),
        (
            "gemma4",
            json!({"type": "array", "uniqueItems": true}),
            "uniqueItems",
        ),
        (
            "llama3_pythonic",
            json!({"oneOf": [{"type": "number"}, {"type": "integer"}]}),
            "oneOf",
        ),
        ("llama3_pythonic", json!({"allOf": [{}, {}]}), "type"),
        (
            "llama3_pythonic",
            json!({"type": "object", "minProperties": 1}),
            "minProperties",
        ),
    ] {
        let (tool, parameter, found) = refused(parser, "f", "x", schema);
        assert_eq!(
            (tool.as_str(), parameter.as_deref()),
            ("f", Some("x")),
            "{parser}"
        );
        assert!(found.contains(problem), "{found}");
    }
    let mut tool = tool();
    tool["function"]["parameters"]["minProperties"] = json!(1);
    let tools = [tool];
    let error = model("glm").renderer.call_grammar(&Demand {
        tools: &tools,
        ..ANY
    });
    assert!(
        error
            .expect_err("is refused")
            .to_string()
            .starts_with("tool \"f\": ")
    );
    // JSON behind fixed text holds whatever the grammar of JSON does.
    let grammar = model("hermes").renderer.call_grammar(&Demand {
        tools: &tools,
        ..ANY
    });
    assert!(grammar.is_ok());
}

#[test]
fn an_answer_of_harmony_may_have_a_format_instead() {
    let tools = super::tools();
    let schema = json!({"enum": ["Yes"]});
    let model = model("harmony");
    let demand = Demand {
        tools: &tools,
        or_json: Some(&schema),
        ..ANY
    };
    let spec = model.spec(&demand, None);
    let answer = "<|channel|>final<|message|>\"Yes\"";
    model.allows(&spec, answer).expect("is allowed");
    let tokens = model.renderer.tokenizer().encode(answer).expect("encodes");
    let message = model.parsed(&tokens, &tools).message;
    assert_eq!(message.content, Content::Text("\"Yes\"".to_owned()));
    assert_eq!(message.tool_calls, None);
}

#[test]
fn a_described_parser_has_no_grammar() {
    let description = json!({"format": "json", "call": ["<c>", "</c>"]});
    let setting = serde_json::from_value::<ParserSetting>(description).expect("a description");
    let model = primerl_render::testing::TestModel {
        options: primerl_render::LoadOptions {
            tool_parser: Some(setting),
            ..Default::default()
        },
        ..Default::default()
    };
    let tools = [tool()];
    let refused = model.renderer().call_grammar(&Demand {
        tools: &tools,
        ..ANY
    });
    assert_eq!(refused, Err(DemandError::Family("described")));
}

/// Also where the marker is one ordinary token, which could be drawn within a string.
#[test]
fn no_string_of_json_holds_what_ends_a_call() {
    let tools = [function(
        "f",
        json!({"o": {"type": "object"}, "s": {"type": "array", "items": {"type": "string"}},
            "p": {"type": "object", "properties": {"t": {"type": ["string", "null"], "minLength": 2, "pattern": "a"}},
                "required": ["t"]}}),
        &["o", "s", "p"],
    )];
    let json = |text: &str| {
        let text = json!(text).to_string();
        format!("{{\"o\": {{{text}: {text}}}, \"s\": [{text}], \"p\": {{\"t\": {text}}}}}")
    };
    let hermes = |text: &str| {
        let arguments = json(text);
        format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {arguments}}}\n</tool_call>")
    };
    let kimi = |text: &str| {
        let arguments = json(text);
        format!(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|><|tool_calls_section_end|>"
        )
    };
    let harmony = |text: &str| {
        let arguments = json(text);
        format!("<|channel|>commentary to=functions.f json<|message|>{arguments}<|call|>")
    };
    let qwen = |text: &str| {
        let value = json!(text).to_string();
        format!(
            "<tool_call>\n<function=f>\n<parameter=o>\n{{{value}: [{value}]}}\n</parameter>\n<parameter=s>\n[{value}]\n</parameter>\n<parameter=p>\n{{\"t\": {value}}}\n</parameter>\n</function>\n</tool_call>"
        )
    };
    type Case<'a> = (&'a str, &'a dyn Fn(&str) -> String, &'a [&'a str]);
    let families: [Case<'_>; 4] = [
        ("hermes", &hermes, &["</tool_call>"]),
        ("kimi", &kimi, &["<|tool_call_end|>"]),
        (
            "harmony",
            &harmony,
            &["<|end|>", "<|start|>", "<|call|>", "<|return|>"],
        ),
        ("qwen3_coder", &qwen, &["</parameter>", "</tool_call>"]),
    ];
    for (parser, write, markers) in families {
        let family = FAMILIES.iter().find(|family| family.parser == parser);
        let model = Model::new(family.expect("a family"), false, true);
        let spec = model.spec(
            &Demand {
                tools: &tools,
                ..ANY
            },
            None,
        );
        for marker in markers {
            let half = &marker[..marker.len() - 1];
            for text in [
                format!("a{half}"),
                format!("a<{half}{half}{half}<"),
                format!("{half}a{half} a>"),
                format!("a<{}", &marker[1..].to_uppercase()),
                "<b>a & b</b></|<|".to_owned(),
            ] {
                let answer = write(&text);
                let allowed = model.allows(&spec, &answer);
                allowed.unwrap_or_else(|problem| panic!("{parser}: {problem}"));
                let tokens = model.renderer.tokenizer().encode(&answer).expect("encodes");
                assert_eq!(super::check_read(&model, &tokens, &tools), 1);
            }
            for text in [
                format!("a{marker}"),
                format!("a<{marker}<"),
                format!("a{half}{marker}"),
            ] {
                assert!(
                    model.allows(&spec, &write(&text)).is_err(),
                    "{parser}: {text}"
                );
            }
        }
        let null = write("a").replace("\"t\": \"a\"", "\"t\": null");
        let allowed = model.allows(&spec, &null);
        allowed.unwrap_or_else(|problem| panic!("{parser}: {problem}"));
        let seed = &mut 11;
        for _ in 0..6 {
            assert!(super::check_read(&model, &model.drawn(&spec, seed), &tools) > 0);
        }
    }
}
