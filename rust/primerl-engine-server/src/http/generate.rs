//! `POST /inference/v1/generate`, plain and streamed.

use super::answer::{final_choice, partial_choice, prompt_logprobs};
use super::error::ApiError;
use super::structured::{self, Applied, Compiled};
use super::wire::*;
use super::{App, LoadGuard};
use crate::backend::ScoredToken;
use crate::handle::{Admission, Command, EngineHandle, Update};
use crate::request::{RequestKey, resolve};
use crate::sequence::{Completion, Submission};
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use std::convert::Infallible;
use std::sync::Arc;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Aborts what is in flight when its client hangs up: the handler, or the stream, is dropped.
struct AbortOnDrop {
    engine: EngineHandle,
    keys: Vec<RequestKey>,
}

impl AbortOnDrop {
    fn finished(&mut self) {
        self.keys.clear();
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        if !self.keys.is_empty() {
            // An engine that is gone has nothing in flight.
            let _ = self
                .engine
                .tell(Command::Forget(std::mem::take(&mut self.keys)));
        }
    }
}

/// A request in the engine.
pub(super) struct InFlight {
    pub app: Arc<App>,
    pub request_id: Arc<str>,
    request: GenerateRequest,
    pub applied: Option<Applied>,
    n: u32,
    updates: UnboundedReceiver<Update>,
    guard: AbortOnDrop,
    _load: LoadGuard,
}

pub async fn generate(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let request = GenerateRequest::parse(&headers, &body)?;
    let streamed = request.stream.unwrap_or(false);
    let in_flight = submit(app, request).await?;
    if streamed {
        Ok(streamed_answer(in_flight))
    } else {
        plain_answer(in_flight).await
    }
}

pub(super) async fn submit(app: Arc<App>, request: GenerateRequest) -> Result<InFlight, ApiError> {
    let n = check(&app, &request)?;
    let requested = request.sampling_params.requested();
    let (prompt, sampling) = resolve(&request.token_ids, &requested, &app.config, &app.model)?;
    let compiled = structured::compile(&app, &request, &sampling).await?;
    let keys: Vec<RequestKey> = (0..n).map(|_| app.engine.next_key()).collect();
    let request_id: Arc<str> = match &request.request_id {
        Some(id) => format!("generate-tokens-{id}").into(),
        None => format!("generate-tokens-{:x}-{:x}", app.started, keys[0].0).into(),
    };
    let (sender, updates) = unbounded_channel();
    let admission = |(&key, index): (&RequestKey, u32)| {
        let mut sampling = sampling.clone();
        let seed = match requested.seed {
            Some(_) => sampling.seed,
            None => {
                let id = request.request_id.as_deref();
                app.engine.default_seed(id, prompt.len(), key)
            }
        };
        sampling.seed = seed.wrapping_add(u64::from(index));
        Admission {
            submission: Submission {
                key,
                prompt: prompt.clone(),
                sampling,
                grammar: compiled.as_ref().map(Compiled::begin),
                priority: request.priority.unwrap_or(0),
                stream: request.stream.unwrap_or(false),
            },
            index,
            request_id: request_id.clone(),
            updates: sender.clone(),
        }
    };
    let admissions = keys.iter().zip(0..).map(admission).collect();
    app.engine.tell(Command::Submit(admissions))?;
    let guard = AbortOnDrop {
        engine: app.engine.clone(),
        keys,
    };
    Ok(InFlight {
        _load: app.enter(),
        app,
        request_id,
        request,
        applied: compiled.map(|compiled| compiled.applied),
        n,
        updates,
        guard,
    })
}

/// How many answers the request asks of this model.
fn check(app: &App, request: &GenerateRequest) -> Result<u32, ApiError> {
    let served = &app.config.served_model_name;
    if let Some(name) = request.model.as_deref().filter(|name| name != served) {
        return Err(ApiError::unknown_model(name, served));
    }
    let n = request.sampling_params.n.unwrap_or(1);
    if n == 0 || n > app.config.max_num_seqs {
        let message = format!(
            "n must be from 1 to max_num_seqs = {}, got {n}. (parameter=n, value={n})",
            app.config.max_num_seqs
        );
        return Err(ApiError::bad_request(message, Some("n")));
    }
    Ok(n)
}

