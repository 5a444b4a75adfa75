//! A request in no dialect's words: messages, options of the template, how to sample.

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
    /// OpenAI's chat message as it came. Most of a history was seen before, so it is read only where it is new.
    Raw {
        text: Bytes,
        /// [`message_hash`] of it.
        digest: u128,
    },
    /// Made from another dialect's items.
    Read(Box<Message>),
    /// The same, kept from request to request.
    Keyed(Arc<KeyedMessage>),
}

/// A message and its key, which takes longer to make than to look at.
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

    /// Hash of the bytes, by which a message that came before is known; `None` where there are none.
    pub(crate) fn raw_digest(&self) -> Option<u128> {
        match self {
            Incoming::Raw { digest, .. } => Some(*digest),
            Incoming::Read(_) | Incoming::Keyed(_) => None,
        }
    }

    /// The message's key, where it need not be made.
    pub(crate) fn key(&self) -> Option<MessageKey> {
        match self {
            Incoming::Keyed(keyed) => Some(keyed.key),
            Incoming::Raw { .. } | Incoming::Read(_) => None,
        }
    }

    /// The message; `index` is its place in the request.
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

/// How the conversation recognises a message.
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

/// What the template is given besides the messages. The same for all turns of a conversation, as a rule.
#[derive(Debug)]
pub(crate) struct Options {
    pub render: RenderOptions,
    /// Digest of an empty message list under these options.
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

/// Options as they came.
#[derive(Clone, Debug)]
pub(crate) enum IncomingOptions {
    /// JSON texts, read only where they are new.
    Raw {
        tools: Option<Bytes>,
        template_kwargs: Option<Bytes>,
        documents: Option<Bytes>,
    },
    Read(Arc<Options>),
}

impl IncomingOptions {
    /// Hash of the bytes, by which options that came before are known; `None` where there are none.
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

    /// Bytes of text.
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

/// A template would write out whatever else is there.
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

/// What the model is to go on from.
#[derive(Debug)]
pub(crate) enum Input {
    Messages {
        messages: Vec<Incoming>,
        options: IncomingOptions,
        /// Where the messages are known by their bytes.
        recurring: Option<Recurring>,
    },
    /// A text without a template; the engine gets its tokens.
    Text(String),
    Ids(Vec<u32>),
}

/// How a request's messages are known when the next one begins with them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recurring {
    /// Hash through the last message.
    pub through: u128,
    /// The same of an earlier request, with whose messages this one begins.
    pub from: Option<u128>,
}

/// A request that may be answered.
#[derive(Debug)]
pub(crate) struct TurnRequest {
    pub input: Input,
    pub sampling: TurnSampling,
    /// Answers to sample.
    pub choices: u32,
    /// Whether tool calls and reasoning are looked for in the answer.
    pub parse: Parse,
    /// Hash by which the request is known when it comes again.
    pub digest: u128,
}

/// What is looked for in an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parse {
    /// Reasoning, and tool calls where the request has tools; of several calls only the first, with `one_call`.
    Message { one_call: bool },
    /// Nothing: it is text.
    Text,
}
