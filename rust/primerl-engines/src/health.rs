//! Whether an engine may have requests, judged by observations: rules only; the time is an argument.
//!
//! ```text
//! serves ── 3 bad looks in a row ──────────────────────────────> out
//! serves ── half of its requests fail, 5 at least ─────────────> out     while another engine serves
//! serves ── 20 s without a token, while it has requests ───────> out     while another engine serves
//! out    ── its penalty is over, and 3 good looks in a row ────> it proves its weights, and serves
//! serves ── 30 s at a quarter of the others' pace, or 3 late looks ─> slow: an eighth of the requests
//! slow   ── 15 s at half of it or more; 5 looks in time ──────────────> serves
//! serves ── 30 s without the newest weights, which another has ─> said to be behind: by that it gets next to nothing
//! ```
//! Each way back has a stricter condition than the way out, so that an engine at the limit does not alternate. The
//! penalty doubles with each loss, and is reduced step by step while the engine serves. If no other engine serves, only
//! an engine that does not answer is taken out: a bad one is better than none.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Number of health checks in a row.
const BAD_TO_LOSE: u32 = 3;
const GOOD_TO_RETURN: u32 = 3;
const LATE_TO_SLOW: u32 = 3;
const TIMELY_TO_RECOVER: u32 = 5;
/// A health check's answer that takes this long is late.
const LATE: Duration = Duration::from_secs(2);
/// Number of recent requests that are judged.
const JUDGED: usize = 20;
const JUDGED_FOR: Duration = Duration::from_secs(30);
const FAILED_TO_LOSE: usize = 5;
/// With requests and without a token for this long, it hangs; a warning is logged after half of it.
const STALLED: Duration = Duration::from_secs(20);
const FIRST_PENALTY: Duration = Duration::from_millis(200);
const LONGEST_PENALTY: Duration = Duration::from_secs(60);
/// The same, if no other engine serves.
const LONGEST_ALONE: Duration = Duration::from_secs(10);
/// Serving for this long halves the penalty.
const FORGIVES: Duration = Duration::from_secs(60);
/// Shares of the others' pace.
const SLOW_SHARE: f64 = 0.25;
const RECOVERED_SHARE: f64 = 0.5;
const SLOW_AFTER: Duration = Duration::from_secs(30);
const RECOVERED_AFTER: Duration = Duration::from_secs(15);
/// Some versions exist for less than a second.
const BEHIND_AFTER: Duration = Duration::from_secs(30);
/// A slow engine whose pace has not been seen for this long gets another chance.
const UNSEEN: Duration = Duration::from_secs(60);

/// Health of one engine.
#[derive(Debug, Default)]
pub(super) struct Health {
    bad_looks: u32,
    good_looks: u32,
    late_looks: u32,
    timely_looks: u32,
    is_late: bool,
    /// For each recent request: when it ended, and whether it failed.
    judged: VecDeque<(Instant, bool)>,
    pace: Pace,
    /// Tokens it has made, and when that number last grew, or could not grow.
    made: Option<(f64, Instant)>,
    /// Since when its pace has been far below the pace of the others, or close enough to it.
    low_since: Option<Instant>,
    level_since: Option<Instant>,
    /// Since when it or the others had too few requests to compare.
    unseen_since: Option<Instant>,
    /// Its pace and the others', when it was found to be slow.
    low: Option<(f64, f64)>,
    /// Since when every look found another engine with newer weights.
    behind_since: Option<Instant>,
    was_out: bool,
    losses: u32,
    out_since: Option<Instant>,
    serves_since: Option<Instant>,
}

impl Health {
    pub(crate) fn looked_good(&mut self, took: Duration) {
        self.bad_looks = 0;
        self.good_looks += 1;
        let is_late = took >= LATE;
        self.late_looks = if is_late { self.late_looks + 1 } else { 0 };
        self.timely_looks = if is_late { 0 } else { self.timely_looks + 1 };
        self.is_late = match self.is_late {
            false => self.late_looks >= LATE_TO_SLOW,
            true => self.timely_looks < TIMELY_TO_RECOVER,
        };
    }

