//! Complete groups that wait for what only the shell can compute: asked for, awaited, timed out.

use crate::Core;
use crate::advantage::Baselines;
use crate::counters::VoidReason;
use crate::deadlines::Due;
use crate::ids::*;
use crate::time::{Duration, Time};
use crate::wait::Armed;
use std::collections::BTreeMap;

/// Who computes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// A custom algorithm's function: advantages.
    Custom,
    /// The teacher: log-probabilities.
    Teacher,
}

/// Complete groups without all that their training needs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Signals {
    /// Groups that wait for a custom algorithm's advantages.
    pub custom: BTreeMap<GroupId, Armed>,
    /// Groups that wait for the teacher's log-probabilities.
    pub teacher: BTreeMap<GroupId, Armed>,
    /// When a group last had a signal, or the run was started again.
    pub at: Time,
    /// What algorithms remember of the batches before.
    pub baselines: Baselines,
}

impl Source {
    /// The kind under which failures are counted.
    fn kind(self) -> &'static str {
        match self {
            Source::Custom => "advantages",
            Source::Teacher => "teacher",
        }
    }

    fn due(self, group: GroupId) -> Due {
        match self {
            Source::Custom => Due::Advantages(group),
            Source::Teacher => Due::Teacher(group),
        }
    }

    fn failed(self) -> &'static str {
        match self {
            Source::Custom => "its custom advantages failed",
            Source::Teacher => "its teacher did not score it",
        }
    }

    fn unknown_group(self) -> &'static str {
        match self {
            Source::Custom => "advantages of a group that is over",
            Source::Teacher => "teacher's scores of a group that is over",
        }
    }

    /// What other groups wait for, and the remedy.
    fn too_slow(self) -> (&'static str, &'static str) {
        match self {
            Source::Custom => (
                "their turn",
                "make the function faster, or raise algorithm.timeout_s",
            ),
            Source::Teacher => (
                "it",
                "give the teacher more room, or raise teacher.client.timeout_s",
            ),
        }
    }
}

impl Signals {
    pub fn of(&self, source: Source) -> &BTreeMap<GroupId, Armed> {
        match source {
            Source::Custom => &self.custom,
            Source::Teacher => &self.teacher,
        }
    }

    fn of_mut(&mut self, source: Source) -> &mut BTreeMap<GroupId, Armed> {
        match source {
            Source::Custom => &mut self.custom,
            Source::Teacher => &mut self.teacher,
        }
    }

    /// Groups that wait.
    pub fn waiting(&self) -> impl Iterator<Item = GroupId> + '_ {
        self.custom.keys().chain(self.teacher.keys()).copied()
    }

    pub fn awaits(&self, id: GroupId) -> bool {
        self.custom.contains_key(&id) || self.teacher.contains_key(&id)
    }
}

impl Core {
    /// A complete group waits for its signal from now on.
    pub(super) fn await_signal(&mut self, source: Source, id: GroupId, timeout: Duration) {
        let armed = Armed::new(self.now, timeout);
        self.deadlines.set(armed.deadline, source.due(id));
        self.signals.of_mut(source).insert(id, armed);
    }

    /// A signal has come. Returns the environment of its group, if that still waits.
    pub(super) fn signal_came(&mut self, source: Source, id: GroupId) -> Option<EnvironmentId> {
        if self.stop(source, id).is_none() {
            self.ignore(source.unknown_group());
            return None;
        }
        self.groups.live.get(&id).map(|group| group.environment)
    }

    pub(crate) fn signal_timed_out(&mut self, source: Source, id: GroupId) {
        let Some(Armed { since, .. }) = self.stop(source, id) else {
            return;
        };
        let Some(environment) = self.groups.live.get(&id).map(|group| group.environment) else {
            return;
        };
        let seconds = (self.now.since(since).as_secs_f64() * 1e3).round() / 1e3;
        let (waits_for, remedy) = source.too_slow();
        let others = match self.signals.of(source).len() {
            0 => String::new(),
            others => format!(", with {others} other groups waiting for {waits_for}"),
        };
        let problem = format!("no answer within {seconds} s of the group's end{others}: {remedy}");
        self.signal_failed(source, id, environment, &problem);
    }

    pub(super) fn signal_failed(
        &mut self,
        source: Source,
        id: GroupId,
        environment: EnvironmentId,
        problem: &str,
    ) {
        self.tally.discards.failed(source.kind());
        let why = format!("{}: {problem}", source.failed());
        self.drop_failed_group(id, environment, VoidReason::GroupDropped, &why);
    }

    /// Forgets that a group waits, if it does.
    pub(crate) fn stop_awaiting(&mut self, id: GroupId) {
        self.stop(Source::Custom, id);
        self.stop(Source::Teacher, id);
    }

    fn stop(&mut self, source: Source, id: GroupId) -> Option<Armed> {
        let armed = self.signals.of_mut(source).remove(&id)?;
        self.deadlines.clear(armed.deadline, source.due(id));
        Some(armed)
    }
}
