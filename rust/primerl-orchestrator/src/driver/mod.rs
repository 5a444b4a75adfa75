//! The owner of the core, on a separate thread. Everything that happens arrives here as an event, in one order; every
//! event goes into the journal before its effects are carried out, and durable effects wait until it is on disk.
//!
//! ```text
//! handlers, supervisors ──(event, who waits)──> inbox ──> core.handle ──> effects ──> gateway, engines, workers
//!                                                   │                        └ durable ones ─(journal synced)─> recorder
//!                                                   └────> journal
//! ```
//! Nothing here waits for anything but the inbox, the journal's progress and the core's next deadline.

mod journaling;
mod replies;
mod thread;

pub(crate) use thread::start;

use crate::app::App;
use crate::effects::Effects;
use crate::failure::{Failures, RunError};
use crate::telemetry::Telemetry;
use primerl_core::effect::LeasedRollout;
use primerl_core::{Core, Effect, Event, RequestId, RolloutId, Step, Time, WorkerId};
use primerl_record::journal::{Journal, JournalError, Progress};
use primerl_service::inbox::{BatchReply, Inbox, LeaseReply, Message, Reply};
use primerl_service::waits::{Overdue, Waiting};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;

/// Number of events that are taken from the inbox before the journal is asked to sync and timers are checked.
const GROUP: usize = 64;
/// A deadline of the core in the past must not make the driver spin.
const SHORTEST_TICK: Duration = Duration::from_millis(1);
/// Events that no one waits for stay in memory for at most this long.
const FLUSH: Duration = Duration::from_millis(200);

/// A sync that can wait is asked for this long after the previous one: each costs the disk, and a CPU, as much as
/// handling several events.
const BETWEEN_SYNCS: Duration = Duration::from_millis(10);
/// The same for events that only have to outlive this process: each sync wakes the journal's thread, which wakes the
/// driver.
const BETWEEN_FLUSHES: Duration = Duration::from_millis(2);

/// A disk that does not take an event for this long counts as lost.
const STUCK: Duration = Duration::from_secs(20);
/// A snapshot of the core is written after this many bytes of events, which a restart has to play back.
const BETWEEN_SNAPSHOTS: u64 = 64 << 20;

/// Who waits for the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Urgency {
    Nobody,
    /// A waiter whose answer may come together with others'.
    Soon,
    /// A waiter that delays the run: the trainer.
    Now,
}

/// Effects that wait until the journal is on disk.
enum Durable {
    Effect(Effect, Option<oneshot::Sender<BatchReply>>),
    Snapshot(Box<Core>),
    /// To be kept next to the trainer's checkpoint of this step.
    State(Step, Box<Core>),
    Accepted(oneshot::Sender<bool>, bool),
    Verdict(oneshot::Sender<Result<(), String>>, Result<(), String>),
}

pub(crate) struct Driver {
    core: Core,
    journal: Journal,
    effects: Effects,
    telemetry: Arc<Telemetry>,
    failures: Failures,
    origin: Instant,
    /// The core's time at `origin`: that of the last event before a restart.
    began: Time,
    /// Effects that wait for durability, in the order of their events' numbers.
    durable: VecDeque<(u64, Durable)>,
    /// Effects that wait until the operating system has an event, in the order of numbers.
    written: VecDeque<(u64, oneshot::Sender<()>)>,
    /// Set while something waits for the journal.
    journal_wait: Option<Waiting>,
    /// Size of the journal at the last snapshot of the core, bytes.
    snapshot_at: u64,
    /// How urgent the events are that were added since the journal was last asked to sync.
    urgency: Urgency,
    /// A waiter needs only that the operating system has an event.
    flush_now: bool,
    next_sync: Instant,
    may_flush_at: Instant,
    replies: HashMap<RequestId, Reply>,
    last_tick: Instant,
    /// When events that no one waits for are given to the journal's writer.
    flush_at: Option<Instant>,
}

impl Driver {
    pub fn new(core: Core, journal: Journal, effects: Effects, app: &App) -> Driver {
        Driver {
            began: core.now(),
            core,
            journal,
            effects,
            telemetry: Arc::clone(&app.telemetry),
            failures: app.failures.clone(),
            origin: app.origin,
            durable: VecDeque::new(),
            written: VecDeque::new(),
            journal_wait: None,
            snapshot_at: 0,
            urgency: Urgency::Nobody,
            flush_now: false,
            next_sync: app.origin,
            may_flush_at: app.origin,
            replies: HashMap::new(),
            last_tick: app.origin,
            flush_at: None,
        }
    }

