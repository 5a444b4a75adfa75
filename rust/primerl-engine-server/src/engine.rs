//! The engine thread: the one owner of scheduler and backend.
//!
//! The thread sleeps in `recv` while there is nothing to compute. Between two steps it takes all commands that have
//! come in, so a pause, an abort or a weight update never meets a half-done step.

use crate::backend::{Backend, BackendError, ScoredToken, StepOutput};
use crate::batch::Batch;
use crate::config::Config;
use crate::handle::{
    Admission, Answer, Command, CommandError, EngineHandle, PauseMode, Shared, Update,
};
use crate::metrics::Metrics;
use crate::request::RequestKey;
use crate::scheduler::{Event, Limits, Scheduler};
use crate::sequence::Completion;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;
use tokio::sync::mpsc;

mod updates;

struct Client {
    index: u32,
    request_id: Arc<str>,
    updates: mpsc::UnboundedSender<Update>,
    arrived: Instant,
    started: bool,
}

pub struct Engine<B> {
    config: Config,
    backend: B,
    scheduler: Scheduler,
    commands: Receiver<Command>,
    clients: HashMap<RequestKey, Client>,
    /// Sequences of each request id in flight; an id may be used twice.
    request_ids: HashMap<Arc<str>, Vec<RequestKey>>,
    /// Callers of `/pause?mode=wait`.
    draining: Vec<Answer<()>>,
    metrics: Arc<Metrics>,
    shared: Arc<Shared>,
}

impl<B: Backend> Engine<B> {
    pub fn new(config: Config, backend: B, metrics: Arc<Metrics>) -> (Self, EngineHandle) {
        let (handle, commands, shared) = EngineHandle::new(config.seed);
        let scheduler = Scheduler::new(Limits {
            max_num_seqs: config.max_num_seqs,
            kv_cache_tokens: config.kv_cache_tokens,
            max_num_batched_tokens: config.max_num_batched_tokens,
        });
        let engine = Engine {
            config,
            backend,
            scheduler,
            commands,
            clients: HashMap::new(),
            request_ids: HashMap::new(),
            draining: Vec::new(),
            metrics,
            shared,
        };
        (engine, handle)
    }

    /// Runs until [`Command::Shutdown`], or until every handle is gone.
    ///
    /// # Errors
    /// What the backend failed with. Every request in flight has been told.
    pub fn run(mut self) -> Result<(), BackendError> {
        let result = self.work();
        if let Err(error) = &result {
            self.shared.fail(&error.to_string());
            let reason: Arc<str> = error.to_string().into();
            for client in self.clients.values() {
                // A client that hung up needs no answer, here and below.
                let _ = client.updates.send(Update::Failed(reason.clone()));
            }
        }
        result
    }

    fn work(&mut self) -> Result<(), BackendError> {
        loop {
            while let Ok(command) = self.commands.try_recv() {
                if !self.carry_out(command)? {
                    return Ok(());
                }
            }
            let planned = self.scheduler.plan();
            let idle = planned.is_none();
            if let Some(batch) = planned {
                self.step(batch)?;
            }
            self.end_drain();
            self.metrics.observe(&self.scheduler, &self.config);
            if idle {
                let Ok(command) = self.commands.recv() else {
                    return Ok(());
                };
                if !self.carry_out(command)? {
                    return Ok(());
                }
            }
        }
    }

    fn step(&mut self, batch: Batch) -> Result<(), BackendError> {
        let began = Instant::now();
        for part in &batch.sequences {
            if let Some(client) = self.clients.get_mut(&part.key)
                && !std::mem::replace(&mut client.started, true)
            {
                let waited = client.arrived.elapsed().as_secs_f64();
                self.metrics.queue_time.observe(waited);
            }
        }
        self.shared.step_begins();
        let output = self.backend.forward(&batch)?;
        self.shared.step_ended();
        check_output(&batch, &output, self.backend.info().vocab_size)?;
        let seconds = began.elapsed().as_secs_f64();
        self.metrics.busy_seconds.inc_by(seconds);
        self.metrics.step_time.observe(seconds);
        let sampled = output.sampled.len() as u64;
        self.metrics.generation_tokens.inc_by(sampled);
        for event in self.scheduler.apply(batch, output) {
            self.report(event);
        }
        Ok(())
    }

    fn report(&mut self, event: Event) {
        match event {
            Event::FirstToken { key } => {
                if let Some(client) = self.clients.get(&key) {
                    self.metrics
                        .time_to_first_token
                        .observe(client.arrived.elapsed().as_secs_f64());
                }
            }
            Event::Token { key, token } => {
                if let Some(client) = self.clients.get(&key) {
                    let _ = client.updates.send(Update::Token(client.index, token));
                }
            }
            Event::Finished(completion) => {
                self.metrics.finished(completion.finish);
                self.deliver(completion);
            }
        }
    }

    fn deliver(&mut self, completion: Completion) {
        let Some(client) = self.clients.remove(&completion.key) else {
            return;
        };
        if let Some(keys) = self.request_ids.get_mut(&client.request_id) {
            keys.retain(|&key| key != completion.key);
            if keys.is_empty() {
                self.request_ids.remove(&client.request_id);
            }
        }
        self.metrics
            .request_latency
            .observe(client.arrived.elapsed().as_secs_f64());
        let _ = client.updates.send(Update::Done(client.index, completion));
    }

