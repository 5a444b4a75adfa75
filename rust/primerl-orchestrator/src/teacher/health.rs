//! Whether one of several teachers gets requests. The time is an argument.
//!
//! ```text
//!            proved                 a request or a look failed
//! Unproved ─────────> Well ───────────────────────────────────> Suspected ──> three failed looks in a row, or failed
//!                      ^  ^   good look, then proved                │         requests without an answer between: Out
//!                      │  └─────────────────────────────────────────┘                          │
//!                      └───────── three good looks in a row, then proved ──────────────────────┘
//! ```
//! Only a teacher that is well gets requests. A teacher that has requests and answers none for long is out, well or
//! suspected, if another one is well. After each failure it may be another process, so it is proved again.

use std::time::{Duration, Instant};

/// Failed health checks, or failed requests, in a row before a teacher is given up, and good checks before it is taken
/// back.
const IN_A_ROW: u32 = 3;
/// A teacher that has requests and answers none for this long hangs, if another one is well.
pub(super) const FIRST_PATIENCE: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It is not known yet whether it is the run's teacher.
    Unproved,
    Well,
    Suspected,
    Out,
}

#[derive(Debug)]
pub(super) struct Health {
    phase: Phase,
    pub running: usize,
    /// Time of its last answer, or of the first request since it had none.
    quiet_since: Option<Instant>,
    failed_requests: u32,
    failed_looks: u32,
    good_looks: u32,
    patience: Duration,
    longest_patience: Duration,
    was_proved: bool,
}

impl Health {
    /// No request takes longer than `longest_patience`.
    pub fn new(longest_patience: Duration) -> Health {
        Health {
            phase: Phase::Unproved,
            running: 0,
            quiet_since: None,
            failed_requests: 0,
            failed_looks: 0,
            good_looks: 0,
            patience: FIRST_PATIENCE.min(longest_patience),
            longest_patience,
            was_proved: false,
        }
    }

    pub fn is_well(&self) -> bool {
        self.phase == Phase::Well
    }

    pub fn is_out(&self) -> bool {
        self.phase == Phase::Out
    }

    pub fn was_proved(&self) -> bool {
        self.was_proved
    }

    pub fn begin(&mut self, now: Instant) {
        self.running += 1;
        self.quiet_since.get_or_insert(now);
    }

    /// A request ended, whether or not the teacher was involved in that.
    pub fn ended(&mut self) {
        self.running -= 1;
        if self.running == 0 {
            self.quiet_since = None;
        }
    }

    pub fn answered(&mut self, now: Instant) {
        self.quiet_since = Some(now);
        self.failed_requests = 0;
    }

    pub fn request_failed(&mut self) {
        self.failed_requests += 1;
        match self.phase {
            Phase::Well | Phase::Suspected if self.failed_requests >= IN_A_ROW => self.take_out(),
            Phase::Well => self.phase = Phase::Suspected,
            _ => {}
        }
    }

    pub fn look_failed(&mut self) {
        self.good_looks = 0;
        self.failed_looks += 1;
        match self.phase {
            Phase::Well | Phase::Suspected if self.failed_looks >= IN_A_ROW => self.take_out(),
            Phase::Well => self.phase = Phase::Suspected,
            _ => {}
        }
    }

    /// Whether to prove it now.
    pub fn looked_well(&mut self) -> bool {
        self.failed_looks = 0;
        self.good_looks += 1;
        match self.phase {
            Phase::Well => false,
            Phase::Unproved | Phase::Suspected => true,
            Phase::Out => self.good_looks >= IN_A_ROW,
        }
    }

    /// It is the run's teacher, and has scored a text.
    pub fn proved(&mut self) {
        self.phase = Phase::Well;
        self.was_proved = true;
        self.good_looks = 0;
        self.failed_looks = 0;
        self.failed_requests = 0;
    }

    pub fn take_out(&mut self) {
        self.phase = Phase::Out;
        self.good_looks = 0;
    }

    /// For how long it has answered none of its requests, if that is too long. A teacher that was only slow gets more
    /// time when it returns: otherwise two slow teachers would pass their requests back and forth for ever.
    pub fn stands_still(&mut self, now: Instant) -> Option<Duration> {
        let quiet = now.saturating_duration_since(self.quiet_since?);
        // A suspected teacher keeps its requests until it is given up.
        let has_requests = matches!(self.phase, Phase::Well | Phase::Suspected);
        if !has_requests || quiet < self.patience {
            return None;
        }
        self.patience = (self.patience * 2).min(self.longest_patience);
        Some(quiet)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn well() -> Health {
        let mut health = Health::new(Duration::from_secs(600));
        assert!(!health.is_well() && health.looked_well());
        health.proved();
        health
    }

    #[test]
    fn one_failure_costs_a_proof_and_three_take_it_out() {
        let mut health = well();
        health.request_failed();
        assert!(!health.is_well() && !health.is_out());
        assert!(health.looked_well());
        health.proved();
        for _ in 0..IN_A_ROW {
            assert!(!health.is_out());
            health.look_failed();
        }
        assert!(health.is_out());
    }

    #[test]
    fn it_comes_back_after_three_good_checks_in_a_row() {
        let mut health = well();
        health.take_out();
        assert!(!health.looked_well() && !health.looked_well());
        health.look_failed();
        assert!(!health.looked_well() && !health.looked_well() && health.looked_well());
        // A failure in the proof counts as a failed health check.
        health.look_failed();
        assert!(health.is_out() && !health.looked_well());
    }

    #[test]
    fn answers_between_failures_keep_it() {
        let (mut health, now) = (well(), Instant::now());
        for _ in 0..5 {
            health.request_failed();
            assert!(!health.is_out());
            health.answered(now);
        }
        health.request_failed();
        health.request_failed();
        health.request_failed();
        assert!(health.is_out());
    }

    #[test]
    fn a_teacher_that_hangs_gets_more_time_the_next_time() {
        let (mut health, began) = (well(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        assert_eq!(health.stands_still(at(1000)), None);
        health.begin(began);
        health.begin(at(10));
        health.answered(at(15));
        health.ended();
        assert_eq!(health.stands_still(at(34)), None);
        assert_eq!(health.stands_still(at(35)), Some(Duration::from_secs(20)));
        health.take_out();
        health.ended();
        assert_eq!(health.stands_still(at(99)), None);
        health.proved();
        health.begin(at(100));
        assert_eq!(health.stands_still(at(139)), None);
        assert!(health.stands_still(at(140)).is_some());
    }

    #[test]
    fn a_suspected_teacher_does_not_keep_its_requests() {
        let (mut health, began) = (well(), Instant::now());
        health.begin(began);
        health.request_failed();
        assert!(!health.is_well() && health.looked_well());
        assert_eq!(health.stands_still(began + FIRST_PATIENCE / 2), None);
        let quiet = health.stands_still(began + FIRST_PATIENCE);
        assert_eq!(quiet, Some(FIRST_PATIENCE));
    }
}