    /// Carries out what a restarted run still has to do, before any request is answered.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub async fn go_on(&mut self, owed: Vec<Effect>) -> Result<(), JournalError> {
        for effect in owed {
            if is_still_owed(&effect) {
                self.effects.carry_out(effect, None);
            }
        }
        self.ask_again();
        self.handle(Event::Restarted, None)?;
        // The next restart begins here: otherwise a process that is killed again and again would play back more each
        // time.
        self.take_snapshot(self.journal.appended());
        // It also comes after this start's numbers, which are used from here on.
        self.wait_until_durable().await?;
        if let Some(reason) = self.core.finished() {
            let reason = reason.to_owned();
            self.effects.carry_out(Effect::Finished { reason }, None);
        }
        Ok(())
    }

    /// What was asked before the restart and has no answer.
    fn ask_again(&self) {
        for request in self.core.unanswered_advantages() {
            let effect = Effect::ComputeAdvantages { request };
            self.effects.carry_out(effect, None);
        }
        for request in self.core.unanswered_scores() {
            let effect = Effect::ScoreByTeacher { request };
            self.effects.carry_out(effect, None);
        }
    }

    /// Runs until `stop`, or until the journal cannot be written.
    async fn run(mut self, mut inbox: Inbox, stop: CancellationToken) {
        let mut progress = self.journal.progress();
        let mut messages = Vec::with_capacity(GROUP);
        loop {
            let tick = self.next_tick();
            self.flush_at = self.next_flush();
            let flush_at = self.flush_at.unwrap_or(tick);
            let outcome = tokio::select! {
                () = stop.cancelled() => return,
                received = inbox.recv_many(&mut messages, GROUP) => {
                    if received == 0 {
                        return;
                    }
                    messages.drain(..).try_for_each(|message| self.take(message))
                }
                changed = progress.changed() => match changed {
                    Ok(()) => self.release(&mut progress),
                    Err(_) => Err(JournalError::Stopped),
                },
                // Due timers are handled below.
                () = tokio::time::sleep_until(flush_at.into()), if self.flush_at.is_some() => Ok(()),
                () = tokio::time::sleep_until(tick.into()) => {
                    self.last_tick = Instant::now();
                    self.handle(Event::Tick, None)
                }
            };
            let outcome = outcome.and_then(|()| self.flush_if_due());
            if let Err(error) = outcome {
                self.failures.fail(RunError::Journal(error));
                return;
            }
        }
    }

    fn now(&self) -> Time {
        Time(self.began.0 + self.origin.elapsed().as_micros() as u64)
    }

    fn next_tick(&self) -> Instant {
        let idle = Instant::now() + Duration::from_secs(60);
        let due = self
            .core
            .next_deadline()
            .map(|time| self.origin + Duration::from_micros(time.since(self.began).0));
        due.unwrap_or(idle)
            .min(idle)
            .max(self.last_tick + SHORTEST_TICK)
    }

    fn take(&mut self, message: Message) -> Result<(), JournalError> {
        match message {
            Message::Status(reply) => {
                // The client may have hung up.
                let _ = reply.send((self.core.status(), self.now()));
                Ok(())
            }
            Message::Ping(reply) => {
                let _ = reply.send(());
                Ok(())
            }
            Message::Event { event, reply, sent } => {
                self.telemetry
                    .event_delay
                    .observe(sent.elapsed().as_secs_f64());
                let outcome = self.handle(event, reply);
                self.telemetry
                    .effect_delay
                    .observe(sent.elapsed().as_secs_f64());
                outcome
            }
        }
    }

    fn handle(&mut self, event: Event, reply: Option<Reply>) -> Result<(), JournalError> {
        let now = self.now();
        // A run that is asked to stop can be started again: its journal must not record an end.
        let number = match event {
            Event::ShutdownRequested { .. } => self.journal.appended(),
            _ => self.journal.append(now, &event)?,
        };
        let saved = self.keep_waiter(number, reply, &event);
        let started = Instant::now();
        let effects = self.core.handle(event, now);
        self.telemetry
            .handle_time
            .observe(started.elapsed().as_secs_f64());
        for effect in effects {
            self.carry_out_in_time(number, effect);
        }
        if let Some(step) = saved {
            self.keep_state(step, number)?;
        }
        if self.journal.bytes() - self.snapshot_at >= BETWEEN_SNAPSHOTS {
            self.take_snapshot(number);
        }
        Ok(())
    }

    /// At once, or when the journal is on disk up to the effect's event.
    fn carry_out_in_time(&mut self, number: u64, effect: Effect) {
        // Workers that learn of the end leave; a crash that undid the end would leave the run without them.
        let ends = matches!(effect, Effect::NoLease { finished: true, .. });
        if effect.is_durable() || ends || self.withholds_what_goes_before(&effect) {
            let waiter = self.batch_waiter(&effect);
            self.wait_for_journal(number, Durable::Effect(effect, waiter));
        } else {
            self.carry_out(effect);
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Lease {
                request,
                worker,
                rollouts,
            } => self.lease(request, worker, rollouts),
            Effect::NoLease {
                request,
                reason,
                finished,
            } => self.answer_lease(request, LeaseReply::Nothing { reason, finished }),
            Effect::BatchNotReady {
                request,
                waiting_for,
            } => self.answer_batch(request, BatchReply::NotReady { waiting_for }),
            Effect::NoMoreBatches { request } => self.answer_batch(request, BatchReply::NoMore),
            effect => {
                let waiter = self.batch_waiter(&effect);
                self.effects.carry_out(effect, waiter);
            }
        }
    }
}

/// Whether an effect from before a restart is carried out after it.
fn is_still_owed(effect: &Effect) -> bool {
    match effect {
        // A run that had ended may be able to continue by now.
        Effect::Finished { .. } | Effect::Failed { .. } => false,
        // Answers to requests from before the restart: those who waited have gone, and ask again. A lease that its
        // worker does not name is handed out again.
        Effect::Lease { .. }
        | Effect::NoLease { .. }
        | Effect::BatchNotReady { .. }
        | Effect::NoMoreBatches { .. } => false,
        _ => true,
    }
}
