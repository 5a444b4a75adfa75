//! A turn's answer in OpenAI's shapes: whole, or as server-sent events.

use super::dialect::AnswerForm;
use crate::http::ApiError;
use bytes::Bytes;
use primerl_core::RolloutId;
use primerl_core::turn::FinishReason;
use primerl_render::{Content, Message, ToolCall};
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// What every form of the answer is made from.
#[derive(Debug)]
pub(super) struct Answer {
    pub id: String,
    pub created: u64,
    pub model: String,
    pub session: Arc<str>,
    pub context_digest: u128,
    pub message: Message,
    pub finish: FinishReason,
    pub prompt: Vec<u32>,
    pub sampled: Arc<[u32]>,
    pub logprobs: Arc<[f32]>,
}

#[derive(Serialize)]
struct Completion<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: [Choice<'a>; 1],
    usage: Usage,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    message: AnswerMessage<'a>,
    logprobs: Option<Logprobs>,
    finish_reason: &'static str,
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
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
}

#[derive(Serialize)]
struct Logprobs {
    content: Vec<TokenLogprob>,
}

#[derive(Serialize)]
struct TokenLogprob {
    /// `token_id:<n>` instead of text, so that nobody is tempted to tokenise it again.
    token: String,
    logprob: f32,
    bytes: (),
    top_logprobs: [(); 0],
}

pub(super) fn answer_id(rollout: RolloutId, turn: u32) -> String {
    format!("chatcmpl-{rollout}-{turn}")
}

/// Seconds since 1970, for `created`.
pub(super) fn unix_time() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

impl Answer {
    fn finish_reason(&self) -> &'static str {
        match self.finish {
            FinishReason::Stop if self.message.has_tool_calls() => "tool_calls",
            FinishReason::Stop => "stop",
            FinishReason::Length | FinishReason::Abort => "length",
        }
    }

    fn usage(&self) -> Usage {
        let (prompt_tokens, completion_tokens) = (self.prompt.len(), self.sampled.len());
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
        }
    }

    fn message(&self) -> AnswerMessage<'_> {
        AnswerMessage {
            role: "assistant",
            content: &self.message.content,
            reasoning_content: self.message.reasoning_content.as_deref(),
            tool_calls: self.message.tool_calls.as_deref(),
        }
    }

    fn logprobs(&self) -> Logprobs {
        let entry = |(token, &logprob): (&u32, &f32)| TokenLogprob {
            token: format!("token_id:{token}"),
            logprob,
            bytes: (),
            top_logprobs: [],
        };
        Logprobs {
            content: self
                .sampled
                .iter()
                .zip(self.logprobs.iter())
                .map(entry)
                .collect(),
        }
    }

    /// The body of an answer that is not streamed.
    pub fn whole(&self, form: AnswerForm) -> Bytes {
        let choice = Choice {
            index: 0,
            message: self.message(),
            logprobs: form.logprobs.then(|| self.logprobs()),
            finish_reason: self.finish_reason(),
            token_ids: form.token_ids.then_some(&*self.sampled),
        };
        let completion = Completion {
            id: &self.id,
            object: "chat.completion",
            created: self.created,
            model: &self.model,
            choices: [choice],
            usage: self.usage(),
            prompt_token_ids: form.token_ids.then_some(&*self.prompt),
        };
        // Strings, numbers and lists always serialise.
        serde_json::to_vec(&completion).unwrap_or_default().into()
    }

    /// The same as events, in one piece: the engine was asked for the whole answer.
    pub fn events(&self, form: AnswerForm) -> Bytes {
        let mut text = String::new();
        let mut event = |choices: Value, usage: Option<Value>| {
            let mut chunk = json!({
                "id": self.id,
                "object": "chat.completion.chunk",
                "created": self.created,
                "model": self.model,
                "choices": choices,
            });
            if form.include_usage {
                chunk["usage"] = usage.unwrap_or(Value::Null);
            }
            text.push_str(&format!("data: {chunk}\n\n"));
        };
        let mut delta = json!(self.message());
        for (index, call) in delta["tool_calls"]
            .as_array_mut()
            .into_iter()
            .flatten()
            .enumerate()
        {
            call["index"] = index.into();
        }
        let mut first = json!({"index": 0, "delta": delta, "finish_reason": null});
        if form.logprobs {
            first["logprobs"] = json!(self.logprobs());
        }
        event(json!([first]), None);
        event(
            json!([{"index": 0, "delta": {}, "finish_reason": self.finish_reason()}]),
            None,
        );
        if form.include_usage {
            event(json!([]), Some(json!(self.usage())));
        }
        text.push_str("data: [DONE]\n\n");
        text.into()
    }
}

/// An error after the stream's headers were sent.
pub(super) fn error_events(error: &ApiError) -> Bytes {
    format!("data: {}\n\ndata: [DONE]\n\n", error.to_json()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORM: AnswerForm = AnswerForm {
        stream: false,
        include_usage: true,
        logprobs: true,
        token_ids: true,
    };

    fn answer() -> Answer {
        Answer {
            id: answer_id(RolloutId(7), 0),
            created: 1,
            model: "m".into(),
            session: "".into(),
            context_digest: 0,
            message: Message::assistant("hi"),
            finish: FinishReason::Stop,
            prompt: vec![1, 2, 3],
            sampled: vec![4, 256].into(),
            logprobs: vec![-0.5, -1.0].into(),
        }
    }

    #[test]
    fn a_whole_answer_has_openais_shape() {
        let body: Value = serde_json::from_slice(&answer().whole(FORM)).expect("is JSON");
        assert_eq!(body["object"], "chat.completion");
        assert_eq!(
            body["choices"][0]["message"],
            json!({"role": "assistant", "content": "hi"})
        );
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
        assert_eq!(body["choices"][0]["token_ids"], json!([4, 256]));
        assert_eq!(body["prompt_token_ids"], json!([1, 2, 3]));
        assert_eq!(
            body["choices"][0]["logprobs"]["content"][1]["token"],
            "token_id:256"
        );
        assert_eq!(
            body["usage"],
            json!({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5})
        );
    }

    #[test]
    fn events_end_with_done_and_carry_the_usage() {
        let events = answer().events(AnswerForm {
            stream: true,
            ..FORM
        });
        let text = String::from_utf8(events.to_vec()).expect("is text");
        let chunks: Vec<&str> = text
            .split("\n\n")
            .filter(|chunk| !chunk.is_empty())
            .collect();
        assert_eq!(chunks.last(), Some(&"data: [DONE]"));
        let parsed: Vec<Value> = chunks[..chunks.len() - 1]
            .iter()
            .map(|chunk| {
                serde_json::from_str(chunk.strip_prefix("data: ").expect("is data"))
                    .expect("is JSON")
            })
            .collect();
        assert_eq!(parsed[0]["choices"][0]["delta"]["content"], "hi");
        assert_eq!(parsed[1]["choices"][0]["finish_reason"], "stop");
        assert_eq!(parsed[2]["usage"]["total_tokens"], 5);
        assert_eq!(parsed[2]["choices"], json!([]));
    }
}