impl InFlight {
    /// Waits for all of its sequences.
    pub async fn completions(&mut self) -> Result<Vec<Completion>, ApiError> {
        let mut done: Vec<Option<Completion>> = (0..self.n).map(|_| None).collect();
        while done.iter().any(Option::is_none) {
            match self.updates.recv().await {
                Some(Update::Done(index, completion)) => {
                    if let Some(error) = structured::failure(&completion) {
                        return Err(error);
                    }
                    done[index as usize] = Some(completion);
                }
                Some(Update::Token(..)) => {}
                Some(Update::Failed(reason)) => return Err(failed(&reason)),
                None => return Err(self.app.engine.gone().into()),
            }
        }
        self.guard.finished();
        Ok(done.into_iter().flatten().collect())
    }
}

async fn plain_answer(mut in_flight: InFlight) -> Result<Response, ApiError> {
    let done = in_flight.completions().await?;
    let request = &in_flight.request;
    let asked = request.sampling_params.logprobs;
    let response = GenerateResponse {
        request_id: &in_flight.request_id,
        model: &in_flight.app.config.served_model_name,
        created: in_flight.app.created(),
        usage: Usage::new(
            request.token_ids.len(),
            done.iter().map(|completion| completion.tokens.len()).sum(),
        ),
        prompt_logprobs: done[0].prompt.as_deref().map(prompt_logprobs),
        prompt_token_id_logprobs: None,
        prompt_token_ids: request
            .return_token_ids
            .unwrap_or(false)
            .then_some(&request.token_ids[..]),
        mm_placeholders: None,
        metrics: None,
        kv_transfer_params: None,
        ec_transfer_params: None,
        output_mode: "tokens",
        choices: done
            .iter()
            .zip(0..)
            .map(|(completion, index)| {
                final_choice(index, completion, 0, asked, in_flight.applied.as_ref())
            })
            .collect(),
    };
    Ok(json_response(&response))
}

fn failed(reason: &str) -> ApiError {
    ApiError::internal(format!("EngineCore encountered an issue: {reason}"))
}

pub(super) fn json_response(body: &impl serde::Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(bytes) => ([(header::CONTENT_TYPE, "application/json")], bytes).into_response(),
        Err(error) => {
            ApiError::internal(format!("cannot write the answer: {error}")).into_response()
        }
    }
}

/// What a stream still has to do.
struct Streaming {
    in_flight: InFlight,
    /// Tokens already sent, per choice.
    sent: Vec<usize>,
    open: u32,
    first: bool,
    state: StreamState,
}

enum StreamState {
    Tokens,
    Usage,
    DoneLine,
    Ended,
}

