//! A request in a form that is independent of dialects: messages, template options and sampling parameters.

use super::sampling::TurnSampling;
use bytes::Bytes;
use primerl_core::conversation::{MessageKey, digest_next, digest_start, message_hash};
use primerl_core::turn::AnswerKey;
use primerl_render::{
    Message, RenderOptions, answer_words, canonical, canonical_json, reasoning_words,
};
use primerl_service::http::ApiError;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::sync::Arc;

/// One message of a request.
#[derive(Clone, Debug)]
pub(crate) enum Incoming {
    /// OpenAI's chat message, unparsed. Most messages of a history are known already, so only new ones are parsed.
    Raw {
        text: Bytes,
        /// [`message_hash`] of it.
        digest: u128,
    },
    /// A message made from another dialect's items.
    Read(Box<Message>),
    /// The same, kept from one request to the next.
    Keyed(Arc<KeyedMessage>),
}

/// A message and its key, which takes longer to compute than to look up.
#[derive(Debug)]
pub(crate) struct KeyedMessage {
    pub message: Message,
    pub key: MessageKey,
}

impl KeyedMessage {
    pub(crate) fn new(message: Message) -> Arc<KeyedMessage> {
        let key = message_key(&message);
        Arc::new(KeyedMessage { message, key })
    }
}

impl Incoming {
    /// A chat message as JSON text.
    pub(crate) fn raw(text: Bytes) -> Incoming {
        let digest = message_hash(&text);
        Incoming::Raw { text, digest }
    }

    /// Hash of the bytes, which identifies a message that was seen before; `None` if the message was not made from
    /// bytes.
    pub(crate) fn raw_digest(&self) -> Option<u128> {
        match self {
            Incoming::Raw { digest, .. } => Some(*digest),
            Incoming::Read(_) | Incoming::Keyed(_) => None,
        }
    }

    /// The message's key, if it is known already.
    pub(crate) fn key(&self) -> Option<MessageKey> {
        match self {
            Incoming::Keyed(keyed) => Some(keyed.key),
            Incoming::Raw { .. } | Incoming::Read(_) => None,
        }
    }

    /// The message; `index` is its position in the request.
    pub(crate) fn read(&self, index: usize) -> Result<Cow<'_, Message>, ApiError> {
        match self {
            Incoming::Read(message) => Ok(Cow::Borrowed(message)),
            Incoming::Keyed(keyed) => Ok(Cow::Borrowed(&keyed.message)),
            Incoming::Raw { text, .. } => {
                let mut message: Message = serde_json::from_slice(text).map_err(|error| {
                    ApiError::invalid(format!("messages[{index}]: {error}")).param("messages")
                })?;
                adopt_reasoning(&mut message);
                Ok(Cow::Owned(message))
            }
        }
    }
}

/// Other servers call it `reasoning`; templates know `reasoning_content`.
fn adopt_reasoning(message: &mut Message) {
    if message.reasoning_content.is_none()
        && let Some(Value::String(reasoning)) = message.extra.get("reasoning")
    {
        message.reasoning_content = Some(reasoning.clone());
    }
}

/// The key by which the conversation recognises a message.
pub(crate) fn message_key(message: &Message) -> MessageKey {
    MessageKey {
        exact: message_hash(&canonical(message)),
        answer: message.is_assistant().then(|| answer_key(message)),
    }
}

pub(crate) fn answer_key(message: &Message) -> AnswerKey {
    AnswerKey {
        said: message_hash(&answer_words(message)),
        reasoning: reasoning_words(message).map(|words| message_hash(words.as_bytes())),
    }
}

/// What the template gets in addition to the messages. Usually the same for all turns of a conversation.
#[derive(Debug)]
pub(crate) struct Options {
    pub render: RenderOptions,
    /// Digest of an empty message list with these options.
    pub start_digest: u128,
}

impl Options {
    pub(crate) fn new(tools: Option<Vec<Value>>, template_kwargs: Map<String, Value>) -> Options {
        Options::with_documents(tools, template_kwargs, None)
    }

