//! Stores the responses of one rollout, for requests that continue from them or fetch them again.

use super::items::{OutputItem, input_items, items_of};
use super::response::{Form, Response};
use super::tools::Tools;
use crate::limits;
use crate::request::KeyedMessage;
use parking_lot::Mutex;
use primerl_service::http::ApiError;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Debug, Default)]
pub(crate) struct Store {
    /// Locked for look-ups and inserts, never across an await.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    responses: HashMap<String, Arc<Stored>>,
    last: Option<Arc<Stored>>,
    /// Bytes of the notes in the journal.
    noted_bytes: usize,
    /// The last request's tools and instructions; stored responses share them.
    tools: Option<Arc<Tools>>,
    instructions: Option<Arc<str>>,
}

/// A response to which a request may refer.
#[derive(Debug)]
pub(crate) struct Stored {
    pub response: Response,
    pub form: Arc<Form>,
    pub link: Arc<Link>,
}

/// What one request added to a conversation. Requests that continue from it share it.
#[derive(Debug)]
pub(crate) struct Link {
    /// Id of the answer, without prefix.
    pub id: Arc<str>,
    pub previous: Option<Arc<Link>>,
    pub messages: Vec<Arc<KeyedMessage>>,
    pub answer: Arc<KeyedMessage>,
}

impl Drop for Link {
    /// Not recursive: dropping a long conversation link within link would overflow the stack.
    fn drop(&mut self) {
        let mut previous = self.previous.take();
        while let Some(mut link) = previous.and_then(Arc::into_inner) {
            previous = link.previous.take();
        }
    }
}

impl Link {
    /// All messages from the first request through this answer.
    pub(crate) fn history(&self) -> Vec<Arc<KeyedMessage>> {
        let mut newest_first = Vec::new();
        let mut at = Some(self);
        while let Some(link) = at {
            newest_first.push(Arc::clone(&link.answer));
            newest_first.extend(link.messages.iter().rev().cloned());
            at = link.previous.as_deref();
        }
        newest_first.reverse();
        newest_first
    }

    /// The items from which the response was made, the last first.
    pub(crate) fn input_newest_first(&self) -> Vec<Value> {
        let mut items = Vec::new();
        let mut at = Some(self);
        while let Some(link) = at {
            if !std::ptr::eq(link, self) {
                let answer = items_of(&link.answer.message, &link.id, None);
                items.extend(answer.iter().rev().map(OutputItem::json));
            }
            for (index, message) in link.messages.iter().enumerate().rev() {
                let origin = format!("{}-{index}", link.id);
                items.extend(input_items(&message.message, &origin).into_iter().rev());
            }
            at = link.previous.as_deref();
        }
        items
    }
}

impl Store {
    pub(crate) fn keep(&self, stored: Stored) {
        let (id, stored) = (stored.response.id(), Arc::new(stored));
        let mut state = self.state.lock();
        state.last = Some(Arc::clone(&stored));
        state.responses.insert(id, stored);
    }

    /// The response that was stored last, even if it was deleted.
    pub(crate) fn last(&self) -> Option<Arc<Stored>> {
        self.state.lock().last.clone()
    }

    /// Whether there is room for another response.
    pub(crate) fn check_room(&self) -> Result<(), ApiError> {
        let state = self.state.lock();
        limits::check_responses(state.responses.len(), state.noted_bytes)
    }

    pub(crate) fn noted(&self, bytes: usize) {
        self.state.lock().noted_bytes += bytes;
    }

    pub(crate) fn find(&self, id: &str) -> Result<Arc<Stored>, ApiError> {
        let found = self.state.lock().responses.get(id).cloned();
        found.ok_or_else(|| unknown(id))
    }

    pub(crate) fn delete(&self, id: &str) -> Result<(), ApiError> {
        let removed = self.state.lock().responses.remove(id);
        removed.map(drop).ok_or_else(|| unknown(id))
    }

    /// The response from which a request continues.
    pub(crate) fn previous(&self, id: &str) -> Result<Arc<Link>, ApiError> {
        match self.state.lock().responses.get(id) {
            Some(stored) => Ok(Arc::clone(&stored.link)),
            None => {
                let message = format!(
                    "Previous response with id '{id}' not found: it is not of this rollout, was not stored, or was \
                     deleted; send the conversation's items in input instead"
                );
                Err(ApiError::invalid(message)
                    .param("previous_response_id")
                    .code("previous_response_not_found"))
            }
        }
    }

    /// The last request's: usually the next request has the same.
    pub(crate) fn last_tools(&self) -> Option<Arc<Tools>> {
        self.state.lock().tools.clone()
    }

    pub(crate) fn share_tools(&self, tools: Tools) -> Arc<Tools> {
        let tools = Arc::new(tools);
        self.state.lock().tools = Some(Arc::clone(&tools));
        tools
    }

    pub(crate) fn shared_instructions(&self, instructions: String) -> Arc<str> {
        let last = &mut self.state.lock().instructions;
        match last {
            Some(last) if **last == *instructions => Arc::clone(last),
            _ => Arc::clone(last.insert(instructions.into())),
        }
    }
}

fn unknown(id: &str) -> ApiError {
    ApiError::not_found(
        "response_not_found",
        format!("Response with id '{id}' not found."),
    )
}
