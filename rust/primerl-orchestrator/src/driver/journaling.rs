//! How the driver and the journal work together: when events are passed on and synced, and what waits until they are.

use super::*;

impl Driver {
    pub(super) async fn wait_until_durable(&mut self) -> Result<(), JournalError> {
        let number = self.journal.appended();
        self.journal.request_sync()?;
        let mut progress = self.journal.progress();
        let reached = progress
            .wait_for(|reached| reached.durable >= number || reached.error.is_some())
            .await
            .map_err(|_| JournalError::Stopped)?;
        reached.error.clone().map_or(Ok(()), Err)
    }

    /// When the journal's writer gets the events that it does not have yet.
    pub(super) fn next_flush(&self) -> Option<Instant> {
        let sync = (self.urgency != Urgency::Nobody).then_some(self.next_sync);
        let written = self.flush_now.then_some(self.may_flush_at);
        let due = sync.into_iter().chain(written).min();
        let idle = || Some(self.flush_at.unwrap_or_else(|| Instant::now() + FLUSH));
        due.or_else(|| self.journal.is_waiting().then(idle).flatten())
    }

    pub(super) fn flush_if_due(&mut self) -> Result<(), JournalError> {
        let now = Instant::now();
        let sync = match self.urgency {
            Urgency::Nobody => false,
            Urgency::Soon => now >= self.next_sync,
            Urgency::Now => true,
        };
        let written = self.flush_now && now >= self.may_flush_at;
        let idle = self.journal.is_waiting() && self.flush_at.is_some_and(|at| now >= at);
        if !sync && !written && !idle {
            return Ok(());
        }
        self.flush_now = false;
        self.flush_at = None;
        self.may_flush_at = now + BETWEEN_FLUSHES;
        if !sync {
            return self.journal.flush();
        }
        self.urgency = Urgency::Nobody;
        self.next_sync = now + BETWEEN_SYNCS;
        self.journal.request_sync()
    }

    /// Copies share their tokens, so this takes no noticeable time.
    pub(super) fn take_snapshot(&mut self, number: u64) {
        if self.core.finished().is_some() {
            return;
        }
        self.snapshot_at = self.journal.bytes();
        let core = Box::new(self.core.clone());
        self.wait_for_journal(number, Durable::Snapshot(core));
    }

    /// The state to which a run goes back together with the trainer's checkpoint of `step`. The events so far end a
    /// segment, so that none of them has to be written again then.
    pub(super) fn keep_state(&mut self, step: Step, number: u64) -> Result<(), JournalError> {
        if self.core.finished().is_some() {
            return Ok(());
        }
        self.journal.end_segment()?;
        let core = Box::new(self.core.clone());
        self.wait_for_journal(number, Durable::State(step, core));
        Ok(())
    }

    pub(super) fn wait_for_journal(&mut self, number: u64, what: Durable) {
        let urgency = match what {
            Durable::Accepted(..) | Durable::Snapshot(_) | Durable::State(..) => Urgency::Soon,
            Durable::Effect(..) | Durable::Verdict(..) => Urgency::Now,
        };
        self.urgency = self.urgency.max(urgency);
        self.durable.push_back((number, what));
        self.note_wait();
    }

    pub(super) fn withholds_what_goes_before(&self, effect: &Effect) -> bool {
        let mut durable = self.durable.iter();
        // The only non-durable effect that has to follow another one.
        matches!(effect, Effect::Batch { .. })
            && durable
                .any(|(_, what)| matches!(what, Durable::Effect(other, _) if effect.follows(other)))
    }

    pub(super) fn note_wait(&mut self) {
        if self.journal_wait.is_none() {
            let waits = &self.telemetry.waits;
            let wait = waits.begin("the driver", "the journal", STUCK, Overdue::FailsTheRun);
            self.journal_wait = Some(wait);
        }
    }

    fn answer_written(&mut self, written: u64) {
        let waiting = self.written.iter();
        let count = waiting.take_while(|(number, _)| *number <= written).count();
        for (_, waiter) in self.written.drain(..count) {
            // A client that hung up does not wait.
            let _ = waiter.send(());
        }
    }

    /// What waits first, if it waits for an event up to this one.
    fn next_durable(&mut self, durable: u64) -> Option<(u64, Durable)> {
        let (number, _) = self.durable.front()?;
        if *number > durable {
            return None;
        }
        self.durable.pop_front()
    }

    /// The journal is on disk up to event `number`.
    fn release_one(&mut self, number: u64, what: Durable) {
        match what {
            Durable::Effect(effect @ Effect::NoLease { .. }, _) => self.carry_out(effect),
            Durable::Effect(effect, waiter) => self.effects.carry_out(effect, waiter),
            Durable::Snapshot(core) => self.effects.snapshot(number, core),
            Durable::State(step, core) => self.effects.keep_state(step, number, core),
            Durable::Accepted(waiter, open) => {
                let _ = waiter.send(open);
            }
            Durable::Verdict(waiter, verdict) => {
                let _ = waiter.send(verdict);
            }
        }
    }

    /// Carries out what the journal's progress allows.
    pub(super) fn release(
        &mut self,
        progress: &mut watch::Receiver<Progress>,
    ) -> Result<(), JournalError> {
        let Progress {
            written,
            durable,
            error,
        } = progress.borrow_and_update().clone();
        if let Some(error) = error {
            return Err(error);
        }
        self.answer_written(written);
        while let Some((number, what)) = self.next_durable(durable) {
            self.release_one(number, what);
        }
        // The disk has moved: the waits start again.
        self.journal_wait = None;
        if !self.durable.is_empty() || !self.written.is_empty() {
            self.note_wait();
        }
        Ok(())
    }
}
