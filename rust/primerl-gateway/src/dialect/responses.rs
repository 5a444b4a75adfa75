//! OpenAI's responses.
//!
//! ```text
//! instructions ─┐
//! previous response's chain of links ─┼─> messages ─> turn ─> items ─> response ─> kept as the next link
//! input's items ─┘
//! ```
//! A message is parsed and keyed once, when its request arrives; links share it with all requests that continue from
//! them.

mod endpoints;
mod events;
mod input;
mod items;
mod kept;
mod response;
mod store;
mod tools;

pub(crate) use kept::{KeptResponse, Restoring};
pub(crate) use store::Store;

use super::logprobs::{TokenLogprob, token_logprobs};
use super::{Asked, Dialect, ReadRequest, shared, with_messages_named};
use crate::Service;
use crate::answer::{Answer, Choice, Events, Head, Reply};
use crate::fields::{Fields, at, missing, unsupported};
use crate::request::{Incoming, IncomingOptions, Input, KeyedMessage, Parse, TurnRequest};
use crate::sampling::{Demanded, Rules, TurnSampling, structured_outputs, top_logprobs};
use axum::response::{IntoResponse, Response as HttpResponse};
use events::ResponseEvents;
use items::{OutputItem, items_of};
use primerl_render::{Message, Tokenizer};
use primerl_service::http::{ApiError, Routes};
use response::{Form, Response};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use store::{Link, Stored};
use tools::Tools;

pub(crate) struct Responses;

impl Dialect for Responses {
    fn name(&self) -> &'static str {
        "Responses"
    }

    fn path(&self) -> &'static str {
        "responses"
    }

    fn routes(&self) -> Routes<Arc<Service>> {
        endpoints::routes()
    }

    fn read(&self, asked: &Asked<'_>) -> Result<ReadRequest, ApiError> {
        let rollout = asked.rollout;
        let store = rollout.dialect_state();
        read(asked.body, &rollout.rules(), &store, asked.digest)
    }

    fn refusal(&self, error: &ApiError) -> HttpResponse {
        with_messages_named(error, "input").into_response()
    }
}

pub(super) fn read(
    bytes: &[u8],
    rules: &Rules<'_>,
    store: &Arc<Store>,
    digest: u128,
) -> Result<ReadRequest, ApiError> {
    let mut fields = Fields::read(bytes, "responses request")?;
    let added = new_messages(&mut fields)?;
    let (form, sampling) = read_fields(&mut fields, rules, store)?;
    let previous = form.previous_response_id.as_deref();
    let previous = previous.map(|id| store.previous(id)).transpose()?;
    fields.end(is_neutral)?;
    if form.store {
        store.check_room()?;
    }
    let messages = conversation(form.instructions.as_deref(), previous.as_deref(), &added)?;
    let request = turn_request(messages, &form, sampling, digest);
    let keep = Keep {
        store: Arc::clone(store),
        previous,
        added,
    };
    Ok((request, Box::new(ResponseReply::new(form, keep))))
}

fn new_messages(fields: &mut Fields) -> Result<Vec<Arc<KeyedMessage>>, ApiError> {
    let input = fields.take("input").ok_or_else(|| missing("input"))?;
    let messages = input::read(input)?.into_iter();
    Ok(messages.map(KeyedMessage::new).collect())
}

fn turn_request(
    messages: Vec<Arc<KeyedMessage>>,
    form: &Form,
    sampling: TurnSampling,
    digest: u128,
) -> TurnRequest {
    TurnRequest {
        input: Input::Messages {
            recurring: None,
            messages: messages.into_iter().map(Incoming::Keyed).collect(),
            options: IncomingOptions::Read(Arc::clone(&form.tools.options)),
        },
        sampling,
        choices: 1,
        parse: Parse::Message {
            one_call: !form.parallel_tool_calls,
        },
        digest,
    }
}

