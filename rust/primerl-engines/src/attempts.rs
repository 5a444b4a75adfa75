//! Sends one request to one engine after the other, until it is answered or its deadline has passed.

use super::chat;
use super::error::EngineError;
use super::failover::{Begun, Follow};
use super::generate::{Generated, Progress};
use super::pool::Engines;
use super::request::ChatMessages;
use super::request::{GenerateError, SampleRequest, Sampled};
use super::routing::Resident;
use super::slot::Slot;
use super::stream::Assembly;
use primerl_core::{EngineId, Event};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Attempts that one request may lose to healthy engines that answer with errors.
const MAX_ATTEMPTS: u32 = 6;
const FIRST_BACKOFF: Duration = Duration::from_millis(100);

/// The attempts of one request that engines have failed.
pub(super) struct Tries {
    pub failed: Vec<EngineId>,
    /// What the last one failed with, for people.
    pub last: String,
}

impl Tries {
    pub(super) fn new() -> Tries {
        Tries {
            failed: Vec::new(),
            last: String::from("no engine has proved its weights"),
        }
    }

    fn note(&mut self, slot: &Slot, error: &EngineError) {
        self.last = format!("{}: {error}", slot.engine.client.url());
    }

    /// Gives the place back and waits, for longer each time. An error: this was the last attempt.
    async fn back_off(&mut self, slot: Slot) -> Result<(), GenerateError> {
        self.failed.push(slot.engine.id);
        drop(slot);
        let attempts = self.failed.len() as u32;
        if attempts >= MAX_ATTEMPTS {
            let last = std::mem::take(&mut self.last);
            return Err(GenerateError::Exhausted { attempts, last });
        }
        tokio::time::sleep(FIRST_BACKOFF * 2_u32.pow(attempts - 1)).await;
        Ok(())
    }

    /// An engine failed, which has nothing to show of its attempt.
    pub(super) async fn lost(
        &mut self,
        slot: Slot,
        error: EngineError,
    ) -> Result<(), GenerateError> {
        self.note(&slot, &error);
        slot.failed();
        self.back_off(slot).await
    }
}

impl Engines {
    /// Sample from one engine; if it fails, from another, until the deadline. With `progress`, the engine is asked for
    /// a stream, and another engine continues where it failed.
    pub async fn generate(
        &self,
        request: &SampleRequest<'_>,
        mut progress: Option<&mut dyn Progress>,
    ) -> Result<Sampled, GenerateError> {
        let mut tries = Tries::new();
        let mut begun = Begun::default();
        loop {
            let picked = self.pick(request.resident, request.deadline, &tries.failed);
            let Some(slot) = picked.await else {
                return Err(GenerateError::Deadline { last: tries.last });
            };
            let sampled = self.go_on(&slot, request, &mut begun, reborrow(&mut progress));
            let error = match sampled.await? {
                Ok(generated) => return Ok(answered(slot, generated)),
                Err(error) if !error.is_retryable() => return Err(GenerateError::Refused(error)),
                Err(error @ EngineError::Crossed { .. }) => {
                    // No engine failed: the request starts again on the new weights, as often as the deadline allows.
                    tracing::info!(request = request.request_id, %error, "sampled again");
                    self.crossed.fetch_add(1, Ordering::Relaxed);
                    tries.last = error.to_string();
                    continue;
                }
                Err(error) => error,
            };
            tracing::warn!(engine = %slot.engine.client.url(), request = request.request_id, %error, "engine request failed");
            tries.note(&slot, &error);
            let stops = |progress: &mut &mut dyn Progress| !progress.go_on(begun.tokens());
            if progress.as_mut().is_some_and(stops) {
                slot.failed();
                return Err(GenerateError::Interrupted { last: tries.last });
            }
            self.failovers.fetch_add(1, Ordering::Relaxed);
            suspect(&slot, &error);
            if slot.is_lost() {
                continue; // It is out of rotation, so it cannot be picked again before it proved itself.
            }
            tries.back_off(slot).await?;
        }
    }

