//! Runs what the gateway does for a turn, without sockets, engine and journal: for benchmarks.

use super::access::Access;
use super::answer::{Answer, Head, Reply};
use super::dialect::chat::Chat;
use super::dialect::{self, Dialect};
use super::prompt::{self, Prompt};
use super::request::TurnRequest;
use super::rollouts::Rollout;
use super::text::Reading;
use super::{Gateway, turn};
use crate::Sampling;
use bytes::Bytes;
use primerl_core::effect::LeasedRollout;
use primerl_core::{
    Duration, EnvironmentId, ExampleIndex, GroupId, PolicyVersion, RolloutId, WorkerId,
};
use primerl_engines::{
    EnginesConfig, GenerateAnswer, Generated, Named, RequestBody, SampleRequest,
};
use primerl_render::Renderer;
use primerl_service::http::ApiError;
use primerl_service::secret::Secret;
use std::sync::Arc;

const ROLLOUT: RolloutId = RolloutId(1);
const LONGEST_ANSWER: u32 = 1 << 20;

/// A gateway with one rollout.
pub struct Turns {
    gateway: Gateway,
    engines: EnginesConfig,
    rollout: Arc<Rollout>,
}

/// A request before it is sent to the engine.
pub struct Asked {
    request: TurnRequest,
    reply: Box<dyn Reply>,
    prompt: Prompt,
    /// The request's body for the engine.
    pub engine_body: RequestBody,
}

#[cfg(test)]
impl Asked {
    /// The ids that the engine gets.
    pub(super) fn prompt_ids(&self) -> Vec<u32> {
        self.prompt.history.prompt_with(&self.prompt.suffix)
    }
}

/// An answer, and how it is written.
pub(super) struct Answered {
    pub answer: Answer,
    pub reply: Box<dyn Reply>,
    /// Where streams are written; benchmarks write none.
    #[cfg(feature = "testing")]
    pub reading: Arc<Reading>,
}

fn engines_config(renderer: &Renderer) -> EnginesConfig {
    EnginesConfig {
        model: "m".into(),
        request_timeout: std::time::Duration::from_secs(60),
        update_timeout: std::time::Duration::from_secs(60),
        stop_token_ids: renderer.stop_token_ids().to_vec(),
        vocabulary_size: renderer.vocabulary_size(),
        seq_len: 512,
        max_tokens: 12,
        needs_processed: false,
        returns_experts: false,
        probe_tolerance: 0.5,
        written_ids: Arc::default(),
        engines_render: false,
    }
}

fn lease(evaluation: bool) -> LeasedRollout {
    LeasedRollout {
        rollout: ROLLOUT,
        group: GroupId(0),
        environment: EnvironmentId(0),
        example: ExampleIndex(0),
        evaluation,
        deadline: Duration::from_secs(3600),
    }
}

impl Turns {
    pub fn new(renderer: Arc<Renderer>) -> Turns {
        Turns::of(renderer, false)
    }

    /// A rollout of an evaluation, or of training.
    pub(super) fn of(renderer: Arc<Renderer>, evaluation: bool) -> Turns {
        let engines = engines_config(&renderer);
        let access = Access::new(&[0; 32], &Secret::new("measured"))
            .unwrap_or_else(|error| unreachable!("the secret has its length: {error}"));
        let gateway = Gateway::new(renderer, access, "m".into(), u32::MAX);
        let sampling = Sampling {
            temperature: 1.0,
            max_tokens: LONGEST_ANSWER,
            rollout_max_tokens: None,
            replayed: None,
            template_kwargs: None,
            observes: Vec::new(),
        };
        let rollouts = &gateway.rollouts;
        rollouts.open(&lease(evaluation), WorkerId(0), sampling);
        let rollout = rollouts
            .find("1")
            .unwrap_or_else(|error| unreachable!("the rollout was just opened: {}", error.message));
        Turns {
            gateway,
            engines,
            rollout,
        }
    }

    /// From the body of a chat request to the engine's request.
    pub fn ask(&self, body: &Bytes) -> Result<Asked, ApiError> {
        self.ask_in(&Chat, body)
    }

