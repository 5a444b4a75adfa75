//! The death of the orchestrator, and its restart from what is on disk. Everyone else lives on.

use super::Simulator;
use super::actors::Action;
use super::actors::RunningTurn;
use super::disk::Snapshot;
use super::process::{Process, Reply, Withheld};
use crate::Core;
use crate::effect::Effect;
use crate::event::Event;
use crate::ids::*;
use crate::testing::observer::Observer;
use crate::time::Duration;
use rand::Rng;
use std::collections::BTreeMap;

/// Callers find soon that their connection is gone.
pub const SOON: Duration = Duration(100_000);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    Killed,
    PowerLost,
    DiskFailed,
}

impl Simulator {
    pub(super) fn plan_restart(&mut self) {
        let probability = self.scenario.faults.orchestrator_dies;
        if probability > 0.0 && self.chance(probability) {
            // Now and then before it has done much.
            let soon = !self.disk.is_instant() && self.disk.rng.random_bool(0.3);
            let after = match soon {
                true => self.spread(0.0, 2.0),
                false => self.spread(1.0, 40.0),
            };
            self.plan(after, Action::OrchestratorDies(self.process.life));
        }
    }

    pub(super) fn orchestrator_is_killed(&mut self, life: u32) {
        if life == self.process.life {
            let death = match self.disk.chance(|faults| faults.power_fails) {
                true => Death::PowerLost,
                false => Death::Killed,
            };
            self.orchestrator_dies(death);
        }
    }

    /// Actors that wait for an answer find that there is none.
    pub(super) fn orchestrator_dies(&mut self, death: Death) {
        let next = Process::new(self.process.life + 1);
        let died = std::mem::replace(&mut self.process, next);
        for (_, worker) in std::mem::take(&mut self.lease_requests) {
            if let Some(worker) = self.workers.get_mut(&worker) {
                worker.asking = false;
            }
            self.plan(Duration(1_000), Action::AskForLease(worker));
        }
        self.trainer.asked_ahead.clear();
        for (_, rank) in std::mem::take(&mut self.trainer.requests) {
            self.trainer_repeats(rank);
        }
        self.restarts.lost_batches += died.batches_to_write();
        for (_, withheld) in died.durable {
            let again = match withheld {
                Withheld::Reply(Reply::Report {
                    worker, rollout, ..
                }) => {
                    self.restarts.repeated_reports += 1;
                    Action::TellResult(worker, rollout)
                }
                Withheld::Reply(Reply::Published(version, life)) => {
                    Action::TrainerPublishes(version, life)
                }
                Withheld::Reply(Reply::Resumed(_)) => Action::TrainerStarts,
                _ => continue,
            };
            self.plan(SOON, again);
        }
        if self.disk.is_instant() {
            return self.restart(death);
        }
        self.agenda.retain(|_, action| {
            !matches!(
                action,
                Action::AdvantagesComputed(..) | Action::TeacherScored(..)
            )
        });
        self.lose_engines();
        let down = Duration::from_secs_f64(self.disk.rng.random_range(0.1..20.0));
        self.plan(down, Action::OrchestratorStarts(death));
    }

    /// The core is rebuilt from what is on disk, and the shell from the core.
    pub(super) fn restart(&mut self, death: Death) {
        let end = self.last_event_left(death);
        let (core, observer, owed) = self.replay(end);
        self.witness.check(&core, &observer);
        self.count_losses(death, end);
        self.disk.journal.truncate(end as usize);
        self.disk.reopen(end);
        (self.core, self.observer) = (core, observer);
        if !self.disk.is_instant() {
            self.behind = Duration(self.now.0 - self.core.now().0);
            self.next_request = 0;
            self.next_worker = self.core.next_worker().0;
            let open = self.core.open_rollouts();
            let open = open.map(|open| (open.lease.rollout, (open.worker, self.now)));
            self.process.open = open.collect();
            owed.into_iter()
                .for_each(|effect| self.give_recorder(Withheld::Effect(effect)));
            for request in self.core.unanswered_advantages() {
                self.compute_advantages(&request);
            }
            for request in self.core.unanswered_scores() {
                self.score_by_teacher(&request);
            }
            self.answer_agents(death);
        }
        let number = self.send(Event::Restarted);
        if let Some(reason) = self.core.finished() {
            let reason = reason.to_owned();
            self.withhold(number, Withheld::Effect(Effect::Finished { reason }));
        } else {
            self.take_snapshot(number);
        }
        self.withhold_reply(number, Reply::Restarted);
        self.write_what_waits();
    }

