//! The response object: the request's parameters and its result.

use super::items::{OutputItem, Status};
use super::tools::Tools;
use crate::answer::Head;
use primerl_core::turn::FinishReason;
use primerl_service::http::ApiError;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Fields of a request that its response repeats.
#[derive(Debug)]
pub(crate) struct Form {
    pub stream: bool,
    pub store: bool,
    pub logprobs: bool,
    pub top_logprobs: u32,
    pub temperature: f64,
    pub top_p: f64,
    pub max_output_tokens: Option<u32>,
    pub instructions: Option<Arc<str>>,
    pub metadata: Map<String, Value>,
    pub parallel_tool_calls: bool,
    pub previous_response_id: Option<String>,
    /// `text.format`.
    pub format: Value,
    pub tool_choice: Value,
    pub tools: Arc<Tools>,
}

/// The result so far.
#[derive(Debug)]
pub(crate) struct Response {
    pub head: Head,
    pub status: Status,
    pub output: Vec<OutputItem>,
    /// Number of sampled tokens, once sampling has ended.
    pub output_tokens: Option<usize>,
    pub error: Option<String>,
}

impl Response {
    pub(crate) fn begun(head: &Head) -> Response {
        Response {
            head: head.clone(),
            status: Status::InProgress,
            output: Vec::new(),
            output_tokens: None,
            error: None,
        }
    }

    pub(crate) fn ended(
        head: &Head,
        finish: FinishReason,
        mut output: Vec<OutputItem>,
        output_tokens: usize,
    ) -> Response {
        let status = match finish {
            FinishReason::Stop | FinishReason::StopSequence => Status::Completed,
            FinishReason::Length | FinishReason::Abort => Status::Incomplete,
        };
        // Only the last item can have been truncated.
        if let Some(last) = output.last_mut() {
            last.status = status;
        }
        Response {
            status,
            output,
            output_tokens: Some(output_tokens),
            ..Response::begun(head)
        }
    }

    pub(crate) fn failed(head: &Head, output: Vec<OutputItem>, error: &ApiError) -> Response {
        Response {
            status: Status::Failed,
            output,
            error: Some(error.message.clone()),
            ..Response::begun(head)
        }
    }

    pub(crate) fn id(&self) -> String {
        format!("resp_{}", self.head.id)
    }

    pub(crate) fn json(&self, form: &Form) -> Value {
        let output: Vec<Value> = self.output.iter().map(OutputItem::json).collect();
        let error = self.error.as_ref();
        let error = error.map(|message| json!({"code": "server_error", "message": message}));
        let incomplete = self.status == Status::Incomplete;
        let incomplete = incomplete.then(|| json!({"reason": "max_output_tokens"}));
        json!({
            "id": self.id(),
            "object": "response",
            "created_at": self.head.created,
            "status": self.status.name(),
            "background": false,
            "error": error,
            "incomplete_details": incomplete,
            "instructions": form.instructions,
            "max_output_tokens": form.max_output_tokens,
            "metadata": form.metadata,
            "model": self.head.model,
            "output": output,
            "parallel_tool_calls": form.parallel_tool_calls,
            "previous_response_id": form.previous_response_id,
            "reasoning": {"effort": null, "summary": null},
            "store": form.store,
            "temperature": form.temperature,
            "text": {"format": form.format},
            "tool_choice": form.tool_choice,
            "tools": form.tools.shown,
            "top_logprobs": form.top_logprobs,
            "top_p": form.top_p,
            "truncation": "disabled",
            "usage": self.usage(),
        })
    }

    /// Cached tokens of the engine, and the reasoning part of the answer, are not counted separately.
    fn usage(&self) -> Option<Value> {
        let (input, output) = (self.head.prompt_tokens, self.output_tokens?);
        Some(json!({
            "input_tokens": input,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": input + output,
        }))
    }
}
