//! Parts of bodies and streams that chat and text completions have in common.

use super::sse::append;
use crate::answer::{Answer, Head};
use crate::fields::Fields;
use primerl_core::turn::FinishReason;
use primerl_service::http::ApiError;
use serde::Serialize;
use serde_json::{Value, json};

/// Whether an answer is streamed, and whether with its usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamForm {
    pub stream: bool,
    pub include_usage: bool,
}

impl StreamForm {
    pub(super) fn read(fields: &mut Fields) -> Result<StreamForm, ApiError> {
        let options = fields.map("stream_options")?.unwrap_or_default();
        Ok(StreamForm {
            stream: fields.flag("stream")?.unwrap_or(false),
            include_usage: options.get("include_usage") == Some(&Value::Bool(true)),
        })
    }
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
}

impl Usage {
    fn of(answer: &Answer) -> Usage {
        let (prompt_tokens, completion_tokens) =
            (answer.head.prompt_tokens, answer.completion_tokens());
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
        }
    }
}

/// The body of an answer that is not streamed.
#[derive(Serialize)]
struct Completion<'a, C> {
    id: String,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<C>,
    usage: Usage,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

pub(super) fn whole_body<C: Serialize>(
    id: String,
    object: &'static str,
    answer: &Answer,
    choices: impl Iterator<Item = C>,
    prompt_token_ids: Option<&[u32]>,
) -> Vec<u8> {
    let completion = Completion {
        id,
        object,
        created: answer.head.created,
        model: &answer.head.model,
        choices: choices.collect(),
        usage: Usage::of(answer),
        prompt_token_ids,
    };
    // Strings, numbers and lists can always be serialised.
    serde_json::to_vec(&completion).unwrap_or_default()
}

pub(super) fn stop_or_length(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Stop | FinishReason::StopSequence => "stop",
        FinishReason::Length | FinishReason::Abort => "length",
    }
}

/// Writes the chunks of one stream.
pub(super) struct Chunks {
    include_usage: bool,
    /// The beginning of all chunks, through `"choices":`.
    begin: String,
}

impl Chunks {
    pub(super) fn new(form: StreamForm) -> Chunks {
        Chunks {
            include_usage: form.include_usage,
            begin: String::new(),
        }
    }

    /// Takes the head; returns what comes before `"choices":`.
    pub(super) fn begin(&mut self, id: &str, object: &str, head: &Head) -> String {
        let common = format!(
            "data: {{\"id\":{},\"object\":\"{object}\",\"created\":{},\"model\":{},",
            json!(id),
            head.created,
            json!(&*head.model),
        );
        self.begin = format!("{common}\"choices\":");
        common
    }

    pub(super) fn chunk(&self, out: &mut Vec<u8>, choices: &(impl Serialize + ?Sized)) {
        self.open(out);
        append(out, choices);
        self.close(out);
    }

    pub(super) fn open(&self, out: &mut Vec<u8>) {
        out.extend(self.begin.as_bytes());
    }

    pub(super) fn close(&self, out: &mut Vec<u8>) {
        if self.include_usage {
            out.extend(b",\"usage\":null");
        }
        out.extend(b"}\n\n");
    }

    pub(super) fn end(&self, answer: &Answer, out: &mut Vec<u8>) {
        if self.include_usage {
            self.open(out);
            out.extend(b"[],\"usage\":");
            append(out, &Usage::of(answer));
            out.extend(b"}\n\n");
        }
        out.extend(b"data: [DONE]\n\n");
    }

    pub(super) fn error(&self, error: &ApiError, out: &mut Vec<u8>) {
        out.extend(format!("data: {}\n\ndata: [DONE]\n\n", error.to_json()).as_bytes());
    }
}