    /// Any part of what was on its way to the disk may have reached it.
    fn last_event_left(&mut self, death: Death) -> u64 {
        let disk = &mut self.disk;
        let safe = match death {
            Death::PowerLost => disk.durable,
            Death::Killed | Death::DiskFailed => disk.written,
        };
        let reached = disk.reached();
        match safe == reached {
            true => safe,
            false => disk.rng.random_range(safe..=reached),
        }
    }

    /// The core after event `end`, with what was seen of it from outside, and what it said for good since the snapshot.
    /// With what is lost it is the core that died.
    fn replay(&mut self, end: u64) -> (Core, Observer, Vec<Effect>) {
        if self.disk.snapshots.len() > 1 && self.disk.chance(|faults| faults.snapshot_damaged) {
            self.disk.snapshots.pop();
            self.restarts.damaged_snapshots += 1;
        }
        let newest = self.disk.snapshots.last();
        let Snapshot {
            number,
            mut core,
            mut observer,
        } = newest.expect("a run begins with one").clone();
        observer.sampled = std::mem::take(&mut self.observer.sampled);
        let mut owed = Vec::new();
        let (left, lost) = self.disk.journal.split_at(end as usize);
        for (now, event) in &left[number as usize..] {
            observer.saw_event(event, *now);
            let effects = core.handle(event.clone(), *now);
            effects
                .iter()
                .for_each(|effect| observer.saw_effect(effect));
            observer.after_event(*now);
            owed.extend(effects.into_iter().filter(Effect::is_durable));
        }
        // What had ended is ended.
        owed.retain(|effect| !matches!(effect, Effect::Finished { .. }));
        let mut whole = core.clone();
        for (now, event) in lost {
            whole.handle(event.clone(), *now);
        }
        let (replayed, died) = (whole.fingerprint(), self.core.fingerprint());
        assert!(
            replayed == died,
            "a replay of the journal gives another core: {}",
            first_difference(&replayed, &died)
        );
        (core, observer, owed)
    }

    fn count_losses(&mut self, death: Death, end: u64) {
        let restarts = &mut self.restarts;
        restarts.lost_events += self.disk.journal.len() as u64 - end;
        match death {
            Death::Killed => restarts.kills += 1,
            Death::PowerLost => restarts.power_losses += 1,
            Death::DiskFailed => restarts.disk_failures += 1,
        }
    }

    /// Agents ask again for the answer that did not come. It is there if their turn is in the journal; else it is sampled
    /// again. What an agent had seen and is lost is from now on part of what it asks.
    fn answer_agents(&mut self, death: Death) {
        let recorded: BTreeMap<RolloutId, u32> = self
            .core
            .open_rollouts()
            .map(|open| (open.lease.rollout, open.turns.len() as u32))
            .collect();
        let (mut again, mut lost) = (Vec::new(), 0);
        for (worker, known) in &mut self.workers {
            for (rollout, running) in &mut known.running {
                let recorded = recorded.get(rollout).copied();
                let is_recorded = |turn: &RunningTurn| turn.index < recorded;
                if running.unanswered && !running.turns.last().is_some_and(is_recorded) {
                    running.turns.pop();
                    running.turns_left += 1;
                    running.unanswered = false;
                    again.push(Action::BeginTurn(*worker, *rollout));
                } else if running.unanswered {
                    again.push(Action::AskForAnswer(*worker, *rollout));
                }
                if recorded.is_none() {
                    continue;
                }
                for turn in &mut running.turns {
                    if turn.index >= recorded {
                        assert!(
                            death == Death::PowerLost,
                            "an answered turn of {rollout} is lost"
                        );
                        turn.index = None;
                        lost += 1;
                    }
                }
            }
        }
        self.restarts.lost_turns += lost;
        again.into_iter().for_each(|action| self.plan(SOON, action));
    }

    /// From now on it can be reached, and reaches its engines.
    pub(super) fn orchestrator_serves(&mut self) {
        self.process.serves = true;
        let running = self.lose_engines();
        for (engine, life) in running {
            let after = self.spread(0.1, 1.0);
            self.plan(after, Action::EngineStarts(engine, life));
        }
        self.plan_restart();
    }
}

/// The surroundings of the first byte in which two texts differ.
fn first_difference(a: &str, b: &str) -> String {
    let at = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    let around = |text: &str| {
        let bytes = &text.as_bytes()[at.saturating_sub(60)..(at + 60).min(text.len())];
        String::from_utf8_lossy(bytes).into_owned()
    };
    format!("{:?} against {:?}", around(a), around(b))
}