    pub(super) fn ask_in(&self, dialect: &dyn Dialect, body: &Bytes) -> Result<Asked, ApiError> {
        let hashed = dialect.hash(body, &self.rollout, &"".into())?;
        let digest = hashed.digest;
        let (request, reply) = dialect.read(&dialect::Asked {
            rollout: &self.rollout,
            session: &"".into(),
            body,
            known: hashed.known,
            digest,
        })?;
        let renderer = &self.gateway.renderer;
        let prompt = prompt::prepare(renderer, &self.rollout, &"".into(), &request.input)?;
        let sample = self.sample(&request, &prompt);
        let named = Named::weights(&self.engines.model, PolicyVersion(0));
        let engine_body = sample
            .body(&self.engines, &named, false)
            .map_err(|error| ApiError::internal(error.to_string()))?;
        Ok(Asked {
            request,
            reply,
            prompt,
            engine_body,
        })
    }

    fn sample<'a>(&self, request: &'a TurnRequest, prompt: &'a Prompt) -> SampleRequest<'a> {
        SampleRequest {
            temperature: request.sampling.temperature,
            truncation: request.sampling.truncation,
            max_tokens: LONGEST_ANSWER,
            ..SampleRequest::one_token("rollout-1-1", prompt.ids())
        }
    }

    /// From the engine's answer to the client's. Records the turn.
    pub fn answer(&self, asked: Asked, engine_answer: &[u8]) -> Result<Vec<u8>, ApiError> {
        let answered = self.answered(asked, engine_answer)?;
        let tokenizer = self.gateway.renderer.tokenizer();
        Ok(answered.reply.whole(&answered.answer, tokenizer))
    }

    pub(super) fn answered(
        &self,
        asked: Asked,
        engine_answer: &[u8],
    ) -> Result<Answered, ApiError> {
        let Asked {
            request,
            reply,
            prompt,
            engine_body,
        } = asked;
        let bounds = self.sample(&request, &prompt).bounds(&self.engines);
        let generated = GenerateAnswer::parse(engine_answer)
            .and_then(|answer| answer.check(&bounds))
            .map_err(|error| ApiError::internal(error.to_string()))?;
        let asked = Asked {
            request,
            reply,
            prompt,
            engine_body,
        };
        self.take_in(asked, generated)
    }

    /// These ids, all with the same log-probability, from version 0 of the weights.
    #[cfg(test)]
    pub(super) fn sampled(
        &self,
        asked: Asked,
        token_ids: Vec<u32>,
        finish: primerl_core::turn::FinishReason,
    ) -> Result<Answered, ApiError> {
        let run = primerl_core::turn::VersionRun {
            version: PolicyVersion(0),
            n_tokens: token_ids.len() as u32,
        };
        let generated = Generated {
            logprobs: vec![-1.0; token_ids.len()],
            versions: std::iter::once(run).collect(),
            token_ids,
            finish,
            top: Vec::new(),
            grammar: None,
            experts: None,
        };
        self.take_in(asked, generated)
    }

    fn take_in(&self, asked: Asked, generated: Generated) -> Result<Answered, ApiError> {
        let Asked {
            request,
            reply,
            prompt,
            ..
        } = asked;
        let renderer = &self.gateway.renderer;
        let reading = Reading::new(renderer, &request, prompt.options.clone(), &prompt.suffix);
        let taken_in = turn::take_in(
            &self.gateway,
            &request,
            &prompt,
            &reading,
            (1, 0),
            generated,
        );
        let (turn, choice) = taken_in?;
        self.rollout.state.lock().record(&turn);
        let head = Head {
            id: "1".into(),
            created: 0,
            model: "m".into(),
            prompt_tokens: prompt.ids().len(),
            choices: 1,
            prompt: None,
        };
        let answer = Answer {
            head,
            choices: vec![choice],
        };
        Ok(Answered {
            answer,
            reply,
            #[cfg(feature = "testing")]
            reading: Arc::new(reading),
        })
    }

    /// Number of turns recorded so far.
    pub fn recorded(&self) -> Vec<primerl_core::Turn> {
        self.rollout.state.lock().turns.clone()
    }
}