    pub(crate) fn looked_bad(&mut self) {
        self.bad_looks += 1;
        self.good_looks = 0;
    }

    /// The engine did not answer the last health checks.
    pub(crate) fn is_unreachable(&self) -> bool {
        self.bad_looks >= BAD_TO_LOSE
    }

    /// The engine answered a request.
    pub(crate) fn answered(&mut self, now: Instant) {
        self.judge(now, false);
    }

    /// A request failed on this engine that another engine could answer.
    pub(crate) fn failed(&mut self, now: Instant) {
        self.judge(now, true);
    }

    fn judge(&mut self, now: Instant, failed: bool) {
        if self.judged.len() == JUDGED {
            self.judged.pop_front();
        }
        self.judged.push_back((now, failed));
    }

    /// Tokens it has made since it started, including those of prompts. `is_idle`: it has no request to make tokens
    /// for.
    pub(crate) fn made(&mut self, now: Instant, tokens: f64, is_idle: bool) {
        match self.made {
            Some((before, _)) if before == tokens && !is_idle => {}
            _ => self.made = Some((tokens, now)),
        }
    }

    /// Tokens it has sampled since it started, and the total time of all its requests until now, in seconds.
    pub(crate) fn sampled(&mut self, now: Instant, tokens: f64, requests_s: f64) {
        self.pace.look(now, tokens, requests_s);
    }

    /// The engine was kept from its requests until now.
    pub(crate) fn was_paused(&mut self, now: Instant) {
        if let Some((_, since)) = &mut self.made {
            *since = now;
        }
    }

    fn stalled_for(&self, now: Instant) -> Option<Duration> {
        let (_, since) = self.made?;
        let stalled = now.saturating_duration_since(since);
        (stalled >= STALLED / 2).then_some(stalled)
    }

    /// Why the engine is to be taken out.
    pub(crate) fn lost(&self, now: Instant, others_serve: bool) -> Option<String> {
        if !others_serve {
            return None;
        }
        let fresh = |(at, _): &&(Instant, bool)| now.saturating_duration_since(*at) <= JUDGED_FOR;
        let judged = self.judged.iter().filter(fresh).count();
        let failed = self
            .judged
            .iter()
            .filter(fresh)
            .filter(|(_, failed)| *failed)
            .count();
        if failed >= FAILED_TO_LOSE && 2 * failed >= judged {
            return Some(format!("{failed} of its last {judged} requests failed"));
        }
        (self.stalled_for(now)? >= STALLED).then(|| self.describe_stall(now).unwrap_or_default())
    }

    fn describe_stall(&self, now: Instant) -> Option<String> {
        let seconds = self.stalled_for(now)?.as_secs();
        Some(format!(
            "it hangs: it has requests, and has made no token for {seconds} s"
        ))
    }

    /// Tokens per second for each request on it; `None` if it had too few lately.
    pub(crate) fn pace(&self, now: Instant) -> Option<f64> {
        self.pace.rate(now)
    }

    /// `others`: the pace of the other serving engines.
    pub(crate) fn compare(&mut self, now: Instant, others: Option<f64>) {
        let lasted = |since: Option<Instant>, long: Duration| {
            since.is_some_and(|since| now.saturating_duration_since(since) >= long)
        };
        let (Some(own), Some(others)) = (self.pace.rate(now), others) else {
            // Requests may pause for a while: no reason to count from the start again.
            self.unseen_since.get_or_insert(now);
            if lasted(self.unseen_since, UNSEEN) {
                (self.low_since, self.level_since, self.low) = (None, None, None);
            }
            return;
        };
        self.unseen_since = None;
        if own < SLOW_SHARE * others {
            self.level_since = None;
            self.low_since.get_or_insert(now);
            if lasted(self.low_since, SLOW_AFTER) {
                self.low = Some((own, others));
            }
        } else if own < RECOVERED_SHARE * others {
            (self.low_since, self.level_since) = (None, None);
        } else {
            self.low_since = None;
            self.level_since.get_or_insert(now);
            if lasted(self.level_since, RECOVERED_AFTER) {
                self.low = None;
            }
        }
    }

