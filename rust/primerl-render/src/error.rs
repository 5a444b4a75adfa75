//! What can go wrong between messages and tokens, by the boundary that failed.

use std::path::PathBuf;

/// A model folder that cannot be used. The message names the file and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    #[error("model folder {} does not exist; give the path of a local model folder", .0.display())]
    NoFolder(PathBuf),
    #[error("model folder {} has no tokenizer.json; save the tokenizer with `save_pretrained` of a fast tokenizer", .0.display())]
    NoTokenizer(PathBuf),
    #[error(
        "model folder {} has no chat template; add chat_template.jinja (or `chat_template` in tokenizer_config.json), or use an instruction-tuned model",
        .0.display()
    )]
    NoChatTemplate(PathBuf),
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{} is not valid JSON of the expected shape", path.display())]
    Json {
        path: PathBuf,
        source: serde_json::Error,
    },
    #[error("{}: {message}", path.display())]
    Tokenizer { path: PathBuf, message: String },
    #[error("the chat template of {} does not compile", path.display())]
    Template {
        path: PathBuf,
        source: Box<minijinja::Error>,
    },
    #[error("{}: the end-of-sequence token {token:?} is not in the tokenizer's vocabulary", path.display())]
    UnknownStopToken { path: PathBuf, token: String },
    #[error("there is no {kind} parser {name:?}; there are {known}")]
    UnknownParser {
        kind: &'static str,
        name: String,
        known: String,
    },
    #[error(
        "control_tokens is \"neutralize\", which {} does not allow: {reason}; set it to \"keep\"",
        path.display()
    )]
    NotNeutralized { path: PathBuf, reason: String },
    #[error("{name:?} describes no {kind} parser: it has no `{field}`")]
    NotDescribed {
        kind: &'static str,
        field: &'static str,
        name: String,
    },
}

/// Messages that cannot be rendered, or text that cannot be encoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RenderError {
    #[error("there is no message; a conversation has at least one")]
    NoMessages,
    /// The template itself refused the conversation (`raise_exception`), or failed on it.
    #[error("the chat template failed: {message}")]
    Template {
        message: String,
        source: Box<minijinja::Error>,
    },
    #[error(
        "messages[{message}].content holds a part of type {kind:?}; only parts of type \"text\" are supported"
    )]
    UnsupportedContent { message: usize, kind: String },
    #[error(
        "messages[{message}].role is {role:?}, and the model's chat template would leave such a message out; use user, \
         assistant, system (at the beginning) or tool, as the template knows them"
    )]
    RoleLeftOut { message: usize, role: String },
    #[error(
        "tools are given, but the model's chat template does not write them into the prompt: the model would not see \
         them; leave tools out, or use a model folder whose template renders tools"
    )]
    ToolsLeftOut,
    #[error(
        "messages[{message}].tool_calls are not written by the model's chat template: the model would be taught the answer \
         without them; leave the row out, or use a model folder whose template writes tool calls"
    )]
    ToolCallsLeftOut { message: usize },
    #[error(
        "messages[{message}].reasoning_content is not written by the model's chat template, not even of the last answer: \
         the model would be taught the answer without it; take it out, write it into the content as the model thinks, or \
         use a model folder whose template writes reasoning"
    )]
    ReasoningLeftOut { message: usize },
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
    #[error("messages[{message}]: {reason}")]
    Mask { message: usize, reason: MaskFailure },
    #[error("conversations[{conversation}]")]
    Conversation {
        conversation: usize,
        source: Box<RenderError>,
    },
    #[error(
        "the text of messages holds control tokens of the model ({found:?}) and control_tokens is \"neutralize\", but what \
         the chat template makes of this text depends on them, so that it cannot be distinguished from the template's own markup; \
         take them out of the text, or set control_tokens to \"keep\""
    )]
    ControlTokens { found: String },
    #[error("a message contains the reserved marker {0:?}; remove it from the data")]
    ReservedMarker(&'static str),
}

/// Why the tokens of an assistant message could not be told apart from the rest with certainty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MaskFailure {
    #[error(
        "the chat template rewrites this assistant message depending on what follows it, so its tokens cannot be located; use a template with {{% generation %}} blocks, or train on conversations that end with their only assistant message"
    )]
    Rewritten,
    #[error("the chat template writes nothing for this assistant message")]
    Dropped,
    #[error(
        "a token crosses the boundary of this assistant message (its text merges with the text next to it); remove the white space at its start or end"
    )]
    TokenAcrossBoundary,
}
