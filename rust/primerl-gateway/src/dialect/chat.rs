//! OpenAI's chat completions, with the fields that vLLM adds.

mod body;

use super::chunks::{Chunks, StreamForm, stop_or_length, whole_body};
use super::logprobs::{TokenLogprob, token_logprobs};
use super::shared::{ToolChoice, is_neutral, structured_fields};
use super::sse::append;
use super::{Asked, Dialect, ReadRequest};
use crate::answer::{Answer, Choice, Events, Head, Reply, Tokens};
use crate::fields::Fields;
use crate::request::{IncomingOptions, Input, Parse, TurnRequest};
use crate::rollouts::Rollout;
use crate::sampling::{Rules, TurnSampling, choices, top_logprobs};
use crate::seen::{Hashed, Seen, Unseen};
use crate::text::Delta;
use body::Body;
use bytes::Bytes;
use primerl_core::turn::FinishReason;
use primerl_render::{Content, Tokenizer, ToolCall};
use primerl_service::http::ApiError;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::sync::Arc;

pub(crate) struct Chat;

impl Dialect for Chat {
    fn name(&self) -> &'static str {
        "Chat"
    }

    fn path(&self) -> &'static str {
        "chat/completions"
    }

    fn hash(
        &self,
        body: &Bytes,
        rollout: &Rollout,
        session: &Arc<str>,
    ) -> Result<Hashed, ApiError> {
        let seen = rollout.state.lock().session(session)?.seen.clone();
        Ok(Hashed::of(body, seen))
    }

    fn read(&self, asked: &Asked<'_>) -> Result<ReadRequest, ApiError> {
        let rollout = asked.rollout;
        let (request, seen) = read(
            asked.body,
            &rollout.rules(),
            asked.digest,
            asked.known.clone(),
        )?;
        rollout.state.lock().session(asked.session)?.seen = seen;
        Ok(request)
    }
}

/// Also returns the part of the body that is known from now on. `known`: the part that was read before.
pub(super) fn read(
    bytes: &Bytes,
    rules: &Rules<'_>,
    digest: u128,
    known: Option<Arc<Seen>>,
) -> Result<(ReadRequest, Option<Arc<Seen>>), ApiError> {
    let unseen = Unseen::of(bytes, known);
    let body: Body<'_> = serde_json::from_slice(&unseen.text)
        .map_err(|error| ApiError::invalid(format!("the body is not a chat request: {error}")))?;
    let piece = |raw: &RawValue| unseen.text.slice_ref(raw.get().as_bytes());
    let (messages, seen) = unseen.messages(bytes, &body.messages.unwrap_or_default());
    if messages.is_empty() {
        return Err(ApiError::invalid("messages is missing or empty").param("messages"));
    }
    let mut fields = body.others;
    let choice = ToolChoice::read(&mut fields)?;
    let (form, mut sampling) = read_fields(&mut fields, rules)?;
    sampling.demanded = choice.demanded;
    let one_call = fields.flag("parallel_tool_calls")? == Some(false);
    let choices = choices(&mut fields)?;
    fields.end(is_neutral)?;
    let request = TurnRequest {
        input: Input::Messages {
            messages,
            recurring: seen.as_deref().map(|seen| unseen.recurring(seen)),
            options: IncomingOptions::Raw {
                tools: body.tools.filter(|_| choice.told).map(piece),
                template_kwargs: rules.template_kwargs(body.template_kwargs.map(piece))?,
                documents: body.documents.map(piece),
            },
        },
        sampling,
        choices,
        parse: Parse::Message { one_call },
        digest,
    };
    Ok(((request, Box::new(form)), seen))
}

