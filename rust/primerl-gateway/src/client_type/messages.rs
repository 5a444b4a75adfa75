//! Writes a request's messages and options in the format of OpenAI's chat completions.

use crate::request::{Incoming, Options};
use primerl_engines::ChatMessages;
use primerl_render::Message;
use primerl_service::http::ApiError;
use serde_json::Value;

pub(super) fn chat_messages(
    messages: &[Incoming],
    options: &Options,
) -> Result<ChatMessages, ApiError> {
    if options.render.documents.is_some() {
        let message = "documents are not supported, because another server renders this rollout's messages; put them \
                       into a message";
        return Err(ApiError::invalid(message)
            .param("documents")
            .code("unsupported_parameter"));
    }
    Ok(ChatMessages {
        messages: list(messages)?.into(),
        tools: options.render.tools.clone(),
        template_kwargs: options.render.template_kwargs.clone(),
    })
}

/// Chat messages are forwarded unchanged.
fn list(messages: &[Incoming]) -> Result<Vec<u8>, ApiError> {
    let mut list = b"[".to_vec();
    for (index, message) in messages.iter().enumerate() {
        if index > 0 {
            list.push(b',');
        }
        match message {
            Incoming::Raw { text, .. } => list.extend_from_slice(text),
            Incoming::Read(_) | Incoming::Keyed(_) => {
                let message = with_written_arguments(message.read(index)?.into_owned());
                serde_json::to_writer(&mut list, &message)
                    .map_err(|error| ApiError::internal(error.to_string()))?;
            }
        }
    }
    list.push(b']');
    Ok(list)
}

/// On the wire, the arguments of a call are a string with a JSON object.
fn with_written_arguments(mut message: Message) -> Message {
    for call in message.tool_calls.iter_mut().flatten() {
        call.kind.get_or_insert_with(|| "function".into());
        if !call.function.arguments.is_string() {
            let written = call.function.arguments.to_string();
            call.function.arguments = Value::String(written);
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use primerl_render::{FunctionCall, ToolCall};
    use serde_json::{Map, json};

    #[test]
    fn raw_messages_stay_and_others_are_written() {
        let call = ToolCall {
            id: Some("c".into()),
            kind: None,
            function: FunctionCall {
                name: "f".into(),
                arguments: json!({"x": 1}),
            },
            extra: Map::new(),
        };
        let answer = Message {
            tool_calls: Some(vec![call]),
            ..Message::assistant("a")
        };
        let messages = [
            Incoming::raw(bytes::Bytes::from_static(
                b"{ \"role\": \"user\", \"content\": \"1.0\" }",
            )),
            Incoming::Read(Box::new(answer)),
        ];
        let options = Options::new(Some(vec![json!({"type": "function"})]), Map::new());
        let chat = chat_messages(&messages, &options).expect("is written");
        let text = String::from_utf8(chat.messages.to_vec()).expect("is text");
        assert!(text.starts_with("[{ \"role\": \"user\", \"content\": \"1.0\" },"));
        let read: Vec<Value> = serde_json::from_str(&text).expect("is a list");
        let call = &read[1]["tool_calls"][0];
        assert_eq!(call["function"]["arguments"], json!("{\"x\":1}"));
        assert_eq!(call["type"], "function");
        assert_eq!(chat.tools.expect("are there").len(), 1);
    }

    #[test]
    fn documents_are_refused_by_name() {
        let options = Options::with_documents(None, Map::new(), Some(vec![json!({})]));
        let refused = chat_messages(&[], &options).expect_err("is refused");
        assert_eq!(refused.param.as_deref(), Some("documents"));
    }
}
