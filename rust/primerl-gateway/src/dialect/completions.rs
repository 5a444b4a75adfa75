//! OpenAI's text completions, with the fields that vLLM adds: a prompt without a template.
//!
//! One rule differs from OpenAI's: without `max_tokens`, an answer may be as long as the rollout's answers may be, as
//! in chat, not 16 tokens.

use super::chunks::{Chunks, StreamForm, stop_or_length, whole_body};
use super::logprobs::TokenText;
use super::shared::{is_neutral, structured_fields};
use super::{Asked, Dialect, ReadRequest, with_messages_named};
use crate::answer::{Answer, Choice, Events, Head, Reply, Tokens};
use crate::fields::{Fields, missing, unsupported};
use crate::request::{Input, Parse, TurnRequest};
use crate::sampling::{Rules, TurnSampling, choices, top_logprobs};
use crate::text::Delta;
use axum::response::{IntoResponse, Response};
use primerl_render::Tokenizer;
use primerl_service::http::ApiError;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::borrow::Cow;

pub(crate) struct Completions;

impl Dialect for Completions {
    fn name(&self) -> &'static str {
        "Completions"
    }

    fn path(&self) -> &'static str {
        "completions"
    }

    fn read(&self, asked: &Asked<'_>) -> Result<ReadRequest, ApiError> {
        read(asked.body, &asked.rollout.rules(), asked.digest)
    }

    fn refusal(&self, error: &ApiError) -> Response {
        with_messages_named(error, "prompt").into_response()
    }
}

pub(super) fn read(bytes: &[u8], rules: &Rules<'_>, digest: u128) -> Result<ReadRequest, ApiError> {
    let mut fields = Fields::read(bytes, "completions request")?;
    let prompt = fields.take("prompt").ok_or_else(|| missing("prompt"))?;
    let input = prompt_of(prompt)?;
    let sampling = read_sampling(&mut fields, rules)?;
    let choices = choices(&mut fields)?;
    best_of(&mut fields, choices)?;
    let form = Form::read(&mut fields, sampling.logprobs)?;
    fields.end(|name, value| match name {
        // The prompt's tokens are those of its text, unchanged.
        "add_special_tokens" => value == false,
        _ => is_neutral(name, value),
    })?;
    let request = TurnRequest {
        input,
        sampling,
        choices,
        parse: Parse::Text,
        digest,
    };
    Ok((request, Box::new(form)))
}

fn read_sampling(fields: &mut Fields, rules: &Rules<'_>) -> Result<TurnSampling, ApiError> {
    let max_tokens = fields.count("max_tokens")?;
    let stop = fields.texts("stop")?;
    let mut sampling = rules.read(fields, max_tokens, stop)?;
    sampling.structured_outputs = structured_fields(fields)?;
    let logprobs = fields.count("logprobs")?;
    sampling.logprobs = logprobs
        .map(|top| top_logprobs(Some(top), "logprobs"))
        .transpose()?;
    Ok(sampling)
}

/// A text, ids, or a list of one of either.
fn prompt_of(prompt: Value) -> Result<Input, ApiError> {
    let refuse = |problem: &str| Err(ApiError::invalid(problem).param("prompt"));
    match prompt {
        Value::String(text) => Ok(Input::Text(text)),
        Value::Array(items) => match items.first() {
            None => refuse("prompt is empty"),
            Some(Value::Number(_)) => Ok(Input::Ids(ids(&items)?)),
            Some(Value::String(_) | Value::Array(_)) if items.len() > 1 => {
                refuse("prompt holds several prompts; send one request for each")
            }
            Some(Value::String(text)) => Ok(Input::Text(text.clone())),
            Some(Value::Array(items)) => Ok(Input::Ids(ids(items)?)),
            Some(_) => refuse("prompt must be a text or token ids"),
        },
        _ => refuse("prompt must be a text or token ids"),
    }
}