fn read_fields(fields: &mut Fields, rules: &Rules<'_>) -> Result<(Form, TurnSampling), ApiError> {
    let max_tokens = fields.count("max_tokens")?;
    let max_tokens = fields.count("max_completion_tokens")?.or(max_tokens);
    let stop = fields.texts("stop")?;
    let mut sampling = rules.read(fields, max_tokens, stop)?;
    sampling.structured_outputs = structured_fields(fields)?;
    let top = top_logprobs(fields.count("top_logprobs")?, "top_logprobs")?;
    let logprobs = fields.flag("logprobs")?.unwrap_or(false);
    if top > 0 && !logprobs {
        return Err(ApiError::invalid("top_logprobs needs logprobs = true").param("top_logprobs"));
    }
    sampling.logprobs = logprobs.then_some(top);
    let form = Form {
        stream: StreamForm::read(fields)?,
        logprobs,
        token_ids: fields.flag("return_token_ids")?.unwrap_or(false),
        tokens_as_ids: fields.flag("return_tokens_as_token_ids")?.unwrap_or(false),
    };
    Ok((form, sampling))
}

/// The format of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Form {
    stream: StreamForm,
    logprobs: bool,
    token_ids: bool,
    /// `token_id:<n>` instead of the text of a token.
    tokens_as_ids: bool,
}

#[derive(Serialize)]
struct WholeChoice<'a> {
    index: usize,
    message: AnswerMessage<'a>,
    logprobs: Option<Logprobs>,
    finish_reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct AnswerMessage<'a> {
    role: &'static str,
    content: &'a Content,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<&'a [ToolCall]>,
    /// Why parts of the content that look like tool calls are not tool calls.
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    malformed_tool_calls: &'a [String],
}

#[derive(Serialize)]
struct Logprobs {
    content: Vec<TokenLogprob>,
}

impl Logprobs {
    fn of(tokens: Tokens<'_>, form: Form, tokenizer: &Tokenizer) -> Logprobs {
        Logprobs {
            content: token_logprobs(tokens, form.tokens_as_ids, tokenizer),
        }
    }
}

fn finish_reason(choice: &Choice) -> &'static str {
    match choice.finish {
        FinishReason::Stop if choice.message.has_tool_calls() => "tool_calls",
        finish => stop_or_length(finish),
    }
}

fn answer_id(head: &Head) -> String {
    format!("chatcmpl-{}", head.id)
}

impl Reply for Form {
    fn streams(&self) -> bool {
        self.stream.stream
    }

    fn shows_prompt(&self) -> bool {
        self.token_ids
    }

    fn whole(&self, answer: &Answer, tokenizer: &Tokenizer) -> Vec<u8> {
        let choice = |(index, choice)| whole_choice(index, choice, *self, tokenizer);
        let choices = answer.choices.iter().enumerate().map(choice);
        let id = answer_id(&answer.head);
        whole_body(
            id,
            "chat.completion",
            answer,
            choices,
            answer.head.prompt.as_deref(),
        )
    }

    fn events(&self) -> Box<dyn Events> {
        Box::new(ChatChunks {
            form: *self,
            chunks: Chunks::new(self.stream),
        })
    }
}

fn whole_choice<'a>(
    index: usize,
    choice: &'a Choice,
    form: Form,
    tokenizer: &Tokenizer,
) -> WholeChoice<'a> {
    let logprobs = || Logprobs::of(choice.tokens(), form, tokenizer);
    WholeChoice {
        index,
        message: AnswerMessage {
            role: "assistant",
            content: &choice.message.content,
            reasoning_content: choice.message.reasoning_content.as_deref(),
            tool_calls: choice.message.tool_calls.as_deref(),
            malformed_tool_calls: &choice.malformed,
        },
        logprobs: form.logprobs.then(logprobs),
        finish_reason: finish_reason(choice),
        stop_reason: choice.stop.as_deref(),
        token_ids: form.token_ids.then_some(&*choice.sampled),
    }
}

/// Writes `chat.completion.chunk`s.
struct ChatChunks {
    form: Form,
    chunks: Chunks,
}

