//! What everybody does at each moment: exact sums over the run, and a picture of it in at most [`MOST_BUCKETS`] buckets.

use primerl_core::Time;
use serde::Serialize;

/// What someone does or waits for. Not everybody does everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Doing {
    /// Trainer: forward, backward, optimizer. Engine: forward steps.
    Working,
    /// Trainer: writes weights.
    Publishing,
    /// Trainer: waits for rollouts.
    Rollouts,
    /// Rollout: its tokens are being sampled.
    Sampling,
    /// Rollout: in an engine's waiting queue.
    Queued,
    /// Rollout: tools, tests, scoring.
    Environment,
    /// Rollout: waits for or uses its worker's CPU.
    WorkerCpu,
    /// Engine: loads weights. Rollout: waits while it does. Trainer: waits until engines have proved what it published.
    WeightUpdate,
    /// Nothing more may start: as much is under way as `max_async_level` allows.
    AsyncLevel,
    /// Nothing more may start: `oversampling_factor * batch_size` rollouts are in flight.
    InFlightLimit,
    /// Nothing more starts: every worker runs as many rollouts as it may.
    WorkerSlots,
    /// Nothing more starts: the last steps are under way.
    RunEnd,
    /// Before any engine has proved the first version.
    Start,
}

impl Doing {
    pub const ALL: [Doing; 13] = [
        Doing::Working,
        Doing::Publishing,
        Doing::Rollouts,
        Doing::Sampling,
        Doing::Queued,
        Doing::Environment,
        Doing::WorkerCpu,
        Doing::WeightUpdate,
        Doing::AsyncLevel,
        Doing::InFlightLimit,
        Doing::WorkerSlots,
        Doing::RunEnd,
        Doing::Start,
    ];

    /// As in the report.
    pub fn name(self) -> &'static str {
        match self {
            Doing::Working => "working",
            Doing::Publishing => "publishing",
            Doing::Rollouts => "rollouts",
            Doing::Sampling => "sampling",
            Doing::Queued => "queued",
            Doing::Environment => "environment",
            Doing::WorkerCpu => "worker_cpu",
            Doing::WeightUpdate => "weight_update",
            Doing::AsyncLevel => "async_level",
            Doing::InFlightLimit => "in_flight_limit",
            Doing::WorkerSlots => "worker_slots",
            Doing::RunEnd => "run_end",
            Doing::Start => "start",
        }
    }
}

const KINDS: usize = Doing::ALL.len();
/// Even, so that buckets can be joined in pairs.
const MOST_BUCKETS: usize = 480;

/// Someone, or a number of them who are counted together.
#[derive(Clone, Debug)]
pub struct Track {
    counts: [u64; KINDS],
    since: [Time; KINDS],
    /// Microseconds, times the count.
    totals: [u64; KINDS],
    width: u64,
    buckets: Vec<[f64; KINDS]>,
}

impl Default for Track {
    fn default() -> Self {
        Track {
            counts: [0; KINDS],
            since: [Time(0); KINDS],
            totals: [0; KINDS],
            width: 1_000,
            buckets: Vec::new(),
        }
    }
}

impl Track {
    /// From now on so many do this.
    pub fn set(&mut self, doing: Doing, count: u64, now: Time) {
        let kind = doing as usize;
        if self.counts[kind] == count {
            return;
        }
        self.flush(kind, now);
        self.counts[kind] = count;
    }

    /// One who did something else does this from now on.
    pub fn change(&mut self, from: Doing, to: Doing, now: Time) {
        if from != to {
            self.set(from, 0, now);
            self.set(to, 1, now);
        }
    }

    pub fn count(&self, doing: Doing) -> u64 {
        self.counts[doing as usize]
    }

    /// Forgets what was until now.
    pub fn restart(&mut self, now: Time) {
        *self = Track {
            counts: self.counts,
            since: [now; KINDS],
            ..Track::default()
        };
    }

    /// Brings the sums up to now.
    pub fn close(&mut self, now: Time) {
        (0..KINDS).for_each(|kind| self.flush(kind, now));
    }

    /// Seconds, times how many did it.
    pub fn seconds(&self, doing: Doing) -> f64 {
        self.totals[doing as usize] as f64 / 1e6
    }