/// The instructions, the earlier messages and the new ones. Templates require one system message, at the beginning.
fn conversation(
    instructions: Option<&str>,
    previous: Option<&Link>,
    added: &[Arc<KeyedMessage>],
) -> Result<Vec<Arc<KeyedMessage>>, ApiError> {
    let instructions = instructions.map(|text| KeyedMessage::new(Message::text("system", text)));
    let mut messages: Vec<_> = instructions.into_iter().collect();
    messages.extend(previous.map(Link::history).unwrap_or_default());
    messages.extend_from_slice(added);
    if messages.is_empty() {
        return Err(ApiError::invalid("input holds no items").param("input"));
    }
    join_leading_system(&mut messages);
    Ok(messages)
}

fn join_leading_system(messages: &mut Vec<Arc<KeyedMessage>>) {
    let is_system = |message: &&Arc<KeyedMessage>| message.message.role == "system";
    let leading = messages.iter().take_while(is_system).count();
    if leading < 2 {
        return;
    }
    let system: Vec<_> = messages.drain(..leading).collect();
    let text = |message: &Arc<KeyedMessage>| message.message.content.joined().map(String::from);
    let texts: Vec<String> = system
        .iter()
        .filter_map(|message| text(message).ok())
        .collect();
    let one = KeyedMessage::new(Message::text("system", texts.join("\n\n")));
    messages.insert(0, one);
}

fn read_fields(
    fields: &mut Fields,
    rules: &Rules<'_>,
    store: &Store,
) -> Result<(Form, TurnSampling), ApiError> {
    let max_output_tokens = fields.count("max_output_tokens")?;
    if max_output_tokens == Some(0) {
        let message = "max_output_tokens must be at least 1";
        return Err(ApiError::invalid(message).param("max_output_tokens"));
    }
    let mut sampling = rules.read(fields, max_output_tokens, Vec::new())?;
    let format = text_format(fields)?;
    let outputs = structured_outputs("text.format", &format)?;
    sampling.structured_outputs = outputs;
    let (logprobs, top) = logprobs(fields)?;
    sampling.logprobs = logprobs.then_some(top);
    let choice = shared::ToolChoice::read(fields)?;
    sampling.demanded = choice.demanded.clone();
    let instructions = fields.text("instructions")?;
    let form = Form {
        stream: fields.flag("stream")?.unwrap_or(false),
        store: fields.flag("store")?.unwrap_or(true),
        logprobs,
        top_logprobs: top,
        temperature: sampling.temperature,
        // The number as it was written, not the nearest 32-bit float.
        top_p: (f64::from(sampling.truncation.top_p) * 1e7).round() / 1e7,
        max_output_tokens,
        instructions: instructions.map(|text| store.shared_instructions(text)),
        metadata: metadata(fields)?,
        parallel_tool_calls: fields.flag("parallel_tool_calls")?.unwrap_or(true),
        previous_response_id: fields.text("previous_response_id")?,
        format: Value::Object(format),
        tool_choice: shown_choice(&choice),
        tools: tools(fields, choice.told, rules, store)?,
    };
    Ok((form, sampling))
}

/// The choice in the responses format.
fn shown_choice(choice: &shared::ToolChoice) -> Value {
    match &choice.demanded {
        Some(Demanded::Tool(name)) => json!({"type": "function", "name": name}),
        Some(Demanded::Any) => "required".into(),
        None if choice.told => "auto".into(),
        None => "none".into(),
    }
}

/// Reads `text.format`; no other field of `text` is supported.
fn text_format(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let mut text = Fields(fields.map("text")?.unwrap_or_default());
    let format = at("text", text.map("format"))?;
    at("text", text.end(|_, _| false))?;
    Ok(format.unwrap_or_else(|| Map::from_iter([("type".to_owned(), "text".into())])))
}

/// Whether log-probabilities are returned, and for how many alternatives.
fn logprobs(fields: &mut Fields) -> Result<(bool, u32), ApiError> {
    let mut wanted = false;
    for (index, include) in fields.list("include")?.iter().flatten().enumerate() {
        match include.as_str() {
            Some("message.output_text.logprobs") => wanted = true,
            // It asks for reasoning that clients can send back: ours they get in plain text anyway.
            Some("reasoning.encrypted_content") => {}
            _ => return Err(unsupported(&format!("include[{index}]"), include)),
        }
    }
    let top = top_logprobs(fields.count("top_logprobs")?, "top_logprobs")?;
    if top > 0 && !wanted {
        let message = "top_logprobs needs include = [\"message.output_text.logprobs\"]";
        return Err(ApiError::invalid(message).param("top_logprobs"));
    }
    Ok((wanted, top))
}