fn ids(items: &[Value]) -> Result<Vec<u32>, ApiError> {
    let id = |(index, item): (usize, &Value)| {
        let id = item.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| {
            ApiError::invalid(format!("prompt[{index}] is {item}, not a token id")).param("prompt")
        })
    };
    items.iter().enumerate().map(id).collect()
}

/// Choices are not ranked, so as many are sampled as are returned.
fn best_of(fields: &mut Fields, choices: u32) -> Result<(), ApiError> {
    match fields.count("best_of")? {
        None | Some(1) => Ok(()),
        Some(best_of) if best_of == choices => Ok(()),
        Some(best_of) => Err(unsupported("best_of", &json!(best_of))),
    }
}

/// The format of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Form {
    stream: StreamForm,
    /// Number of alternatives for each token.
    logprobs: Option<u32>,
    token_ids: bool,
    /// `token_id:<n>` instead of the text of a token.
    tokens_as_ids: bool,
}

impl Form {
    fn read(fields: &mut Fields, logprobs: Option<u32>) -> Result<Form, ApiError> {
        Ok(Form {
            stream: StreamForm::read(fields)?,
            logprobs,
            token_ids: fields.flag("return_token_ids")?.unwrap_or(false),
            tokens_as_ids: fields.flag("return_tokens_as_token_ids")?.unwrap_or(false),
        })
    }
}

/// A choice of a body or of a chunk.
#[derive(Serialize)]
struct CompletionChoice<'a> {
    index: usize,
    text: Cow<'a, str>,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

impl<'a> CompletionChoice<'a> {
    fn piece(index: usize, text: &'a str) -> CompletionChoice<'a> {
        CompletionChoice {
            index,
            text: text.into(),
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            token_ids: None,
            prompt_token_ids: None,
        }
    }
}

#[derive(Default, Serialize)]
struct Logprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    /// The most likely texts and the sampled one; `null` if they are no longer known.
    top_logprobs: Option<Vec<Map<String, Value>>>,
    /// Where each token begins, in characters from the beginning of the answer.
    text_offset: Vec<usize>,
}

impl Logprobs {
    /// `characters` is the number of characters that have begun before these tokens, and is updated to the number after
    /// them.
    fn of(
        tokens: Tokens<'_>,
        form: Form,
        characters: &mut usize,
        tokenizer: &Tokenizer,
    ) -> Logprobs {
        let text =
            |id: u32, logprob: f32| TokenText::of(id, logprob, form.tokens_as_ids, tokenizer).token;
        let mut logprobs = Logprobs::default();
        for (index, (&id, &logprob)) in tokens.ids.iter().zip(tokens.logprobs).enumerate() {
            let token = text(id, logprob);
            if let Some(top) = tokens.top.get(index) {
                let entry = |&(id, logprob)| (text(id, logprob), json!(logprob));
                let mut top: Map<String, Value> = top.iter().map(entry).collect();
                top.insert(token.clone(), json!(logprob));
                logprobs.top_logprobs.get_or_insert_default().push(top);
            }
            let begins = begin(&tokenizer.token_bytes(id), characters);
            logprobs.text_offset.push(begins);
            logprobs.tokens.push(token);
            logprobs.token_logprobs.push(logprob);
        }
        logprobs
    }
}

/// The index of the character at which these bytes begin; the rest of an unfinished character counts as that character.
fn begin(bytes: &[u8], characters: &mut usize) -> usize {
    let continues = |byte: &u8| byte & 0xC0 == 0x80;
    let within = bytes.first().is_some_and(continues);
    let begins = characters.saturating_sub(usize::from(within));
    *characters += bytes.iter().filter(|byte| !continues(byte)).count();
    begins
}

fn answer_id(head: &Head) -> String {
    format!("cmpl-{}", head.id)
}

impl Reply for Form {
    fn streams(&self) -> bool {
        self.stream.stream
    }

    fn shows_prompt(&self) -> bool {
        self.token_ids
    }