    /// How many did what on the average in each of `columns` equal parts of `[from, until)`.
    pub fn columns(&self, from: Time, until: Time, columns: usize) -> Vec<[f64; KINDS]> {
        let span = until.since(from).0.max(1) as f64 / columns as f64;
        let mut result = vec![[0.0; KINDS]; columns];
        for (index, bucket) in self.buckets.iter().enumerate() {
            let (begin, end) = (index as u64 * self.width, (index as u64 + 1) * self.width);
            let (begin, end) = (begin.max(from.0) as f64, end.min(until.0) as f64);
            if end <= begin {
                continue;
            }
            let (begin, end) = (begin - from.0 as f64, end - from.0 as f64);
            let (first, last) = ((begin / span) as usize, (end / span).ceil() as usize);
            let touched = result.iter_mut().enumerate().take(last).skip(first);
            for (column, sums) in touched {
                let (low, high) = (column as f64 * span, (column + 1) as f64 * span);
                let share = (high.min(end) - low.max(begin)).max(0.0) / (end - begin) / span;
                (0..KINDS).for_each(|kind| sums[kind] += bucket[kind] * share);
            }
        }
        result
    }

    fn flush(&mut self, kind: usize, now: Time) {
        let (since, count) = (self.since[kind].0, self.counts[kind]);
        self.since[kind] = now;
        if count == 0 || now.0 <= since {
            return;
        }
        self.totals[kind] += (now.0 - since) * count;
        // Nearly always it is all within the last bucket.
        let end = self.buckets.len() as u64 * self.width;
        if let Some(last) = self.buckets.last_mut()
            && now.0 <= end
            && since >= end - self.width
        {
            last[kind] += ((now.0 - since) * count) as f64;
            return;
        }
        while (now.0 - 1) / self.width >= MOST_BUCKETS as u64 {
            self.join_buckets();
        }
        let last = ((now.0 - 1) / self.width) as usize;
        if self.buckets.len() <= last {
            self.buckets.resize(last + 1, [0.0; KINDS]);
        }
        for index in (since / self.width) as usize..=last {
            let (begin, end) = (index as u64 * self.width, (index as u64 + 1) * self.width);
            let overlap = now.0.min(end) - since.max(begin);
            self.buckets[index][kind] += (overlap * count) as f64;
        }
    }

    fn join_buckets(&mut self) {
        self.width *= 2;
        let joined = self.buckets.chunks(2).map(|pair| {
            let mut sum = [0.0; KINDS];
            pair.iter().for_each(|bucket| {
                (0..KINDS).for_each(|kind| sum[kind] += bucket[kind]);
            });
            sum
        });
        self.buckets = joined.collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up_and_columns_keep_the_sum() {
        let mut track = Track::default();
        track.set(Doing::Working, 1, Time(0));
        for at in 1..2_000_u64 {
            let (from, to) = match at % 2 {
                1 => (Doing::Working, Doing::Rollouts),
                _ => (Doing::Rollouts, Doing::Working),
            };
            track.change(from, to, Time(at * at * 7));
        }
        let end = Time(2_000 * 2_000 * 7);
        track.close(end);
        let seconds = track.seconds(Doing::Working) + track.seconds(Doing::Rollouts);
        assert_eq!(seconds, 28.0);
        assert!(track.buckets.len() <= MOST_BUCKETS);
        let columns = track.columns(Time(0), end, 100);
        for column in &columns {
            assert!(
                (column.iter().sum::<f64>() - 1.0).abs() < 1e-6,
                "{column:?}"
            );
        }
        let working: f64 = columns.iter().map(|column| column[0]).sum::<f64>() / 100.0;
        assert!((working - track.seconds(Doing::Working) / seconds).abs() < 1e-6);
    }

    #[test]
    fn a_restart_forgets_what_was() {
        let mut track = Track::default();
        track.set(Doing::Start, 3, Time(0));
        track.set(Doing::Start, 0, Time(50));
        track.set(Doing::Sampling, 3, Time(50));
        track.restart(Time(60));
        track.close(Time(70));
        assert_eq!(track.seconds(Doing::Start), 0.0);
        assert_eq!(track.seconds(Doing::Sampling), 30e-6);
    }
}
