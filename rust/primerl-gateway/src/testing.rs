//! Takes a request from its bytes to the answer's bytes, without sockets, engines and a driver; for fuzzing.

use super::dialect::{DIALECTS, Dialect};
use super::events::all_at_once;
use super::measure::{Answered, Turns};
use bytes::Bytes;
use primerl_render::Renderer;
use primerl_service::http::ApiError;
use serde_json::{Value, json};
use std::sync::Arc;

const ANSWER: &str = "<think>\nso\n</think>\n\nWell: é.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";

/// One open rollout.
pub struct Desk {
    renderer: Arc<Renderer>,
    turns: Turns,
    /// The ids with which the engine answers everything.
    engine_answer: Vec<u8>,
}

impl Desk {
    /// # Panics
    /// The model's tokenizer cannot encode [`ANSWER`].
    pub fn new(renderer: Arc<Renderer>, evaluation: bool) -> Desk {
        let mut ids = renderer.tokenizer().encode(ANSWER).expect("can be encoded");
        ids.extend(renderer.stop_token_ids().first());
        let content: Vec<Value> = ids
            .iter()
            .map(|id| json!({"token_id": id, "logprob": -1.0}))
            .collect();
        let versions = [json!({"version": "0", "start": 0, "end": ids.len()})];
        let answer = json!({"choices": [{"finish_reason": "stop", "token_ids": ids, "weight_versions": versions,
            "logprobs": {"content": content}}]});
        Desk {
            turns: Turns::of(Arc::clone(&renderer), evaluation),
            renderer,
            engine_answer: answer.to_string().into_bytes(),
        }
    }

    /// Makes a request's prompt, answers it with [`ANSWER`], and records and writes the answer.
    fn ask(&self, dialect: &dyn Dialect, body: &[u8]) -> Result<(), ApiError> {
        let asked = self.turns.ask_in(dialect, &Bytes::copy_from_slice(body))?;
        let sent: Value =
            serde_json::from_slice(&asked.engine_body.concatenated()).expect("is JSON");
        let prompt = sent["token_ids"].as_array().expect("is a list").len();
        let Answered {
            answer,
            reply,
            reading,
        } = self.turns.answered(asked, &self.engine_answer)?;
        assert_eq!(answer.head.prompt_tokens, prompt);
        let turns = self.turns.recorded();
        let turn = turns.last().expect("was recorded");
        assert!(turn.is_consistent());
        let whole = reply.whole(&answer, self.renderer.tokenizer());
        serde_json::from_slice::<Value>(&whole).expect("an answer is JSON");
        let events = all_at_once(&answer, &reading, reply.events(), &self.renderer);
        assert!(events.ends_with(b"\n\n"), "the last event ends");
        Ok(())
    }
}

/// Handles one request of the dialect at this path, which is answered or refused as the client's mistake.
fn converse(desk: &Desk, path: &str, body: &[u8]) {
    let dialect = DIALECTS.iter().find(|dialect| dialect.path() == path);
    let dialect = *dialect.expect("the dialect is served");
    if let Err(refusal) = desk.ask(dialect, body) {
        assert!(refusal.status.is_client_error(), "{refusal:?}");
        assert!(dialect.refusal(&refusal).status().is_client_error());
    }
}

/// A request to `/chat/completions`.
pub fn chat(desk: &Desk, body: &[u8]) {
    converse(desk, "chat/completions", body);
}

/// A request to `/messages`.
pub fn messages(desk: &Desk, body: &[u8]) {
    converse(desk, "messages", body);
}

/// A request to `/responses`.
pub fn responses(desk: &Desk, body: &[u8]) {
    converse(desk, "responses", body);
}

/// A request to `/completions`.
pub fn completions(desk: &Desk, body: &[u8]) {
    converse(desk, "completions", body);
}
