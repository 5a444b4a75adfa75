//! Looks at each server every second, and proves it before it gets requests.

use super::member::Member;
use super::proof::{self, ProofError, Said};
use super::{BETWEEN_LOOKS, Inner};
use crate::failure::RunError;
use primerl_engines::clients::EndpointError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const BETWEEN_WARNINGS: Duration = Duration::from_secs(60);
/// Longest wait for the score of a short text; samples, which are longer, may take `timeout_s`.
const LONGEST_PROOF: Duration = Duration::from_secs(60);

impl Inner {
    /// Watches one server until the run ends.
    pub(super) async fn watch(&self, at: usize) {
        let member = &self.members[at];
        let mut ticks = tokio::time::interval(BETWEEN_LOOKS);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = member.suspect.notified() => {}
            }
            if let Err((error, _)) = member.scorer.health().await {
                self.look_failed(member, &error);
                continue;
            }
            self.check_room_at_last(member);
            if self.leave_out_if_still(at) {
                continue;
            }
            let is_to_be_proved = member.state.lock().health.looked_well();
            if is_to_be_proved {
                self.prove_unless_still(at).await;
            }
        }
    }

    /// If computing hangs, the proof hangs too: requests to the server do not wait for that.
    async fn prove_unless_still(&self, at: usize) {
        tokio::select! {
            () = self.prove(&self.members[at]) => {}
            () = self.left_out_as_still(at) => {}
        }
    }

    async fn left_out_as_still(&self, at: usize) {
        while !self.leave_out_if_still(at) {
            tokio::time::sleep(BETWEEN_LOOKS).await;
        }
    }

    /// Whether it hangs while another one is well: then its requests go there.
    fn leave_out_if_still(&self, at: usize) -> bool {
        if !self.another_is_well(at) {
            return false;
        }
        let member = &self.members[at];
        let quiet = member.state.lock().health.stands_still(Instant::now());
        if let Some(quiet) = quiet {
            let seconds = quiet.as_secs_f64();
            member.take_out(&format!(
                "it has requests and answered none for {seconds:.0} s"
            ));
        }
        quiet.is_some()
    }

    fn look_failed(&self, member: &Member, error: &EndpointError) {
        member.look_failed(&error.to_string());
        let is_unproved = !member.state.lock().health.was_proved();
        if is_unproved && member.is_news(BETWEEN_WARNINGS) {
            tracing::warn!(%error, "{} does not answer", member.scorer.describe());
        }
    }

    /// The server gets requests from now on, if it is the run's teacher.
    async fn prove(&self, member: &Member) {
        let proved = match proof::ask(&member.scorer, &self.parts.renderer, LONGEST_PROOF).await {
            Ok(said) => self.compare(member, &said).map(|()| said),
            Err(error) => Err(error),
        };
        let said = match proved {
            Ok(said) => said,
            Err(ProofError::Outage(error)) => return self.look_failed(member, &error),
            Err(ProofError::Wrong(problem)) => return self.refuse(member, problem),
        };
        admit(member, &said);
        self.free.notify_waiters();
    }

    fn compare(&self, member: &Member, said: &Said) -> Result<(), ProofError> {
        let (longest, is_known) = self.longest_sample();
        if let Some(room) = said.max_model_len
            && let Err(error) = proof::has_room(room, longest)
        {
            if is_known {
                return Err(error);
            }
            member.state.lock().room = Some(room);
        }
        let mut reference = self.reference.lock();
        match &*reference {
            Some(before) => proof::agree(before, said),
            None => {
                *reference = Some(said.clone());
                Ok(())
            }
        }
    }

    /// Context length in tokens, and whether it is known: engines may have room for less than `seq_len`, and report it
    /// when a request exceeds it.
    fn longest_sample(&self) -> (u32, bool) {
        let seq_len = self.parts.seq_len;
        match self.parts.engines.max_model_len() {
            Some(engines) => (engines.min(seq_len), true),
            None => (seq_len, false),
        }
    }

    fn check_room_at_last(&self, member: &Member) {
        let (longest, true) = self.longest_sample() else {
            return;
        };
        let room = member.state.lock().room.take();
        if let Some(Err(error)) = room.map(|room| proof::has_room(room, longest)) {
            self.refuse(member, error.to_string());
        }
    }

    /// At the start that is a mistake in the config; later, a server that must not be used.
    fn refuse(&self, member: &Member, problem: String) {
        let name = member.scorer.describe();
        if !self.has_scored.load(Ordering::Relaxed) {
            return self
                .parts
                .failures
                .fail(RunError::Teacher { name, problem });
        }
        let is_news = member.state.lock().last.as_ref() != Some(&problem);
        if is_news {
            tracing::error!(
                problem,
                "{name} is not the run's teacher, and gets no requests"
            );
        }
        member.refuse(problem);
    }
}

fn admit(member: &Member, said: &Said) {
    let name = member.scorer.describe();
    let (was_out, was_proved) = {
        let mut state = member.state.lock();
        let before = (state.health.is_out(), state.health.was_proved());
        state.health.proved();
        state.news.is_over();
        before
    };
    if was_out {
        tracing::info!("{name} answers again, and gets requests");
    }
    if !was_proved && !said.knows_vocabulary {
        tracing::warn!(
            "{name} does not say how it tokenizes: it is unknown whether it has the model's vocabulary"
        );
    }
}