    pub(crate) fn with_documents(
        tools: Option<Vec<Value>>,
        template_kwargs: Map<String, Value>,
        documents: Option<Vec<Value>>,
    ) -> Options {
        let tools = tools.filter(|tools| !tools.is_empty());
        let canonical = canonical_json(&serde_json::json!([tools, template_kwargs, documents]));
        Options {
            render: RenderOptions {
                tools,
                add_generation_prompt: true,
                template_kwargs,
                documents,
                ..RenderOptions::default()
            },
            start_digest: digest_start(canonical.as_bytes()),
        }
    }
}

/// Options, unparsed or parsed.
#[derive(Clone, Debug)]
pub(crate) enum IncomingOptions {
    /// JSON texts, which are parsed only if they are new.
    Raw {
        tools: Option<Bytes>,
        template_kwargs: Option<Bytes>,
        documents: Option<Bytes>,
    },
    Read(Arc<Options>),
}

impl IncomingOptions {
    /// Hash of the bytes, which identifies options that were seen before; `None` if they were not made from bytes.
    pub(crate) fn raw_digest(&self) -> Option<u128> {
        match self {
            IncomingOptions::Read(_) => None,
            IncomingOptions::Raw {
                tools,
                template_kwargs,
                documents,
            } => {
                let hash = |part: &Option<Bytes>| part.as_ref().map_or(0, |raw| message_hash(raw));
                let known = digest_next(hash(tools), hash(template_kwargs));
                Some(digest_next(known, hash(documents)))
            }
        }
    }

    /// Length of the text, in bytes.
    pub(crate) fn raw_len(&self) -> usize {
        match self {
            IncomingOptions::Read(_) => 0,
            IncomingOptions::Raw {
                tools,
                template_kwargs,
                documents,
            } => {
                let parts = [tools, template_kwargs, documents];
                parts.into_iter().flatten().map(Bytes::len).sum()
            }
        }
    }

    pub(crate) fn read(&self) -> Result<Arc<Options>, ApiError> {
        match self {
            IncomingOptions::Read(options) => Ok(Arc::clone(options)),
            IncomingOptions::Raw {
                tools,
                template_kwargs,
                documents,
            } => {
                let kwargs = part("chat_template_kwargs", template_kwargs)?;
                Ok(Arc::new(Options::with_documents(
                    objects("tools", tools)?,
                    kwargs.unwrap_or_default(),
                    objects("documents", documents)?,
                )))
            }
        }
    }
}

fn part<T: DeserializeOwned>(name: &str, raw: &Option<Bytes>) -> Result<Option<T>, ApiError> {
    let Some(raw) = raw else {
        return Ok(None);
    };
    serde_json::from_slice(raw)
        .map_err(|error| ApiError::invalid(format!("{name}: {error}")).param(name))
}

/// Otherwise a template would render anything else that is there.
fn objects(name: &str, raw: &Option<Bytes>) -> Result<Option<Vec<Value>>, ApiError> {
    let items: Option<Vec<Value>> = part(name, raw)?;
    let other = |items: &Vec<Value>| items.iter().position(|item| !item.is_object());
    match items.as_ref().and_then(other) {
        None => Ok(items),
        Some(index) => {
            let named = format!("{name}[{index}]");
            Err(ApiError::invalid(format!("{named} must be an object")).param(named))
        }
    }
}

/// The input that the model continues.
#[derive(Debug)]
pub(crate) enum Input {
    Messages {
        messages: Vec<Incoming>,
        options: IncomingOptions,
        /// Hashes of the request's bytes, if the messages can be recognised by them.
        recurring: Option<Recurring>,
    },
    /// Text without a template; the engine gets its tokens.
    Text(String),
    Ids(Vec<u32>),
}

/// Identifies a request's messages when the next request begins with them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recurring {
    /// Hash through the last message.
    pub through: u128,
    /// The same for an earlier request with whose messages this one begins.
    pub from: Option<u128>,
}

/// A valid request.
#[derive(Debug)]
pub(crate) struct TurnRequest {
    pub input: Input,
    pub sampling: TurnSampling,
    /// Number of answers to sample.
    pub choices: u32,
    /// Whether the answer is parsed for tool calls and reasoning.
    pub parse: Parse,
    /// Hash that identifies the request when it is repeated.
    pub digest: u128,
}

/// What an answer is parsed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parse {
    /// Reasoning, and tool calls if the request has tools; with `one_call`, only the first of several calls.
    Message { one_call: bool },
    /// Nothing: the answer is plain text.
    Text,
}
