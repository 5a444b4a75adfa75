//! The orchestrator's process, apart from its core: what waits for the disk, who runs what, and the recorder. All of it is
//! lost when the process dies.

use super::Simulator;
use super::actors::{Action, Running};
use super::disk::Snapshot;
use super::restarts::Death;
use crate::effect::{Effect, LeasedRollout};
use crate::ids::*;
use crate::time::Time;
use std::collections::{BTreeMap, VecDeque};

/// What an answer leads to.
#[derive(Debug)]
pub enum Reply {
    /// The agent has its turn. The rollout is as it was before.
    Turn {
        worker: WorkerId,
        rollout: RolloutId,
        running: Box<Running>,
        is_last: bool,
    },
    /// The worker need not tell the result again; whether the rollout was open.
    Report {
        worker: WorkerId,
        rollout: RolloutId,
        open: bool,
    },
    Published(PolicyVersion, u32),
    Resumed(Step),
    /// The run is over, for a worker that asks for rollouts.
    Over(Effect),
    /// The restart is in the journal: from now on the orchestrator can be reached.
    Restarted,
}

/// What waits until an event is on disk.
#[derive(Debug)]
pub enum Withheld {
    Effect(Effect),
    Snapshot(Box<Snapshot>),
    Reply(Reply),
}

#[derive(Debug)]
pub struct Process {
    /// Counts processes, so that what an earlier one had planned has no effect.
    pub life: u32,
    /// It can be reached.
    pub serves: bool,
    /// By event, in the order of events.
    pub durable: VecDeque<(u64, Withheld)>,
    /// Answers for which it is enough that the operating system has the event.
    pub written: VecDeque<(u64, Reply)>,
    /// Who runs the open rollouts, and since when.
    pub open: BTreeMap<RolloutId, (WorkerId, Time)>,
    /// What the recorder has to write; it is at the first.
    recorder: VecDeque<Withheld>,
}

impl Process {
    pub fn new(life: u32) -> Process {
        Process {
            life,
            serves: false,
            durable: VecDeque::new(),
            written: VecDeque::new(),
            open: BTreeMap::new(),
            recorder: VecDeque::new(),
        }
    }

    pub fn opened(&mut self, worker: WorkerId, leased: &[LeasedRollout], now: Time) {
        let open = leased.iter().map(|lease| (lease.rollout, (worker, now)));
        self.open.extend(open);
    }

    pub fn closed(&mut self, rollout: RolloutId) {
        self.open.remove(&rollout);
    }

    pub fn is_open(&self, rollout: RolloutId, worker: WorkerId) -> bool {
        self.open.get(&rollout).is_some_and(|(by, _)| *by == worker)
    }

    pub fn withholds_what_goes_before(&self, effect: &Effect) -> bool {
        self.durable
            .iter()
            .any(|(_, what)| matches!(what, Withheld::Effect(withheld) if effect.follows(withheld)))
    }

    /// Batches that would be written.
    pub fn batches_to_write(&self) -> u64 {
        let is_cut = |job: &&Withheld| matches!(job, Withheld::Effect(Effect::BatchCut { .. }));
        self.recorder.iter().filter(is_cut).count() as u64
    }
}

impl Simulator {
    pub(super) fn withhold(&mut self, number: u64, what: Withheld) {
        match self.disk.is_instant() {
            true => self.record(what),
            false => self.process.durable.push_back((number, what)),
        }
    }

    pub(super) fn withhold_reply(&mut self, number: u64, reply: Reply) {
        if self.disk.is_instant() {
            return self.answer(reply);
        }
        match reply {
            Reply::Turn { .. } => self.process.written.push_back((number, reply)),
            reply => self
                .process
                .durable
                .push_back((number, Withheld::Reply(reply))),
        }
    }

    /// Carries out what the journal's progress allows.
    pub(super) fn release(&mut self) {
        let life = self.process.life;
        let is_next = |number: Option<u64>, mark: u64| number.is_some_and(|number| number <= mark);
        while self.process.life == life
            && is_next(
                self.process.written.front().map(|(number, _)| *number),
                self.disk.written,
            )
        {
            let (_, reply) = self
                .process
                .written
                .pop_front()
                .expect("there is a next one");
            self.answer(reply);
        }
        while self.process.life == life
            && is_next(
                self.process.durable.front().map(|(number, _)| *number),
                self.disk.durable,
            )
        {
            match self
                .process
                .durable
                .pop_front()
                .expect("there is a next one")
            {
                (_, Withheld::Reply(reply)) => self.answer(reply),
                (_, job) => self.give_recorder(job),
            }
        }
    }

    pub(super) fn answer(&mut self, reply: Reply) {
        match reply {
            Reply::Turn {
                worker,
                rollout,
                running,
                is_last,
            } => self.turn_answered(worker, rollout, &running, is_last),
            Reply::Report {
                worker,
                rollout,
                open,
            } => self.report_answered(worker, rollout, open),
            Reply::Published(version, life) => self.weights_accepted(version, life),
            Reply::Resumed(step) => self.resume_accepted(step),
            Reply::Over(effect) => self.carry_out(effect),
            Reply::Restarted => self.orchestrator_serves(),
        }
    }

    /// The recorder writes one thing after the other.
    pub(super) fn give_recorder(&mut self, job: Withheld) {
        self.process.recorder.push_back(job);
        if self.process.recorder.len() == 1 {
            self.recorder_begins();
        }
    }

    fn recorder_begins(&mut self) {
        let (after, life) = (self.disk.span(), self.process.life);
        self.plan(after, Action::Recorded(life));
    }

    pub(super) fn recorded(&mut self, life: u32) {
        if life != self.process.life {
            return;
        }
        if self.disk.chance(|faults| faults.fails) {
            return self.orchestrator_dies(Death::DiskFailed);
        }
        let job = self.process.recorder.pop_front().expect("it was at it");
        if !self.process.recorder.is_empty() {
            self.recorder_begins();
        }
        self.record(job);
    }

    /// What is on disk is not written twice; it is what would be.
    pub(super) fn record(&mut self, job: Withheld) {
        match job {
            Withheld::Effect(Effect::BatchCut { batch }) => {
                let written = self
                    .disk
                    .spool
                    .entry(batch.step)
                    .or_insert_with(|| batch.clone());
                assert!(
                    *written == batch,
                    "step {} is cut as another batch",
                    batch.step
                );
            }
            Withheld::Effect(Effect::Batch { request, step, .. }) => {
                let batch = self.disk.spool.get(&step);
                let batch =
                    batch.unwrap_or_else(|| panic!("the batch of step {step} is not in the spool"));
                self.witness.gets_batch(batch);
                self.trainer_gets(request);
            }
            Withheld::Effect(Effect::ForgetBatches { before }) => {
                self.disk.spool.retain(|step, _| *step >= before);
            }
            Withheld::Effect(Effect::Evaluated(report)) => {
                let key = (report.environment, report.version);
                let written = self
                    .disk
                    .evaluations
                    .entry(key)
                    .or_insert_with(|| report.clone());
                assert_eq!(*written, report, "an evaluation has two results");
            }
            Withheld::Effect(Effect::Finished { reason }) => self.ended = Some(reason),
            Withheld::Snapshot(snapshot) => self.disk.add_snapshot(*snapshot),
            job => unreachable!("the recorder is not given {job:?}"),
        }
    }
}
