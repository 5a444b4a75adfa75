//! The body of an answer.

use primerl_core::turn::FinishReason;
use primerl_render::Message;
use serde::Deserialize;
use serde_json::Value;

/// One answer, as text.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatAnswer {
    /// The name that the server gives; some servers return a dated name for the requested one.
    pub model: String,
    pub message: Message,
    pub finish: FinishReason,
    /// The stop sequence that ended it, if the server reports it.
    pub stop: Option<String>,
    /// Counted by the server; 0 if it does not say.
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
}

#[derive(Deserialize)]
struct Body {
    model: Option<String>,
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Value,
}

#[derive(Deserialize)]
struct Choice {
    message: Message,
    finish_reason: Option<String>,
    /// From vLLM: the stop sequence, or the id of a stop token.
    #[serde(default)]
    stop_reason: Value,
}

/// Counted by the server, in its own way: an answer without counts is still valid.
fn counted(count: &Value) -> u32 {
    let count = count.as_u64();
    count
        .and_then(|count| u32::try_from(count).ok())
        .unwrap_or(0)
}

impl ChatAnswer {
    /// `asked` is the model's name in the request. The error says what is wrong with the body.
    pub fn parse(bytes: &[u8], asked: &str) -> Result<ChatAnswer, String> {
        let body: Body = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let [choice] = <[Choice; 1]>::try_from(body.choices)
            .map_err(|choices| format!("{} choices instead of one", choices.len()))?;
        let stop = choice.stop_reason.as_str().map(str::to_owned);
        let finish = match (choice.finish_reason.as_deref(), &stop) {
            (Some("stop"), Some(_)) => FinishReason::StopSequence,
            (Some("stop" | "tool_calls" | "function_call"), _) => FinishReason::Stop,
            // A filter cuts an answer off, too.
            (Some("length" | "content_filter"), _) => FinishReason::Length,
            (other, _) => return Err(format!("finish_reason is {other:?}")),
        };

        Ok(ChatAnswer {
            model: body.model.unwrap_or_else(|| asked.to_owned()),
            message: own_words(choice.message),
            finish,
            stop,
            prompt_tokens: counted(&body.usage["prompt_tokens"]),
            completion_tokens: counted(&body.usage["completion_tokens"]),
        })
    }
}

/// The parts of a message that clients see. Servers name reasoning in two ways, and add their own fields.
fn own_words(message: Message) -> Message {
    let mut extra = message.extra;
    let reasoning = message
        .reasoning_content
        .or(match extra.remove("reasoning") {
            Some(Value::String(reasoning)) => Some(reasoning),
            _ => None,
        });
    Message {
        role: "assistant".into(),
        content: message.content,
        reasoning_content: reasoning.filter(|reasoning| !reasoning.is_empty()),
        tool_calls: message.tool_calls.filter(|calls| !calls.is_empty()),
        ..Message::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use primerl_render::Content;
    use serde_json::json;

    fn parse(body: Value) -> Result<ChatAnswer, String> {
        ChatAnswer::parse(body.to_string().as_bytes(), "asked")
    }

    #[test]
    fn openais_own_shape_is_read() {
        let answer = parse(json!({
            "id": "x", "object": "chat.completion", "model": "dated-name", "choices": [{"index": 0, "message":
            {"role": "assistant", "content": "Hi", "refusal": null, "annotations": []}, "logprobs": null,
            "finish_reason": "stop"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}));
        let answer = answer.expect("is an answer");
        assert_eq!(answer.model, "dated-name");
        assert_eq!(answer.message, Message::assistant("Hi"));
        assert_eq!((answer.prompt_tokens, answer.completion_tokens), (3, 2));
        assert_eq!((answer.finish, answer.stop), (FinishReason::Stop, None));
    }

    #[test]
    fn calls_reasoning_and_stops_of_other_servers_are_read() {
        let answer = parse(
            json!({"choices": [{"message": {"role": "assistant", "content": null, "reasoning": "Hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            "finish_reason": "tool_calls", "stop_reason": 7}]}),
        );
        let answer = answer.expect("is an answer");
        assert_eq!(answer.model, "asked");
        assert_eq!(answer.message.content, Content::Null);
        assert_eq!(answer.message.reasoning_content.as_deref(), Some("Hm"));
        assert!(answer.message.has_tool_calls() && answer.finish == FinishReason::Stop);
        let stopped = parse(
            json!({"choices": [{"message": {"role": "assistant", "content": "a"},
            "finish_reason": "stop", "stop_reason": "END"}]}),
        );
        let stopped = stopped.expect("is an answer");
        assert_eq!(stopped.finish, FinishReason::StopSequence);
        assert_eq!(stopped.stop.as_deref(), Some("END"));
    }

    #[test]
    fn an_invalid_answer_is_refused() {
        assert!(
            parse(json!({"choices": []}))
                .expect_err("none")
                .contains("0 choices")
        );
        let unfinished =
            json!({"choices": [{"message": {"role": "assistant"}, "finish_reason": null}]});
        assert!(
            parse(unfinished)
                .expect_err("unfinished")
                .contains("finish_reason")
        );
        assert!(ChatAnswer::parse(b"<html>", "m").is_err());
    }
}
