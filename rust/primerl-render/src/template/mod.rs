//! The model's own chat template: messages to text, as `transformers` renders them.

mod arguments;
mod clock;
mod environment;
mod filters;
mod prepared;
mod python_json;
mod python_text;
mod python_value;
mod source;
mod written;

use environment::MOST_STEPS;
pub(crate) use environment::{SPAN_END, SPAN_START};
pub use prepared::RenderOptions;
pub(crate) use prepared::{PreparedCache, PreparedOptions};

use crate::error::{LoadError, RenderError};
use crate::message::{Content, Message, ToolCall};
use minijinja::value::{Value, merge_maps};
use minijinja::{Environment, ErrorKind};
use python_value::{dict, from_json, list};
use serde_json::{Map, Value as Json};
use std::path::Path;
use std::sync::Arc;

const NAME: &str = "chat_template";

/// How the template wants the arguments of tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ToolArguments {
    /// As a mapping: the usual case; JSON text of OpenAI's wire is parsed first, and its numbers print as written.
    Mapping,
    /// As JSON text: the template concatenates it.
    Text,
}

/// A compiled chat template with the model's special tokens as variables.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token`, `eos_token`, ...: text of the special tokens, as `tokenizer_config.json` names them.
    special_tokens: Value,
    tool_arguments: ToolArguments,
    has_generation_blocks: bool,
}

/// `None` where it is absent. The error is the kind of a part that is no text.
fn content_value(content: &Content) -> Result<Option<Value>, String> {
    match content {
        Content::Absent => Ok(None),
        Content::Null => Ok(Some(Value::from(()))),
        Content::Text(text) => Ok(Some(Value::from(text.as_str()))),
        parts @ Content::Parts(_) => Ok(Some(Value::from(parts.joined()?))),
    }
}

impl ChatTemplate {
    /// Compiles `source`, the template found at `path`.
    pub fn new(
        source: &str,
        special_tokens: Map<String, Json>,
        path: &Path,
    ) -> Result<Self, LoadError> {
        let (source, has_generation_blocks) = source::rewrite(source);
        let mut environment = environment::environment();
        environment
            .add_template_owned(NAME, source)
            .map_err(|source| LoadError::Template {
                path: path.to_path_buf(),
                source: Box::new(source),
            })?;
        // As given, until the probe has decided.
        let tool_arguments = ToolArguments::Text;
        let mut template = Self {
            environment,
            special_tokens: from_json(&Json::Object(special_tokens)),
            tool_arguments,
            has_generation_blocks,
        };
        template.tool_arguments = template.probe_tool_arguments();
        Ok(template)
    }

    /// The text of a conversation.
    pub fn render(
        &self,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<String, RenderError> {
        self.render_prepared(messages, &PreparedOptions::new(options.clone()), false)
    }

    pub(crate) fn source(&self) -> Option<String> {
        let template = self.environment.get_template(NAME).ok()?;
        Some(template.source().to_owned())
    }

    /// Whether arguments of calls that are JSON text are read.
    pub(crate) fn takes_mappings(&self) -> bool {
        self.tool_arguments == ToolArguments::Mapping
    }

    pub(crate) fn has_generation_blocks(&self) -> bool {
        self.has_generation_blocks
    }

    /// As [`ChatTemplate::render`]; with `mark`, generation blocks stand between [`SPAN_START`] and [`SPAN_END`].
    pub(crate) fn render_prepared(
        &self,
        messages: &[Message],
        options: &PreparedOptions,
        mark: bool,
    ) -> Result<String, RenderError> {
        // As transformers refuses it; templates look at the first message without asking.
        if messages.is_empty() {
            return Err(RenderError::NoMessages);
        }
        let messages = messages
            .iter()
            .enumerate()
            .map(|(index, message)| self.template_message(index, message))
            .collect::<Result<Vec<_>, _>>()?;
        // The last one that has a name counts.
        let context = merge_maps([
            self.special_tokens.clone(),
            options.variables.clone(),
            dict(vec![
                ("messages".into(), list(messages)),
                (environment::MARK_GENERATION.into(), Value::from(mark)),
            ]),
        ]);
        let template = self
            .environment
            .get_template(NAME)
            .map_err(template_error)?;
        template.render(context).map_err(template_error)
    }

    /// The message as a dictionary, its fields in OpenAI's order, absent ones omitted.
    fn template_message(&self, index: usize, message: &Message) -> Result<Value, RenderError> {
        let mut fields: Vec<(Arc<str>, Value)> =
            vec![("role".into(), Value::from(message.role.as_str()))];
        let content = content_value(&message.content);
        let content = content.map_err(|kind| RenderError::UnsupportedContent {
            message: index,
            kind,
        })?;
        fields.extend(content.map(|content| ("content".into(), content)));
        let mut text = |name: &str, value: &Option<String>| {
            fields.extend(
                value
                    .as_deref()
                    .map(|value| (name.into(), Value::from(value))),
            );
        };
        text("reasoning_content", &message.reasoning_content);
        text("tool_call_id", &message.tool_call_id);
        text("name", &message.name);
        if let Some(calls) = &message.tool_calls {
            let calls = calls.iter().map(|call| self.template_call(call)).collect();
            fields.push(("tool_calls".into(), list(calls)));
        }
        let extra = message.extra.iter();
        fields.extend(extra.map(|(name, value)| (name.as_str().into(), from_json(value))));
        Ok(dict(fields))
    }

    fn template_call(&self, call: &ToolCall) -> Value {
        let arguments = match &call.function.arguments {
            Json::String(text) if self.tool_arguments == ToolArguments::Mapping => {
                written::mapping(text).unwrap_or_else(|| Value::from(text.as_str()))
            }
            arguments => from_json(arguments),
        };
        let mut fields: Vec<(Arc<str>, Value)> = Vec::with_capacity(4);
        let texts = [("id", &call.id), ("type", &call.kind)];
        fields.extend(
            texts
                .into_iter()
                .filter_map(|(name, value)| Some((name.into(), Value::from(value.as_deref()?)))),
        );
        let function = vec![
            ("name".into(), Value::from(call.function.name.as_str())),
            ("arguments".into(), arguments),
        ];
        fields.push(("function".into(), dict(function)));
        let extra = call.extra.iter();
        fields.extend(extra.map(|(name, value)| (name.as_str().into(), from_json(value))));
        dict(fields)
    }

    // Decided by trying: a template that concatenates arguments fails on a mapping, and only on a mapping.
    fn probe_tool_arguments(&self) -> ToolArguments {
        let conversation = |arguments: Json| {
            let call = serde_json::json!([
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": null, "tool_calls": [
                    {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
                ]},
                {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": "y"},
            ]);
            serde_json::from_value::<Vec<Message>>(call).unwrap_or_default()
        };
        let options = RenderOptions {
            add_generation_prompt: false,
            ..RenderOptions::default()
        };
        let mapping = self.render(&conversation(serde_json::json!({"a": 1})), &options);
        let text = self.render(
            &conversation(Json::String("{\"a\": 1}".to_owned())),
            &options,
        );
        if mapping.is_err() && text.is_ok() {
            ToolArguments::Text
        } else {
            ToolArguments::Mapping
        }
    }
}

fn template_error(error: minijinja::Error) -> RenderError {
    let message = match error.detail() {
        _ if error.kind() == ErrorKind::OutOfFuel => {
            format!("it does not end after {MOST_STEPS} steps")
        }
        Some(detail) => format!("{detail} (line {})", error.line().unwrap_or(0)),
        None => error.to_string(),
    };
    RenderError::Template {
        message,
        source: Box::new(error),
    }
}
