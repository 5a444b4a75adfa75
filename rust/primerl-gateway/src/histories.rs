//! How agent frameworks change a conversation between two requests: bodies as they send them, shortened. Changes of
//! spelling only still extend; changes of content fork, with the reason.

use super::measure::Turns;
use bytes::Bytes;
use primerl_core::TurnIndex;
use primerl_core::turn::{FinishReason, ForkReason};
use primerl_render::Renderer;
use serde_json::{Value, json};
use std::sync::Arc;

/// ChatML with tools, as in Qwen 2.5's template.
const TEMPLATE: &str = r#"{%- if tools %}{{ '<|im_start|>system\n# Tools' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + message.role }}
{%- if message.content %}{{ '\n' + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"#;

fn renderer() -> Arc<Renderer> {
    let folder = tempfile::tempdir().expect("temporary folder");
    let added = [
        ("<|im_end|>", true),
        ("<|endoftext|>", true),
        ("<|im_start|>", true),
        ("<tool_call>", false),
        ("</tool_call>", false),
    ];
    // A merge across the end of a stop sequence and the line feed after it, as in real vocabularies.
    let merges = [(">", "\n")];
    primerl_render::testing::write_model(
        folder.path(),
        &added,
        &merges,
        TEMPLATE,
        "<|im_end|>",
        "<|endoftext|>",
    )
    .expect("model folder");
    Arc::new(Renderer::load(folder.path()).expect("loads"))
}

struct Scene {
    renderer: Arc<Renderer>,
    turns: Turns,
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn assistant(content: Value) -> Value {
    json!({"role": "assistant", "content": content})
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "weather", "description": "Weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}])
}

fn call(arguments: &str) -> Value {
    json!({"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}})
}

fn result() -> Value {
    json!({"role": "tool", "tool_call_id": "c1", "content": "rain"})
}

const CALLED: &str = " I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\", \"days\": 1.50}}\n</tool_call>";

impl Scene {
    fn new() -> Scene {
        let renderer = renderer();
        let turns = Turns::new(Arc::clone(&renderer));
        Scene { renderer, turns }
    }

    /// Sends the messages and is answered with `says`; the stop token follows if the answer ends by itself.
    fn ask(&self, messages: &[Value], with_tools: bool, says: &str, finish: FinishReason) {
        let mut body = json!({"messages": messages});
        if with_tools {
            body["tools"] = tools();
        }
        if finish == FinishReason::StopSequence {
            body["stop"] = json!(["</code>"]);
        }
        let asked = self.turns.ask(&Bytes::from(body.to_string()));
        let asked = asked.unwrap_or_else(|error| panic!("{error:?}"));
        let mut ids = self.renderer.tokenizer().encode(says).expect("has tokens");
        if finish == FinishReason::Stop {
            ids.extend(self.renderer.stop_token_ids().first());
        }
        let answered = self.turns.sampled(asked, ids, finish);
        answered.unwrap_or_else(|error| panic!("{error:?}"));
    }

    /// How the latest turn's prompt was made.
    fn fork(&self) -> Option<ForkReason> {
        self.turns.recorded().last().expect("was recorded").fork
    }

    /// The ids that the engine was given for the latest turn.
    fn prompt(&self) -> Vec<u32> {
        let turns = self.turns.recorded();
        let mut conversation = primerl_core::Conversation::default();
        for (index, turn) in (0..).zip(&turns) {
            conversation.record(TurnIndex(index), turn);
        }
        conversation.prompt_of(TurnIndex(turns.len() as u32 - 1))
    }

    fn text(&self, ids: &[u32]) -> String {
        let text = self.renderer.tokenizer().decode(ids, false);
        text.expect("has text")
    }
}

/// The prompt consists of the first turn's unchanged ids and what the template writes for the rest.
fn assert_extends(scene: &Scene, messages: &[Value], with_tools: bool) {
    assert_eq!(scene.fork(), None, "{messages:?}");
    let turns = scene.turns.recorded();
    let before: Vec<u32> = [&turns[0].prompt_suffix[..], &turns[0].sampled].concat();
    let prompt = scene.prompt();
    assert_eq!(prompt[..before.len()], before);
    let body = json!({"messages": messages, "tools": with_tools.then(tools)});
    let apart = Turns::new(Arc::clone(&scene.renderer));
    let asked = apart.ask(&Bytes::from(body.to_string())).expect("renders");
    let whole = asked.prompt_ids();
    assert_eq!(scene.text(&prompt), scene.text(&whole));
}

#[test]
fn a_code_agent_writes_its_stop_sequence_back_and_its_call_behind_it() {
    // smolagents' CodeAgent: stop = ["Observation:", "Calling tools:", "</code>"].
    let tail = "\nCalling tools:\n[{'id': 'call_1', 'function': {'arguments': 'x = 1'}}]";
    let sampled = "Thought: I add.\n<code>\nx = 1\n</code>";
    for (says, comes_back) in [
        (sampled, format!("{sampled}{tail}")),
        // It strips leading white space.
        (&*format!("\n {sampled}"), format!("{sampled}{tail}")),
        // It puts back the tag and nothing else.
        (sampled, sampled.to_owned()),
    ] {
        for content in [
            json!(comes_back),
            json!([{"type": "text", "text": comes_back}]),
        ] {
            let scene = Scene::new();
            let mut messages = vec![user("Add.")];
            scene.ask(&messages, false, says, FinishReason::StopSequence);
            messages.extend([assistant(content), user("Observation:\n1")]);
            scene.ask(&messages, false, "Two.", FinishReason::Stop);
            let as_sampled = comes_back.replacen(sampled, says, 1);
            let mut expected = messages.clone();
            expected[1] = assistant(json!(as_sampled));
            assert_extends(&scene, &expected, false);
            // Once more: a recognised answer stays recognised.
            messages.extend([assistant(json!("Two.")), user("Go on.")]);
            scene.ask(&messages, false, "Three.", FinishReason::Stop);
            assert_eq!(scene.fork(), None);
            assert_eq!(scene.turns.recorded()[2].parent, Some(TurnIndex(1)));
        }
    }
}

#[test]
fn an_answer_that_length_cut_is_closed_by_its_agent() {
    let scene = Scene::new();
    let mut messages = vec![user("Add.")];
    scene.ask(&messages, false, "<code>\nx =", FinishReason::Length);
    messages.extend([
        assistant(json!("<code>\nx =</code>")),
        user("Observation:\nan error"),
    ]);
    scene.ask(&messages, false, "Oh.", FinishReason::Stop);
    assert_extends(&scene, &messages, false);
}

#[test]
fn what_is_appended_to_a_closed_answer_forks() {
    let scene = Scene::new();
    let mut messages = vec![user("Add.")];
    scene.ask(&messages, false, "<code>\nx = 1\n", FinishReason::Stop);
    messages.extend([
        assistant(json!("<code>\nx = 1\n</code>")),
        user("Observation:\n1"),
    ]);
    scene.ask(&messages, false, "Two.", FinishReason::Stop);
    assert_eq!(scene.fork(), Some(ForkReason::AnswerEdited));
}

#[test]
fn white_space_that_changed_before_the_appended_text_forks() {
    let scene = Scene::new();
    let mut messages = vec![user("Add.")];
    scene.ask(&messages, false, "x = 1 \n", FinishReason::Length);
    messages.extend([assistant(json!("x = 1</code>")), user("Observation:\n1")]);
    scene.ask(&messages, false, "Two.", FinishReason::Stop);
    assert_eq!(scene.fork(), Some(ForkReason::AnswerEdited));
}

#[test]
fn an_answer_with_a_call_is_the_same_in_other_spellings_only() {
    let arguments = "{\"city\": \"Bern\", \"days\": 1.50}";
    let with = |content: Value, arguments: &str| json!({"role": "assistant", "content": content, "tool_calls": [call(arguments)]});
    let named = |name: &str| {
        let mut message = with(json!(" I look.\n"), arguments);
        message["name"] = json!(name);
        message
    };
    let edited = Some(ForkReason::AnswerEdited);
    for (comes_back, fork) in [
        // camel-ai: parses the arguments and writes them again.
        (
            with(json!(" I look.\n"), "{\"city\": \"Bern\", \"days\": 1.5}"),
            None,
        ),
        (
            with(json!([{"type": "text", "text": "I look."}]), arguments),
            None,
        ),
        // semantic-kernel's agents, from the second question on.
        (named("planner"), None),
        // The characters that strip functions of Python and JavaScript remove.
        (with(json!("\u{feff}I look.\u{1f}"), arguments), None),
        // crewai, semantic-kernel, and camel-ai when it streams: the text next to the call is missing.
        (with(Value::Null, arguments), edited),
        (with(json!(""), arguments), edited),
        (
            json!({"role": "assistant", "tool_calls": [call(arguments)]}),
            edited,
        ),
        // smolagents' ToolCallingAgent: the call as text.
        (
            assistant(json!("I look.\nCalling tools:\n[{'id': 'c1'}]")),
            edited,
        ),
    ] {
        let scene = Scene::new();
        let mut messages = vec![user("Where to?")];
        scene.ask(&messages, true, CALLED, FinishReason::Stop);
        messages.extend([comes_back.clone(), result()]);
        scene.ask(&messages, true, "Stay.", FinishReason::Stop);
        assert_eq!(scene.fork(), fork, "{comes_back}");
    }
}

#[test]
fn text_that_a_framework_writes_differently_forks() {
    // LlamaIndex's ReActAgent: the input in the format of a Python dictionary.
    let scene = Scene::new();
    let mut messages = vec![user("Where to?")];
    let says = "Thought: I look.\nAction: weather\nAction Input: {\"city\": \"Bern\"}";
    scene.ask(&messages, false, says, FinishReason::Stop);
    let written = says.replace('"', "'");
    messages.extend([assistant(json!(written)), user("Observation: rain")]);
    scene.ask(&messages, false, "Stay.", FinishReason::Stop);
    assert_eq!(scene.fork(), Some(ForkReason::AnswerEdited));
}

#[test]
fn a_question_that_a_framework_shortens_forks() {
    // aider: removes the reminder after the question once the question is answered.
    let scene = Scene::new();
    scene.ask(
        &[user("Change x.\n\n# Rules")],
        false,
        "Done. \n",
        FinishReason::Stop,
    );
    let messages = [
        user("Change x."),
        assistant(json!("Done.")),
        user("And y?\n\n# Rules"),
    ];
    scene.ask(&messages, false, "No.", FinishReason::Stop);
    assert_eq!(scene.fork(), Some(ForkReason::HistoryEdited));
}