    fn whole(&self, answer: &Answer, tokenizer: &Tokenizer) -> Vec<u8> {
        let choice = |(index, choice)| whole_choice(index, choice, &answer.head, *self, tokenizer);
        let choices = answer.choices.iter().enumerate().map(choice);
        let id = answer_id(&answer.head);
        whole_body(id, "text_completion", answer, choices, None)
    }

    fn events(&self) -> Box<dyn Events> {
        Box::new(CompletionChunks {
            form: *self,
            chunks: Chunks::new(self.stream),
            characters: Vec::new(),
        })
    }
}

fn whole_choice<'a>(
    index: usize,
    choice: &'a Choice,
    head: &'a Head,
    form: Form,
    tokenizer: &Tokenizer,
) -> CompletionChoice<'a> {
    let logprobs = |_| Logprobs::of(choice.tokens(), form, &mut 0, tokenizer);
    CompletionChoice {
        index,
        // A completion is always text.
        text: choice.message.content.joined().unwrap_or_default(),
        logprobs: form.logprobs.map(logprobs),
        finish_reason: Some(stop_or_length(choice.finish)),
        stop_reason: choice.stop.as_deref(),
        token_ids: form.token_ids.then_some(&*choice.sampled),
        prompt_token_ids: head.prompt.as_deref(),
    }
}

/// Writes `text_completion` chunks.
struct CompletionChunks {
    form: Form,
    chunks: Chunks,
    /// Number of characters begun so far in each choice.
    characters: Vec<usize>,
}

impl CompletionChunks {
    fn logprobs(
        &mut self,
        choice: usize,
        tokens: Tokens<'_>,
        tokenizer: &Tokenizer,
    ) -> Option<Logprobs> {
        self.form.logprobs.filter(|_| !tokens.ids.is_empty())?;
        let begun = self.characters.get_mut(choice)?;
        Some(Logprobs::of(tokens, self.form, begun, tokenizer))
    }
}

impl Events for CompletionChunks {
    fn begin(&mut self, head: &Head, out: &mut Vec<u8>) {
        self.characters = vec![0; head.choices as usize];
        self.chunks.begin(&answer_id(head), "text_completion", head);
        let Some(prompt) = head.prompt.as_deref() else {
            return;
        };
        let first = |index| CompletionChoice {
            prompt_token_ids: Some(prompt),
            ..CompletionChoice::piece(index, "")
        };
        let choices = 0..self.characters.len();
        self.chunks
            .chunk(out, &choices.map(first).collect::<Vec<_>>());
    }

    fn progress(
        &mut self,
        choice: usize,
        deltas: &[Delta],
        tokens: Tokens<'_>,
        tokenizer: &Tokenizer,
        out: &mut Vec<u8>,
    ) {
        let text: String = deltas.iter().map(shown_text).collect();
        let shows_tokens = self.form.logprobs.is_some() || self.form.token_ids;
        let any = !tokens.ids.is_empty() && shows_tokens;
        if text.is_empty() && !any {
            return;
        }
        let piece = CompletionChoice {
            logprobs: self.logprobs(choice, tokens, tokenizer),
            token_ids: (any && self.form.token_ids).then_some(tokens.ids),
            ..CompletionChoice::piece(choice, &text)
        };
        self.chunks.chunk(out, &[piece]);
    }

    fn end(&mut self, answer: &Answer, out: &mut Vec<u8>) {
        for (index, choice) in answer.choices.iter().enumerate() {
            let last = CompletionChoice {
                finish_reason: Some(stop_or_length(choice.finish)),
                stop_reason: choice.stop.as_deref(),
                ..CompletionChoice::piece(index, "")
            };
            self.chunks.chunk(out, &[last]);
        }
        self.chunks.end(answer, out);
    }

    fn error(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        self.chunks.error(error, out);
    }
}

/// A completion is parsed for nothing but text.
fn shown_text(delta: &Delta) -> &str {
    match delta {
        Delta::Content(text) | Delta::Reasoning(text) => text,
        Delta::ToolCall { .. } => "",
    }
}

#[cfg(test)]
mod tests;