    /// Samples the rest of an answer. If that fails, `begun` keeps the tokens that are certain.
    async fn go_on(
        &self,
        slot: &Slot,
        request: &SampleRequest<'_>,
        begun: &mut Begun,
        progress: Option<&mut dyn Progress>,
    ) -> Result<Result<Generated, EngineError>, GenerateError> {
        let before = begun.tokens().len();
        let rest = begun.rest(request);
        if let Some(rollout) = rest.first_of {
            let version = slot.version();
            self.driver
                .send(Event::SamplingStarted { rollout, version });
        }
        if let Some(messages) = rest.chat {
            // The answer is shown only as a whole, so there is never a part to continue from.
            let (config, timeout) = (&self.config, self.timeout(rest.deadline));
            let answer = chat::sample(slot, messages, &rest, config, timeout, progress);
            return Ok(slot.unless_lost(answer).await);
        }
        let bounds = rest.bounds(&self.config);
        let Some(progress) = progress else {
            return self.generate_on(slot, &rest, None).await;
        };
        let mut follow = Follow::new(progress, &slot.engine, slot.weights, before);
        let mut assembly = Assembly::new(rest.max_tokens).with_experts(bounds.experts_rows);
        let stream = Some((&mut follow, &mut assembly));
        let error = match self.generate_on(slot, &rest, stream).await? {
            Ok(generated) => return Ok(Ok(begun.with(generated))),
            Err(error) => error,
        };
        // A grammar would start from the beginning, and allow again what was already sampled.
        if error.leaves_a_part() && request.structured_outputs.is_none() {
            let part = follow.part(assembly.take(), slot.version(), &bounds);
            let stops = &self.config.stop_token_ids;
            if part.is_some_and(|part| begun.add(part, request.max_tokens, stops))
                && let Some(whole) = begun.take()
            {
                return Ok(Ok(whole));
            }
        }
        Ok(Err(error))
    }

    async fn generate_on(
        &self,
        slot: &Slot,
        request: &SampleRequest<'_>,
        stream: Option<(&mut Follow<'_>, &mut Assembly)>,
    ) -> Result<Result<Generated, EngineError>, GenerateError> {
        let body = request.body(&self.config, &slot.served.named, stream.is_some())?;
        let bounds = request.bounds(&self.config);
        let timeout = self.timeout(request.deadline);
        let (client, named) = (&slot.engine.client, &slot.served.named);
        let answer = async {
            match stream {
                None => client.generate(body, named, bounds, timeout).await,
                Some((follow, assembly)) => {
                    let id = request.request_id;
                    client
                        .generate_streamed(body, id, timeout, follow, assembly)
                        .await?;
                    self.until_vouched_for(&slot.engine, follow.held_for())
                        .await;
                    let ended_at = follow.show();
                    let choice = named.choice(assembly.finish(ended_at.is_some())?)?;
                    choice.check(&bounds, ended_at)
                }
            }
        };
        let answer = slot.unless_lost(answer).await;
        Ok(
            match answer.and_then(|generated| slot.check_versions(generated)) {
                Ok(generated) => self.unless_probe_fails(slot, generated).await,
                error => error,
            },
        )
    }

    /// Timeout of one engine's answer.
    pub(super) fn timeout(&self, deadline: Instant) -> Duration {
        let left = deadline.saturating_duration_since(Instant::now());
        left.min(self.config.request_timeout)
    }

    /// The token ids that engines render these messages to. Asks one engine and, if it fails, another, until the
    /// deadline.
    pub async fn tokenize(
        &self,
        messages: &ChatMessages,
        resident: Option<Resident>,
        deadline: Instant,
    ) -> Result<Vec<u32>, GenerateError> {
        let mut tries = Tries::new();
        loop {
            let Some(slot) = self.pick(resident, deadline, &tries.failed).await else {
                return Err(GenerateError::Deadline { last: tries.last });
            };
            let client = &slot.engine.client;
            let timeout = self.timeout(deadline);
            let answer = chat::tokenize(client, &self.config.model, messages, timeout);
            let error = match slot.unless_lost(answer).await {
                Ok(ids) => return Ok(ids),
                Err(error) if !error.is_retryable() => return Err(GenerateError::Refused(error)),
                Err(error) => error,
            };
            tracing::warn!(engine = %client.url(), %error, "an engine could not render");
            tries.lost(slot, error).await?;
        }
    }
}

fn answered(slot: Slot, generated: Generated) -> Sampled {
    slot.answered();
    Sampled {
        generated,
        resident: Resident {
            engine: slot.engine.id,
            version: slot.version(),
        },
    }
}

/// Has the engine's supervisor look at it: for other weights, or for its health.
fn suspect(slot: &Slot, error: &EngineError) {
    match error {
        EngineError::Unproved { .. } | EngineError::Misnamed { .. } => {
            slot.engine.rejoined.notify_one();
        }
        _ => slot.failed(),
    }
}

/// The progress for one call among several.
fn reborrow<'a>(progress: &'a mut Option<&mut dyn Progress>) -> Option<&'a mut dyn Progress> {
    match progress {
        Some(progress) => Some(&mut **progress),
        None => None,
    }
}
