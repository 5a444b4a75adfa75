//! The model's own chat template: messages to text, as `transformers` renders them.

mod environment;
mod generation;
mod python_json;

pub(crate) use environment::{SPAN_END, SPAN_START};

use crate::error::{LoadError, RenderError};
use crate::message::{Content, Message};
use minijinja::value::Value;
use minijinja::{Environment, context};
use serde_json::{Map, Value as Json};
use std::borrow::Cow;
use std::path::Path;

const NAME: &str = "chat_template";

/// What the template is given besides the messages.
#[derive(Clone, Debug, PartialEq)]
pub struct RenderOptions {
    /// Tool schemas in OpenAI's shape; `None` and an empty list differ to some templates.
    pub tools: Option<Vec<Json>>,
    /// Ends the text where the assistant's next answer begins.
    pub add_generation_prompt: bool,
    /// Further variables (`chat_template_kwargs`), such as `enable_thinking`.
    pub template_kwargs: Map<String, Json>,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self {
            tools: None,
            add_generation_prompt: true,
            template_kwargs: Map::new(),
        }
    }
}

/// How the template wants the arguments of tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ToolArguments {
    /// As a mapping: the usual case; JSON text of OpenAI's wire is parsed first.
    Mapping,
    /// As JSON text: the template concatenates it.
    Text,
}

/// A compiled chat template with the model's special tokens as variables.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token`, `eos_token`, ...: text of the special tokens, as `tokenizer_config.json` names them.
    special_tokens: Map<String, Json>,
    tool_arguments: ToolArguments,
    has_generation_blocks: bool,
}

impl ChatTemplate {
    /// Compiles `source`, the template found at `path`.
    pub fn new(
        source: &str,
        special_tokens: Map<String, Json>,
        path: &Path,
    ) -> Result<Self, LoadError> {
        let (source, has_generation_blocks) = generation::rewrite(source);
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
            special_tokens,
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
        self.render_marked(messages, options, false)
    }

    pub(crate) fn has_generation_blocks(&self) -> bool {
        self.has_generation_blocks
    }

    /// As [`ChatTemplate::render`]; with `mark`, generation blocks stand between [`SPAN_START`] and [`SPAN_END`].
    pub(crate) fn render_marked(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        mark: bool,
    ) -> Result<String, RenderError> {
        let messages = messages
            .iter()
            .enumerate()
            .map(|(index, message)| self.template_message(index, message))
            .collect::<Result<Vec<_>, _>>()?;
        let mut variables = self.special_tokens.clone();
        variables.extend(
            options
                .template_kwargs
                .iter()
                .map(|(key, value)| (key.clone(), value.clone())),
        );
        let context = context! {
            messages => messages,
            tools => options.tools,
            documents => (),
            add_generation_prompt => options.add_generation_prompt,
            __primerl_mark_generation => mark,
            ..Value::from_serialize(variables)
        };
        let template = self
            .environment
            .get_template(NAME)
            .map_err(template_error)?;
        template.render(context).map_err(template_error)
    }

    fn template_message(&self, index: usize, message: &Message) -> Result<Value, RenderError> {
        let mut message = Cow::Borrowed(message);
        if let Content::Parts(_) = message.content {
            let text = message.content.joined();
            let text = text
                .map_err(|kind| RenderError::UnsupportedContent {
                    message: index,
                    kind,
                })?
                .into_owned();
            message.to_mut().content = Content::Text(text);
        }
        let wants_mapping = self.tool_arguments == ToolArguments::Mapping;
        if message.has_tool_calls() {
            for call in message.to_mut().tool_calls.iter_mut().flatten() {
                call.function.arguments = match std::mem::take(&mut call.function.arguments) {
                    Json::String(text) if wants_mapping => match serde_json::from_str(&text) {
                        Ok(mapping @ Json::Object(_)) => mapping,
                        _ => Json::String(text),
                    },
                    arguments => arguments,
                };
            }
        }
        Ok(Value::from_serialize(message.as_ref()))
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
        Some(detail) => format!("{detail} (line {})", error.line().unwrap_or(0)),
        None => error.to_string(),
    };
    RenderError::Template {
        message,
        source: Box::new(error),
    }
}
