//! Which conversations of a model extend and which fork, told before a run finds out.

use crate::error::RenderError;
use crate::message::{Content, Message};
use crate::renderer::{ExtensionContext, Renderer, call_id, scenario_answer, scenario_tool};
use crate::template::RenderOptions;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// A turn that follows an assistant message.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckedTurn {
    /// Name of the built-in scenario, or line of the file, counted from 1.
    pub conversation: String,
    /// Which message is the answer that is continued, counted from 0.
    pub answer: usize,
    /// Roles of the messages that follow it.
    pub new_messages: Vec<String>,
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// What becomes of a turn.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Verdict {
    /// The recorded tokens stay, `tokens` are appended after an answer that was cut.
    Extends {
        tokens: usize,
        /// Stop token that closes the answer: an answer that was sampled with it is not closed again, one that ended
        /// with another stop token forks.
        closes_with: String,
        /// A full render would write earlier messages differently (drop their reasoning, say); the extension keeps them
        /// as they were sampled.
        keeps_history: bool,
    },
    /// The conversation is rendered in full.
    Forks { reason: String, detail: String },
    /// The template does not take the conversation at all.
    Refused { detail: String },
}

/// Conversations that cannot be read; the message names the file, the line and the field.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{}, line {line}: {reason}", path.display())]
    Row {
        path: PathBuf,
        line: usize,
        reason: String,
    },
}

/// One line of the file.
struct Row {
    messages: Vec<Message>,
    options: RenderOptions,
}

impl Renderer {
    /// Built-in scenarios: a user message, a tool's result, two results, a result and a user message, each with and
    /// without a system message and reasoning.
    pub fn check_scenarios(&self) -> Vec<CheckedTurn> {
        let mut turns = Vec::new();
        for (kind, calls, then_user) in [
            ("user", 0, true),
            ("tool", 1, false),
            ("two tools", 2, false),
            ("tool, user", 1, true),
        ] {
            for (extra, system, reasoning) in [
                ("", false, false),
                (" after reasoning", false, true),
                (" with a system message", true, false),
            ] {
                let (messages, answer) = scenario(calls, then_user, system, reasoning);
                let options = RenderOptions {
                    tools: (calls > 0).then(|| vec![scenario_tool()]),
                    ..RenderOptions::default()
                };
                turns.push(CheckedTurn {
                    conversation: format!("{kind}{extra}"),
                    answer,
                    new_messages: roles(&messages[answer + 1..]),
                    verdict: self.check_turn(&messages, answer, &options),
                });
            }
        }
        turns
    }

    /// Every turn after an assistant message in the conversations of `path`: a JSON object a line, with `messages` and,
    /// where they are used, `tools`, `documents` and `chat_template_kwargs`. Other fields are ignored.
    pub fn check_file(&self, path: &Path) -> Result<Vec<CheckedTurn>, CheckError> {
        let text = std::fs::read_to_string(path).map_err(|source| CheckError::Read {
            path: path.to_path_buf(),
            source,
        })?;
        let mut turns = Vec::new();
        for (index, line) in text.lines().enumerate() {
            if line.trim().is_empty() {
                continue;
            }
            let row = Row::read(line).map_err(|reason| CheckError::Row {
                path: path.to_path_buf(),
                line: index + 1,
                reason,
            })?;
            turns.extend(self.check_conversation(&format!("line {}", index + 1), &row));
        }
        Ok(turns)
    }

    fn check_conversation(&self, name: &str, row: &Row) -> Vec<CheckedTurn> {
        let messages = &row.messages;
        let answers = (0..messages.len()).filter(|&index| messages[index].is_assistant());
        let turn = |answer: usize| {
            let following = messages[answer + 1..].iter();
            let new = following.take_while(|message| !message.is_assistant());
            let end = answer + 1 + new.count();
            // An answer that another one follows, or nothing, was not continued by a request.
            (end > answer + 1).then(|| CheckedTurn {
                conversation: name.to_owned(),
                answer,
                new_messages: roles(&messages[answer + 1..end]),
                verdict: self.check_turn(&messages[..end], answer, &row.options),
            })
        };
        answers.filter_map(turn).collect()
    }

    fn check_turn(&self, messages: &[Message], answer: usize, options: &RenderOptions) -> Verdict {
        let full = match self.render_text(messages, options) {
            Ok(text) => text,
            Err(error) => return Verdict::refused(&error),
        };
        let cut = ExtensionContext {
            answer: &messages[answer],
            sampled: &[],
            options,
        };
        match self.extend(&cut, &messages[answer + 1..]) {
            Ok(suffix) => {
                let prompt = self.render_text(&messages[..answer], options);
                Verdict::Extends {
                    tokens: suffix.len(),
                    closes_with: self.stop_token_text(suffix.first().copied()),
                    keeps_history: !prompt.is_ok_and(|prompt| full.starts_with(&prompt)),
                }
            }
            Err(reason) => Verdict::Forks {
                reason: reason.code().to_owned(),
                detail: reason.to_string(),
            },
        }
    }

    fn stop_token_text(&self, id: Option<u32>) -> String {
        let text = id.and_then(|id| self.tokenizer().decode(&[id], false).ok());
        text.unwrap_or_default()
    }
}

impl Verdict {
    fn refused(error: &RenderError) -> Self {
        Verdict::Refused {
            detail: error.to_string(),
        }
    }
}

impl Row {
    fn read(line: &str) -> Result<Self, String> {
        let mut fields: Map<String, Value> =
            serde_json::from_str(line).map_err(|error| format!("no JSON object: {error}"))?;
        let Some(Value::Array(rows)) = fields.remove("messages") else {
            return Err("messages: expected a list of messages".to_owned());
        };
        let messages = rows
            .into_iter()
            .enumerate()
            .map(|(index, row)| {
                serde_json::from_value(row).map_err(|error| format!("messages[{index}]: {error}"))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            messages,
            options: RenderOptions {
                tools: field(&mut fields, "tools")?,
                documents: field(&mut fields, "documents")?,
                template_kwargs: field(&mut fields, "chat_template_kwargs")?.unwrap_or_default(),
                ..RenderOptions::default()
            },
        })
    }
}

fn field<T: DeserializeOwned>(
    fields: &mut Map<String, Value>,
    name: &str,
) -> Result<Option<T>, String> {
    let value = fields.remove(name).unwrap_or_default();
    serde_json::from_value(value).map_err(|error| format!("{name}: {error}"))
}

fn roles(messages: &[Message]) -> Vec<String> {
    let role = |message: &Message| message.role.clone();
    messages.iter().map(role).collect()
}

/// A conversation, and which of its messages is the answer.
fn scenario(calls: usize, then_user: bool, system: bool, reasoning: bool) -> (Vec<Message>, usize) {
    let mut messages = Vec::new();
    if system {
        messages.push(Message::text("system", "Be brief."));
    }
    messages.push(Message::user("Why?"));
    let mut answer = scenario_answer("Because.", calls);
    if calls > 0 {
        answer.content = Content::Null;
    }
    answer.reasoning_content = reasoning.then(|| "Let me see.".to_owned());
    let at = messages.len();
    messages.push(answer);
    for index in 0..calls {
        let mut result = Message::text("tool", "{\"r\": 1}");
        result.tool_call_id = Some(call_id(index));
        result.name = Some(format!("f{index}"));
        messages.push(result);
    }
    if then_user {
        messages.push(Message::user("And then?"));
    }
    (messages, at)
}