    /// Returns false when the engine is to stop.
    fn carry_out(&mut self, command: Command) -> Result<bool, BackendError> {
        match command {
            Command::Submit(admissions) => admissions
                .into_iter()
                .for_each(|admission| self.submit(admission)),
            Command::Abort {
                request_ids,
                answer,
            } => {
                let _ = answer.send(Ok(self.abort(request_ids)));
            }
            Command::Forget(keys) => self.abort_keys(keys),
            Command::Pause {
                mode,
                clear_cache,
                answer,
            } => self.pause(mode, clear_cache, answer),
            Command::Resume { answer } => self.resume(answer),
            Command::IsPaused { answer } => {
                let _ = answer.send(Ok(self.scheduler.is_paused()));
            }
            Command::ResetCache {
                running_too,
                answer,
            } => {
                if running_too {
                    self.scheduler.clear_cache();
                }
                let _ = answer.send(Ok(self.scheduler.kv_tokens_held() == 0));
            }
            Command::Shutdown => {
                self.scheduler
                    .abort_all()
                    .into_iter()
                    .for_each(|completion| self.deliver(completion));
                return Ok(false);
            }
            command => self.carry_out_update(command)?,
        }
        Ok(true)
    }

    fn submit(&mut self, admission: Admission) {
        let Admission {
            submission,
            index,
            request_id,
            updates,
        } = admission;
        let key = submission.key;
        if index == 0 {
            let tokens = submission.prompt.len() as u64;
            self.metrics.prompt_tokens.inc_by(tokens);
        }
        let keys = self.request_ids.entry(request_id.clone());
        keys.or_default().push(key);
        let client = Client {
            index,
            request_id,
            updates,
            arrived: Instant::now(),
            started: false,
        };
        self.clients.insert(key, client);
        self.scheduler.submit(submission);
    }

    fn abort(&mut self, request_ids: Option<Vec<String>>) -> usize {
        let before = self.clients.len();
        let keys = match request_ids {
            None => self.clients.keys().copied().collect(),
            Some(ids) => ids
                .iter()
                .filter_map(|id| self.request_ids.get(id.as_str()))
                .flatten()
                .copied()
                .collect(),
        };
        self.abort_keys(keys);
        before - self.clients.len()
    }

    fn abort_keys(&mut self, keys: Vec<RequestKey>) {
        for key in keys {
            if let Some(completion) = self.scheduler.abort(key) {
                self.deliver(completion);
            }
        }
    }

    fn pause(&mut self, mode: PauseMode, clear_cache: bool, answer: Answer<()>) {
        match mode {
            PauseMode::Wait => {
                self.scheduler.drain();
                self.draining.push(answer);
                self.end_drain();
                return;
            }
            PauseMode::Abort => {
                self.scheduler.pause();
                for completion in self.scheduler.abort_all() {
                    self.report(Event::Finished(completion));
                }
            }
            PauseMode::Keep => {
                self.scheduler.pause();
                if clear_cache {
                    self.scheduler.clear_cache();
                }
            }
        }
        let _ = answer.send(Ok(()));
        self.end_drain();
    }

    fn resume(&mut self, answer: Answer<()>) {
        self.scheduler.resume();
        for waiting in self.draining.drain(..) {
            let early = "resumed before all requests had finished";
            let _ = waiting.send(Err(CommandError(early.into())));
        }
        let _ = answer.send(Ok(()));
    }

    fn end_drain(&mut self) {
        if !self.draining.is_empty() && self.scheduler.is_drained() {
            self.scheduler.pause();
            for waiting in self.draining.drain(..) {
                let _ = waiting.send(Ok(()));
            }
        }
    }
}

/// A backend that answers for other tokens than it was asked for must not continue: its answers would be trained on.
fn check_output(batch: &Batch, output: &StepOutput, vocab_size: u32) -> Result<(), BackendError> {
    check_counts(batch, output).map_err(BackendError::Failed)?;
    if let Some(experts) = &output.experts
        && !experts.are_of(batch.token_ids.len())
    {
        return Err(BackendError::Failed(format!(
            "the backend reported experts that are not those of {} tokens",
            batch.token_ids.len()
        )));
    }
    let is_broken =
        |token: &&ScoredToken| token.token_id >= vocab_size || !token.logprob.is_finite();
    match output.sampled.iter().find(is_broken) {
        None => Ok(()),
        Some(token) => Err(BackendError::Failed(format!(
            "the backend sampled token {} with log-probability {}: the weights or the KV cache are broken",
            token.token_id, token.logprob
        ))),
    }
}

fn check_counts(batch: &Batch, output: &StepOutput) -> Result<(), String> {
    let parts = batch.sequences.iter();
    let wanted = parts.clone().filter(|part| part.sample.is_some()).count();
    let targets = parts.filter_map(|part| part.prompt_targets.as_ref());
    let prompt: usize = targets.map(|targets| targets.targets.len()).sum();
    let (sampled, scored) = (output.sampled.len(), output.prompt.len());
    if sampled == wanted && scored == prompt {
        return Ok(());
    }
    Err(format!(
        "the backend sampled {sampled} of {wanted} sequences and scored {scored} of {prompt} prompt tokens"
    ))
}