fn streamed_answer(in_flight: InFlight) -> Response {
    let streaming = Streaming {
        sent: vec![0; in_flight.n as usize],
        open: in_flight.n,
        first: true,
        state: StreamState::Tokens,
        in_flight,
    };
    let lines = stream::unfold(streaming, |mut streaming| async move {
        let line = streaming.next_lines().await?;
        Some((Ok::<Bytes, Infallible>(line), streaming))
    });
    (
        [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")],
        Body::from_stream(lines),
    )
        .into_response()
}

fn data_line(chunk: &impl serde::Serialize) -> Vec<u8> {
    let mut line = b"data: ".to_vec();
    // These types have string keys only, so writing them to memory cannot fail.
    let _ = serde_json::to_writer(&mut line, chunk);
    line.extend(b"\n\n");
    line
}

impl Streaming {
    /// The next bytes of the stream; `None` at its end.
    async fn next_lines(&mut self) -> Option<Bytes> {
        match self.state {
            StreamState::Tokens => {
                let update = self.in_flight.updates.recv().await;
                Some(self.tokens(update).into())
            }
            StreamState::Usage => {
                self.state = StreamState::DoneLine;
                let usage = Some(self.usage());
                Some(data_line(&self.chunk(vec![], usage)).into())
            }
            StreamState::DoneLine => {
                self.state = StreamState::Ended;
                Some(Bytes::from_static(b"data: [DONE]\n\n"))
            }
            StreamState::Ended => None,
        }
    }

    /// Takes all tokens of one choice that have come in: more than one when the reader is slow.
    fn tokens(&mut self, update: Option<Update>) -> Vec<u8> {
        let mut pending: Vec<Vec<ScoredToken>> = vec![Vec::new(); self.sent.len()];
        let mut lines = Vec::new();
        let mut next = Some(update);
        while let Some(update) = next {
            match self.take(update, &mut pending) {
                Ok(line) => lines.extend(line),
                Err(error) => return self.error_line(&error),
            }
            next = match self.open {
                0 => None,
                _ => self.in_flight.updates.try_recv().ok().map(Some),
            };
        }
        for (index, tokens) in pending.iter().enumerate() {
            if !tokens.is_empty() {
                lines.extend(self.partial_line(index, tokens));
            }
        }
        lines
    }

    /// Adds a token to the pending ones of its choice. The line of a choice that has ended has them, too.
    fn take(
        &mut self,
        update: Option<Update>,
        pending: &mut [Vec<ScoredToken>],
    ) -> Result<Vec<u8>, ApiError> {
        match update {
            Some(Update::Token(index, token)) => {
                pending[index as usize].push(token);
                Ok(Vec::new())
            }
            Some(Update::Done(index, completion)) => {
                if let Some(error) = structured::failure(&completion) {
                    return Err(error);
                }
                pending[index as usize].clear();
                Ok(self.final_line(index, &completion))
            }
            Some(Update::Failed(reason)) => Err(failed(&reason)),
            None => Err(self.in_flight.app.engine.gone().into()),
        }
    }

    fn partial_line(&mut self, index: usize, tokens: &[ScoredToken]) -> Vec<u8> {
        self.sent[index] += tokens.len();
        self.choice_line(partial_choice(index as u32, tokens, self.asked()))
    }

    fn final_line(&mut self, index: u32, completion: &Completion) -> Vec<u8> {
        let from = std::mem::replace(&mut self.sent[index as usize], completion.tokens.len());
        self.open -= 1;
        if self.open == 0 {
            self.in_flight.guard.finished();
            let wants_usage = self.options().include_usage.unwrap_or(false);
            self.state = if wants_usage {
                StreamState::Usage
            } else {
                StreamState::DoneLine
            };
        }
        let applied = self.in_flight.applied.clone();
        self.choice_line(final_choice(
            index,
            completion,
            from,
            self.asked(),
            applied.as_ref(),
        ))
    }

    fn choice_line(&mut self, choice: Choice<'_>) -> Vec<u8> {
        let usage = self
            .options()
            .continuous_usage_stats
            .unwrap_or(false)
            .then(|| self.usage());
        let line = data_line(&self.chunk(vec![choice], usage));
        self.first = false;
        line
    }

    fn error_line(&mut self, error: &ApiError) -> Vec<u8> {
        self.in_flight.guard.finished();
        self.state = StreamState::DoneLine;
        data_line(&error.to_json())
    }

    fn asked(&self) -> Option<i64> {
        self.in_flight.request.sampling_params.logprobs
    }

    fn options(&self) -> StreamOptions {
        self.in_flight.request.stream_options.unwrap_or_default()
    }

    fn usage(&self) -> Usage {
        Usage::new(
            self.in_flight.request.token_ids.len(),
            self.sent.iter().sum(),
        )
    }

    fn chunk<'a>(&'a self, choices: Vec<Choice<'a>>, usage: Option<Usage>) -> StreamChunk<'a> {
        let request = &self.in_flight.request;
        let wants_prompt = self.first && request.return_token_ids.unwrap_or(false);
        StreamChunk {
            request_id: &self.in_flight.request_id,
            usage,
            prompt_token_ids: wants_prompt.then_some(&request.token_ids[..]),
            output_mode: "tokens",
            choices,
        }
    }
}