    /// `is_behind`: another engine has proved newer weights.
    pub(crate) fn compare_weights(&mut self, now: Instant, is_behind: bool) {
        let since = self.behind_since.filter(|_| is_behind);
        self.behind_since = since.or(is_behind.then_some(now));
    }

    /// Whether the engine gets few requests while others are not slow.
    pub(crate) fn is_slow(&self) -> bool {
        self.is_late || self.low.is_some()
    }

    /// For people: what is wrong with a serving engine.
    pub(crate) fn complaint(&self, now: Instant) -> Option<String> {
        self.describe_stall(now)
            .or_else(|| {
                let (own, others) = self.low?;
                Some(format!(
                    "slow: a request gets {own:.1} tokens/s, {others:.1} of the others"
                ))
            })
            .or_else(|| {
                self.is_late
                    .then(|| "slow: it takes seconds to answer a health check".into())
            })
            .or_else(|| {
                let behind = now.saturating_duration_since(self.behind_since?);
                let seconds = behind.as_secs();
                (behind >= BEHIND_AFTER).then(|| {
                    format!("behind: for {seconds} s others have had newer weights, and get its requests")
                })
            })
    }

    /// The engine gets no requests from now on.
    pub(crate) fn taken_out(&mut self, now: Instant) {
        let served = self.serves_since.take();
        let served = served.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let forgiven = (served.as_secs() / FORGIVES.as_secs()).min(u64::from(u32::MAX)) as u32;
        *self = Health {
            was_out: true,
            losses: self.losses.saturating_sub(forgiven) + 1,
            out_since: Some(now),
            ..Health::default()
        };
    }

    /// Whether health checks may bring it back.
    pub(crate) fn may_be_asked(&self, now: Instant, others_serve: bool) -> bool {
        let Some(since) = self.out_since else {
            return true;
        };
        let doubled = FIRST_PENALTY.saturating_mul(1 << self.losses.saturating_sub(1).min(16));
        let longest = if others_serve {
            LONGEST_PENALTY
        } else {
            LONGEST_ALONE
        };
        now.saturating_duration_since(since) >= doubled.min(longest)
    }

    /// Enough good health checks in a row; an engine that was never out needs one.
    pub(crate) fn may_return(&self) -> bool {
        self.good_looks >= if self.was_out { GOOD_TO_RETURN } else { 1 }
    }

    pub(crate) fn serves(&mut self, now: Instant) {
        self.serves_since.get_or_insert(now);
    }
}

/// Tokens, and the time of requests that waited for them, with a decaying weight. Uses the engine's own counts, not its
/// answers: a very slow engine answers nothing for minutes.
#[derive(Debug, Default)]
struct Pace {
    tokens: f64,
    seconds: f64,
    /// When it was last observed, and both counts since the start.
    last: Option<(Instant, f64, f64)>,
}

impl Pace {
    const HALF_LIFE_S: f64 = 10.0;
    /// Total time of requests, seconds.
    const FEW_S: f64 = 3.0;

    fn left(&self, now: Instant) -> f64 {
        let passed = self
            .last
            .map_or(Duration::ZERO, |(at, ..)| now.saturating_duration_since(at));
        0.5_f64.powf(passed.as_secs_f64() / Self::HALF_LIFE_S)
    }

    fn look(&mut self, now: Instant, tokens: f64, requests_s: f64) {
        let left = self.left(now);
        (self.tokens, self.seconds) = (self.tokens * left, self.seconds * left);
        // A counter that decreased was reset: the engine was restarted.
        if let Some((_, tokens_before, requests_s_before)) = self.last
            && tokens >= tokens_before
        {
            self.tokens += tokens - tokens_before;
            self.seconds += requests_s - requests_s_before;
        }
        self.last = Some((now, tokens, requests_s));
    }

    fn rate(&self, now: Instant) -> Option<f64> {
        (self.seconds * self.left(now) >= Self::FEW_S).then(|| self.tokens / self.seconds)
    }
}

#[cfg(test)]
mod tests;
