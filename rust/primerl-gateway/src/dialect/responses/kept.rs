//! Restores stored responses after a restart: what the journal has to hold of a response in addition to its turn.
//!
//! The turn holds the response's output. The note holds the request's new messages and its form. It refers to the
//! response stored last for what they have in common, so a note is only as long as what is new in its request.

use super::response::Form;
use super::store::{Link, Store, Stored};
use super::tools::Tools;
use super::{Keep, ResponseReply};
use crate::Gateway;
use crate::answer::{Answer, Choice, Head, Reply};
use crate::notes::Note;
use crate::request::{KeyedMessage, Parse};
use crate::rollouts::Rollout;
use crate::text::Reading;
use primerl_core::{Turn, TurnIndex};
use primerl_render::Message;
use primerl_service::http::ApiError;
use serde::{Deserialize, Serialize};
use serde_json::value::to_raw_value;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::sync::Arc;

/// One stored response.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct KeptResponse {
    /// The request's number, which its turn has, too.
    request: u32,
    /// Id of the answer, without prefix.
    id: Arc<str>,
    created: u64,
    /// The response stored last, by its answer's id, and what is the same here.
    like: Option<Like>,
    /// The request's messages after those.
    messages: Vec<Message>,
    /// `None`: the same as in the response stored last.
    tools: Option<KeptTools>,
    /// `None`: the same as in the response stored last.
    instructions: Option<KeptInstructions>,
    stream: bool,
    logprobs: bool,
    top_logprobs: u32,
    temperature: f64,
    top_p: f64,
    max_output_tokens: Option<u32>,
    metadata: Map<String, Value>,
    parallel_tool_calls: bool,
    previous_response_id: Option<String>,
    format: Value,
    /// The call that was demanded. Absent if none was, and in notes of versions that did not support demanding one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    demanded: Option<Value>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Like {
    id: Arc<str>,
    /// This many first messages.
    messages: usize,
}

#[derive(Debug, Serialize, Deserialize)]
struct KeptInstructions {
    text: Option<Arc<str>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct KeptTools {
    declared: Vec<Value>,
    template_kwargs: Map<String, Value>,
    wanted: bool,
}

impl ResponseReply {
    /// The note of a response that is stored.
    pub(super) fn kept(&self, head: &Head, request: u32) -> KeptResponse {
        let (form, keep) = (&self.form, &self.keep);
        let last = keep.store.last();
        let same_messages = last.as_ref().map_or(0, |last| {
            let pairs = last.link.messages.iter().zip(&keep.added);
            pairs
                .take_while(|(before, now)| before.key.exact == now.key.exact)
                .count()
        });
        let same_tools = |last: &Arc<Stored>| Arc::ptr_eq(&last.form.tools, &form.tools);
        let same_instructions = |last: &Arc<Stored>| last.form.instructions == form.instructions;
        let new = keep.added[same_messages..].iter();
        KeptResponse {
            request,
            id: Arc::clone(&head.id),
            created: head.created,
            messages: new.map(|keyed| keyed.message.clone()).collect(),
            tools: (!last.as_ref().is_some_and(same_tools)).then(|| {
                let (declared, template_kwargs, wanted) = form.tools.as_came();
                KeptTools {
                    declared: declared.to_vec(),
                    template_kwargs: template_kwargs.clone(),
                    wanted,
                }
            }),
            instructions: (!last.as_ref().is_some_and(same_instructions)).then(|| {
                KeptInstructions {
                    text: form.instructions.clone(),
                }
            }),
            like: last.map(|last| Like {
                id: Arc::clone(&last.link.id),
                messages: same_messages,
            }),
            stream: form.stream,
            logprobs: form.logprobs,
            top_logprobs: form.top_logprobs,
            temperature: form.temperature,
            top_p: form.top_p,
            max_output_tokens: form.max_output_tokens,
            metadata: form.metadata.clone(),
            parallel_tool_calls: form.parallel_tool_calls,
            previous_response_id: form.previous_response_id.clone(),
            format: form.format.clone(),
            demanded: Some(&form.tool_choice)
                .filter(|choice| *choice != "auto" && *choice != "none")
                .cloned(),
        }
    }
}

/// Responses while they are restored, by their answers' ids; includes those that were deleted later.
#[derive(Default)]
pub(crate) struct Restoring {
    stored: HashMap<Arc<str>, Arc<Stored>>,
}

impl Restoring {
    /// Stores the response of this turn again.
    pub(crate) fn take_up(
        &mut self,
        gateway: &Gateway,
        rollout: &Rollout,
        turn: TurnIndex,
        kept: KeptResponse,
    ) -> Result<(), ApiError> {
        let id = Arc::clone(&kept.id);
        let (turn, prompt_tokens) = recorded(rollout, turn, kept.request)?;
        let head = kept.head(rollout.model(gateway), prompt_tokens);
        let store = rollout.dialect_state::<Store>();
        let reply = self.reply(&store, kept)?;
        let answer = Answer {
            head,
            choices: vec![choice_again(gateway, &reply, &turn)?],
        };
        // A response is stored when it is written.
        reply.whole(&answer, gateway.renderer.tokenizer());
        let stored = store.last();
        self.stored.extend(stored.map(|stored| (id, stored)));
        Ok(())
    }

