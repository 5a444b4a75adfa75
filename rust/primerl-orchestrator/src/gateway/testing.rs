//! The way of a request from its bytes to the answer's, without sockets, engines and a driver; for fuzzing.

use super::answer::{Answer, Choice, Head, Reply, Tokens};
use super::dialect::Dialect;
use super::prompt;
use super::request::{TurnRequest, answer_key};
use super::rollouts::{Rollout, Rollouts};
use super::text::{Delta, cut_message};
use crate::config::Sampling;
use crate::http::ApiError;
use bytes::Bytes;
use primerl_core::effect::LeasedRollout;
use primerl_core::turn::{FinishReason, VersionRun};
use primerl_core::{
    Duration, EnvironmentId, ExampleIndex, GroupId, PolicyVersion, RolloutId, Turn, WorkerId,
};
use primerl_render::Renderer;
use std::sync::Arc;

const ANSWER: &str = "<think>\nso\n</think>\n\nWell: é.";

/// One open rollout.
pub struct Desk {
    renderer: Arc<Renderer>,
    rollout: Arc<Rollout>,
}

impl Desk {
    /// # Panics
    /// Never: it was just opened.
    pub fn new(renderer: Arc<Renderer>, evaluation: bool) -> Desk {
        let rollouts = Rollouts::default();
        let lease = LeasedRollout {
            rollout: RolloutId(0),
            group: GroupId(0),
            environment: EnvironmentId(0),
            example: ExampleIndex(0),
            evaluation,
            deadline: Duration::from_secs(60),
        };
        let sampling = Sampling {
            temperature: 1.0,
            max_tokens: 64,
        };
        rollouts.open(&lease, WorkerId(0), sampling);
        let rollout = rollouts.get(lease.rollout);
        Desk {
            renderer,
            rollout: rollout.expect("the rollout was opened"),
        }
    }

    /// A request's prompt is made, it is answered by [`ANSWER`], and the answer is recorded and written.
    fn ask(&self, dialect: Dialect, body: &[u8]) -> Result<(), ApiError> {
        let body = Bytes::copy_from_slice(body);
        let (request, reply) = dialect.read(&body, &self.rollout, 0)?;
        let prompt = prompt::prepare(&self.renderer, &self.rollout, &"".into(), &request)?;
        assert!(prompt.suffix <= prompt.ids.len());
        assert!(prompt.parent.is_some() != prompt.fork.is_some());
        let choice = self.answer(&request)?;
        let turn = Turn {
            session: prompt.session,
            parent: prompt.parent,
            fork: prompt.fork,
            prompt_suffix: prompt.ids[prompt.ids.len() - prompt.suffix..].into(),
            sampled: Arc::clone(&choice.sampled),
            logprobs: Arc::clone(&choice.logprobs),
            versions: [VersionRun {
                version: PolicyVersion(0),
                n_tokens: choice.sampled.len() as u32,
            }]
            .into(),
            temperature: 1.0,
            finish: choice.finish,
            start_digest: prompt.start_digest,
            context_digest: prompt.context_digest,
            answer: answer_key(&choice.message),
            request_digest: 0,
        };
        assert!(turn.is_consistent());
        self.rollout.state.lock().record(&turn);
        self.write(reply.as_ref(), choice);
        Ok(())
    }

    fn answer(&self, request: &TurnRequest) -> Result<Choice, ApiError> {
        let undecodable =
            |error: primerl_render::RenderError| ApiError::internal(error.to_string());
        let mut sampled = self
            .renderer
            .tokenizer()
            .encode(ANSWER)
            .map_err(undecodable)?;
        sampled.extend(self.renderer.stop_token_ids().first());
        let mut message = self.renderer.parse(&sampled).map_err(undecodable)?;
        let stop = cut_message(&mut message, &request.sampling.stop);
        Ok(Choice {
            message,
            finish: FinishReason::Stop,
            stop,
            logprobs: vec![-1.0; sampled.len()].into(),
            sampled: sampled.into(),
            top: Vec::new(),
        })
    }

    fn write(&self, reply: &dyn Reply, choice: Choice) {
        let tokenizer = self.renderer.tokenizer();
        let head = Head {
            id: "id".into(),
            created: 0,
            model: "m".into(),
            prompt_tokens: 1,
            choices: 1,
            prompt: None,
        };
        let answer = Answer {
            head,
            choices: vec![choice],
        };
        let whole: Result<serde_json::Value, _> =
            serde_json::from_slice(&reply.whole(&answer, tokenizer));
        whole.expect("an answer is JSON");
        let (mut events, mut out) = (reply.events(), Vec::new());
        events.begin(&answer.head, &mut out);
        let tokens: Tokens<'_> = answer.choices[0].tokens();
        let deltas = [Delta::Content(ANSWER.into())];
        events.progress(0, &deltas, tokens, tokenizer, &mut out);
        events.end(&answer, &mut out);
        assert!(out.ends_with(b"\n\n"), "the last event ends");
    }
}

/// One request of the dialect: it is answered, or refused as the client's mistake.
fn converse(desk: &Desk, dialect: Dialect, body: &[u8]) {
    if let Err(refusal) = desk.ask(dialect, body) {
        assert!(refusal.status.is_client_error(), "{refusal:?}");
        assert!(dialect.refusal(&refusal).status().is_client_error());
    }
}

/// A request to `/chat/completions`.
pub fn chat(desk: &Desk, body: &[u8]) {
    converse(desk, Dialect::Chat, body);
}
