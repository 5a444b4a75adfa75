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
        let (request, id) = (kept.request, Arc::clone(&kept.id));
        let (turn, prompt_tokens) = {
            let state = rollout.state.lock();
            let turn_of = state.turns.get(turn.0 as usize).cloned();
            let recorded = turn_of.ok_or_else(|| lost(request, "its turn"))?;
            let session = state.sessions.get(&recorded.session);
            let prompt = session.map(|session| session.conversation.prompt_of(turn).len());
            (recorded, prompt.unwrap_or_default())
        };
        let text = turn.text.as_deref();
        let head = Head {
            id: Arc::clone(&id),
            created: kept.created,
            model: rollout.model(gateway).into(),
            prompt_tokens: text.map_or(prompt_tokens, |text| text.prompt_tokens as usize),
            choices: 1,
            prompt: None,
        };
        let store = rollout.dialect_state::<Store>();
        let reply = self.reply(&store, kept)?;
        let choice = match text {
            Some(_) => Choice::of_text(&turn)?,
            None => read_again(gateway, &reply, &turn)?,
        };
        let answer = Answer {
            head,
            choices: vec![choice],
        };
        // A response is stored when it is written.
        reply.whole(&answer, gateway.renderer.tokenizer());
        let stored = store.last();
        self.stored.extend(stored.map(|stored| (id, stored)));
        Ok(())
    }

    fn reply(&self, store: &Arc<Store>, kept: KeptResponse) -> Result<ResponseReply, ApiError> {
        let request = kept.request;
        let find = |id: &str| self.stored.get(id);
        let like = kept.like.as_ref();
        let same = like.and_then(|like| find(&like.id));
        let count = like.map_or(0, |like| like.messages);
        let mut added: Vec<Arc<KeyedMessage>> = match same {
            Some(stored) if count <= stored.link.messages.len() => {
                stored.link.messages[..count].to_vec()
            }
            _ if count == 0 => Vec::new(),
            _ => return Err(lost(request, "the previous response")),
        };
        added.extend(kept.messages.into_iter().map(KeyedMessage::new));
        let previous = kept.previous_response_id.as_deref();
        let previous: Option<Arc<Link>> = match previous {
            None => None,
            Some(id) => {
                let stored = find(id.strip_prefix("resp_").unwrap_or(id));
                let stored =
                    stored.ok_or_else(|| lost(request, "the response that it continues"))?;
                Some(Arc::clone(&stored.link))
            }
        };
        let tools = match (kept.tools, same) {
            (Some(tools), _) => {
                let tools = Tools::read(tools.declared, tools.template_kwargs, tools.wanted)?;
                store.share_tools(tools)
            }
            (None, Some(same)) => Arc::clone(&same.form.tools),
            (None, None) => return Err(lost(request, "its tools")),
        };
        let instructions = match (kept.instructions, same) {
            (Some(instructions), _) => instructions.text,
            (None, Some(same)) => same.form.instructions.clone(),
            (None, None) => return Err(lost(request, "its instructions")),
        };
        let form = Form {
            stream: kept.stream,
            store: true,
            logprobs: kept.logprobs,
            top_logprobs: kept.top_logprobs,
            temperature: kept.temperature,
            top_p: kept.top_p,
            max_output_tokens: kept.max_output_tokens,
            instructions,
            metadata: kept.metadata,
            parallel_tool_calls: kept.parallel_tool_calls,
            previous_response_id: kept.previous_response_id,
            format: kept.format,
            tool_choice: kept.demanded.unwrap_or_else(|| match tools.as_came().2 {
                true => "auto".into(),
                false => "none".into(),
            }),
            tools,
        };
        let keep = Keep {
            store: Arc::clone(store),
            previous,
            added,
        };
        Ok(ResponseReply {
            form: Arc::new(form),
            keep: Arc::new(keep),
        })
    }
}

fn read_again(gateway: &Gateway, reply: &ResponseReply, turn: &Turn) -> Result<Choice, ApiError> {
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