impl ChatChunks {
    /// One chunk for one choice. The usual kind, a piece of text, is written by hand, because most of a stream consists
    /// of it.
    fn piece(&self, out: &mut Vec<u8>, choice: usize, delta: &Delta, tokens: Option<TokenFields>) {
        if let (Delta::Content(text), None) = (delta, &tokens) {
            self.chunks.open(out);
            out.extend(b"[{\"index\":");
            append(out, &choice);
            out.extend(b",\"delta\":{\"content\":");
            append(out, text);
            out.extend(b"},\"logprobs\":null,\"finish_reason\":null}]");
            self.chunks.close(out);
            return;
        }
        let mut value = json!({"index": choice, "delta": delta_json(delta), "logprobs": null, "finish_reason": null});
        if let Some(tokens) = tokens {
            tokens.add_to(&mut value);
        }
        self.chunks.chunk(out, &[value]);
    }

    fn token_fields(&self, tokens: Tokens<'_>, tokenizer: &Tokenizer) -> Option<TokenFields> {
        let wanted = self.form.logprobs || self.form.token_ids;
        (wanted && !tokens.ids.is_empty()).then(|| TokenFields {
            logprobs: self
                .form
                .logprobs
                .then(|| json!(Logprobs::of(tokens, self.form, tokenizer))),
            token_ids: self.form.token_ids.then(|| json!(tokens.ids)),
        })
    }
}

/// Fields of a chunk that depend on tokens, not on text.
struct TokenFields {
    logprobs: Option<Value>,
    token_ids: Option<Value>,
}

impl TokenFields {
    fn add_to(self, choice: &mut Value) {
        if let Some(logprobs) = self.logprobs {
            choice["logprobs"] = logprobs;
        }
        if let Some(token_ids) = self.token_ids {
            choice["token_ids"] = token_ids;
        }
    }
}

fn delta_json(delta: &Delta) -> Value {
    match delta {
        Delta::Content(text) => json!({"content": text}),
        Delta::Reasoning(text) => json!({"reasoning_content": text}),
        Delta::ToolCall {
            index,
            id,
            name,
            arguments,
        } => json!({"tool_calls": [{"index": index, "id": id, "type": "function",
            "function": {"name": name, "arguments": arguments}}]}),
    }
}

impl Events for ChatChunks {
    fn begin(&mut self, head: &Head, out: &mut Vec<u8>) {
        let common = self
            .chunks
            .begin(&answer_id(head), "chat.completion.chunk", head);
        let first = json!({"role": "assistant", "content": ""});
        let choices = (0..head.choices).map(|index| json!({"index": index, "delta": first, "logprobs": null, "finish_reason": null}));
        let choices: Vec<Value> = choices.collect();
        out.extend(common.as_bytes());
        if let Some(prompt) = &head.prompt {
            out.extend(b"\"prompt_token_ids\":");
            append(out, &**prompt);
            out.push(b',');
        }
        out.extend(b"\"choices\":");
        append(out, &choices);
        self.chunks.close(out);
    }

    fn progress(
        &mut self,
        choice: usize,
        deltas: &[Delta],
        tokens: Tokens<'_>,
        tokenizer: &Tokenizer,
        out: &mut Vec<u8>,
    ) {
        let mut fields = self.token_fields(tokens, tokenizer);
        if deltas.is_empty() && fields.is_some() {
            self.piece(out, choice, &Delta::Content(String::new()), fields.take());
        }
        for delta in deltas {
            self.piece(out, choice, delta, fields.take());
        }
    }

    fn end(&mut self, answer: &Answer, out: &mut Vec<u8>) {
        for (index, choice) in answer.choices.iter().enumerate() {
            let mut last = json!({"index": index, "delta": {}, "logprobs": null, "finish_reason": finish_reason(choice)});
            if let Some(stop) = &choice.stop {
                last["stop_reason"] = json!(stop);
            }
            self.chunks.chunk(out, &[last]);
        }
        self.chunks.end(answer, out);
    }

    fn error(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        self.chunks.error(error, out);
    }
}

#[cfg(test)]
mod tests;