    fn reply(&self, store: &Arc<Store>, mut kept: KeptResponse) -> Result<ResponseReply, ApiError> {
        let like = kept.like.as_ref();
        let same = like.and_then(|like| self.stored.get(&like.id));
        let same = same.map(Arc::as_ref);
        let keep = Keep {
            added: kept.take_messages(same)?,
            previous: self.previous(&kept)?,
            store: Arc::clone(store),
        };
        let tools = kept.take_tools(same, store)?;
        let instructions = kept.take_instructions(same)?;
        Ok(ResponseReply::new(kept.form(tools, instructions), keep))
    }

    /// The response that this one continues.
    fn previous(&self, kept: &KeptResponse) -> Result<Option<Arc<Link>>, ApiError> {
        let Some(id) = kept.previous_response_id.as_deref() else {
            return Ok(None);
        };
        let stored = self.stored.get(id.strip_prefix("resp_").unwrap_or(id));
        let stored = stored.ok_or_else(|| lost(kept.request, "the response that it continues"))?;
        Ok(Some(Arc::clone(&stored.link)))
    }
}

/// The turn, and the number of its prompt's tokens.
fn recorded(rollout: &Rollout, turn: TurnIndex, request: u32) -> Result<(Turn, usize), ApiError> {
    let state = rollout.state.lock();
    let recorded = state.turns.get(turn.0 as usize).cloned();
    let recorded = recorded.ok_or_else(|| lost(request, "its turn"))?;
    let prompt_tokens = match &recorded.text {
        Some(text) => text.prompt_tokens as usize,
        None => {
            let session = state.sessions.get(&recorded.session);
            session.map_or(0, |session| session.conversation.prompt_of(turn).len())
        }
    };
    Ok((recorded, prompt_tokens))
}

fn choice_again(gateway: &Gateway, reply: &ResponseReply, turn: &Turn) -> Result<Choice, ApiError> {
    if turn.text.is_some() {
        return Choice::of_text(turn);
    }
    let reading = Reading {
        parse: Parse::Message {
            one_call: !reply.form.parallel_tool_calls,
        },
        options: Some(Arc::clone(&reply.form.tools.options)),
        starts_in_reasoning: gateway.renderer.starts_in_reasoning(&turn.prompt_suffix),
        stop: Vec::new(),
        request_digest: turn.request_digest,
    };
    let read = reading.read(&gateway.renderer, &turn.sampled, 0);
    let read = read.map_err(|error| ApiError::internal(error.to_string()))?;
    Ok(Choice::new(turn, read, Vec::new()))
}

impl KeptResponse {
    pub(crate) fn request(&self) -> u32 {
        self.request
    }

    fn head(&self, model: &str, prompt_tokens: usize) -> Head {
        Head {
            id: Arc::clone(&self.id),
            created: self.created,
            model: model.into(),
            prompt_tokens,
            choices: 1,
            prompt: None,
        }
    }

    /// The request's messages, of which the first may be those of the response stored last, `same`.
    fn take_messages(&mut self, same: Option<&Stored>) -> Result<Vec<Arc<KeyedMessage>>, ApiError> {
        let count = self.like.as_ref().map_or(0, |like| like.messages);
        let shared = same
            .map_or(&[][..], |same| &same.link.messages)
            .get(..count);
        let shared = shared.ok_or_else(|| lost(self.request, "the previous response"))?;
        let new = std::mem::take(&mut self.messages);
        let new = new.into_iter().map(KeyedMessage::new);
        Ok(shared.iter().cloned().chain(new).collect())
    }

    fn take_tools(&mut self, same: Option<&Stored>, store: &Store) -> Result<Arc<Tools>, ApiError> {
        match (self.tools.take(), same) {
            (Some(tools), _) => {
                let tools = Tools::read(tools.declared, tools.template_kwargs, tools.wanted)?;
                Ok(store.share_tools(tools))
            }
            (None, Some(same)) => Ok(Arc::clone(&same.form.tools)),
            (None, None) => Err(lost(self.request, "its tools")),
        }
    }

    fn take_instructions(&mut self, same: Option<&Stored>) -> Result<Option<Arc<str>>, ApiError> {
        match (self.instructions.take(), same) {
            (Some(instructions), _) => Ok(instructions.text),
            (None, Some(same)) => Ok(same.form.instructions.clone()),
            (None, None) => Err(lost(self.request, "its instructions")),
        }
    }

    fn form(self, tools: Arc<Tools>, instructions: Option<Arc<str>>) -> Form {
        let undemanded = match tools.as_came().2 {
            true => "auto",
            false => "none",
        };
        Form {
            stream: self.stream,
            store: true,
            logprobs: self.logprobs,
            top_logprobs: self.top_logprobs,
            temperature: self.temperature,
            top_p: self.top_p,
            max_output_tokens: self.max_output_tokens,
            instructions,
            metadata: self.metadata,
            parallel_tool_calls: self.parallel_tool_calls,
            previous_response_id: self.previous_response_id,
            format: self.format,
            tool_choice: self.demanded.unwrap_or_else(|| undemanded.into()),
            tools,
        }
    }

    /// The note in the journal's format.
    pub(super) fn note(&self) -> Arc<str> {
        let kept = to_raw_value(&self);
        kept.map(|kept| Note::Response(kept).text())
            .unwrap_or_default()
    }
}

fn lost(request: u32, what: &str) -> ApiError {
    ApiError::internal(format!(
        "the response to request {request} cannot be restored: {what} is not in the journal"
    ))
}