fn metadata(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let metadata = fields.map("metadata")?.unwrap_or_default();
    match metadata.iter().find(|(_, value)| !value.is_string()) {
        None => Ok(metadata),
        Some((name, _)) => {
            let message = format!("metadata.{name} must be a text");
            Err(ApiError::invalid(message).param("metadata"))
        }
    }
}

fn tools(
    fields: &mut Fields,
    wanted: bool,
    rules: &Rules<'_>,
    store: &Store,
) -> Result<Arc<Tools>, ApiError> {
    let declared = fields.list("tools")?.unwrap_or_default();
    let mut kwargs = fields.map("chat_template_kwargs")?.unwrap_or_default();
    rules.sampling.add_template_kwargs(&mut kwargs);
    let is_same = |tools: &Tools| tools.is(&declared, &kwargs, wanted);
    match store.last_tools().filter(|tools| is_same(tools)) {
        Some(same) => Ok(same),
        None => Ok(store.share_tools(Tools::read(declared, kwargs, wanted)?)),
    }
}

/// Whether the field leaves the answer unchanged.
fn is_neutral(name: &str, value: &Value) -> bool {
    let of = |neutral: fn(&str, &Value) -> bool| {
        let fields = value.as_object();
        fields.is_some_and(|fields| fields.iter().all(|(name, value)| neutral(name, value)))
    };
    match name {
        "background" => value == false,
        "truncation" => value == "disabled",
        "reasoning" => of(|_, value| value.is_null()),
        "stream_options" => of(|name, value| name == "include_obfuscation" && value == false),
        // It only concerns OpenAI's own tools, and there are none here.
        "max_tool_calls" | "prompt_cache_options" => true,
        _ => shared::is_neutral(name, value),
    }
}

/// The format of the answer, and where it is stored.
#[derive(Clone)]
struct ResponseReply {
    form: Arc<Form>,
    keep: Arc<Keep>,
}

/// What is needed to store a response. Separate from the form: a stored response holds the form, and would hold its own
/// store.
struct Keep {
    store: Arc<Store>,
    previous: Option<Arc<Link>>,
    added: Vec<Arc<KeyedMessage>>,
}

impl ResponseReply {
    fn new(form: Form, keep: Keep) -> ResponseReply {
        ResponseReply {
            form: Arc::new(form),
            keep: Arc::new(keep),
        }
    }
    /// The response that the client gets; requests may continue from it once this function has returned.
    fn finish(&self, head: &Head, choice: &Choice, output: Vec<OutputItem>) -> Value {
        let response = Response::ended(head, choice.finish, output, choice.n_tokens());
        let json = response.json(&self.form);
        if self.form.store {
            self.keep.store.keep(Stored {
                response,
                form: Arc::clone(&self.form),
                link: Arc::new(Link {
                    id: Arc::clone(&head.id),
                    previous: self.keep.previous.clone(),
                    messages: self.keep.added.clone(),
                    answer: KeyedMessage::new(choice.message.clone()),
                }),
            });
        }
        json
    }
}

impl Reply for ResponseReply {
    fn streams(&self) -> bool {
        self.form.stream
    }

    fn note(&self, head: &Head, request: u32) -> Option<Arc<str>> {
        let note = self.form.store.then(|| self.kept(head, request).note());
        self.keep
            .store
            .noted(note.as_ref().map_or(0, |note| note.len()));
        note
    }

    fn whole(&self, answer: &Answer, tokenizer: &Tokenizer) -> Vec<u8> {
        let Some(choice) = answer.choices.first() else {
            return Vec::new();
        };
        let logprobs = || token_logprobs(choice.tokens(), false, tokenizer);
        let logprobs: Option<Vec<TokenLogprob>> = self.form.logprobs.then(logprobs);
        let output = items_of(&choice.message, &answer.head.id, logprobs);
        let response = self.finish(&answer.head, choice, output);
        response.to_string().into_bytes()
    }

    fn events(&self) -> Box<dyn Events> {
        Box::new(ResponseEvents::new(self.clone()))
    }
}

#[cfg(test)]
mod tests;
