//! Checks the journal: plays it from its first event, and checks every invariant after each event.

use super::fates::{End, rollouts_of};
use super::play::{Beginning, JournalSummary, Moment, Observer, journal_of, play};
use super::{InspectError, seconds};
use crate::batch::is_of;
use crate::journal;
use crate::spool::Spool;
use primerl_core::counters::Counters;
use primerl_core::pack::PackedBatch;
use primerl_core::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

mod tokens;

use tokens::check_tokens;

/// The first invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Broken {
    /// The event after which it does not; `None` for what is wrong outside the journal.
    pub event: Option<u64>,
    pub at_s: Option<f64>,
    pub what: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckReport {
    pub story: JournalSummary,
    /// Steps cut since the run began.
    pub steps: u64,
    /// Rollouts trained since the run began.
    pub rollouts_trained: u64,
    /// Batches that can still be requested, and are in the spool.
    pub batches_kept: u64,
    /// Batches that were cut when the orchestrator ended and are not in the spool yet: its next start writes them.
    pub batches_owed: u64,
    pub broken: Option<Broken>,
}

struct Checker {
    spool: Spool,
    /// Counted from what was reported, to be compared with the core's own.
    counters: Counters,
    next_step: Step,
    last_rollout: Option<RolloutId>,
    /// The event by which each kept batch was cut.
    cut_by: BTreeMap<Step, u64>,
    broken: Option<Broken>,
}

impl Broken {
    /// Wrong where the journal ends.
    fn at_the_end(what: String) -> Broken {
        Broken {
            event: None,
            at_s: None,
            what,
        }
    }
}

impl Checker {
    fn begin(output_dir: &Path, beginning: &Beginning<'_>) -> Checker {
        let core = beginning.core;
        Checker {
            spool: Spool::new(output_dir, core.config().run.data_ranks),
            counters: ends_of(core.counters()),
            next_step: core.next_step(),
            last_rollout: beginning.lives.keys().last().copied(),
            cut_by: BTreeMap::new(),
            broken: core.check().err().map(|what| Broken {
                event: None,
                at_s: Some(seconds(core.now())),
                what,
            }),
        }
    }

    fn look(&mut self, moment: &Moment<'_>) -> Result<(), String> {
        moment.core.check()?;
        let leases = moment.effects.iter().filter_map(|effect| match effect {
            Effect::Lease { rollouts, .. } => Some(rollouts),
            _ => None,
        });
        self.leased(leases.flatten().map(|leased| leased.rollout).collect())?;
        for effect in moment.effects {
            match effect {
                Effect::BatchCut { batch } => self.cut(batch, moment)?,
                Effect::Batch { step, .. } => self.given(*step, moment.core)?,
                _ => {}
            }
        }
        self.count(moment)?;
        let kept = moment.core.batches_kept_from();
        self.cut_by = self.cut_by.split_off(&kept);
        Ok(())
    }

    fn count(&mut self, moment: &Moment<'_>) -> Result<(), String> {
        for fate in moment.ended {
            self.counters.count(fate.end.ended());
        }
        let (counted, told) = (ends_of(moment.core.counters()), self.counters);
        match counted == told {
            true => Ok(()),
            false => Err(format!(
                "the core counts {counted:?}, its effects add up to {told:?}"
            )),
        }
    }

    /// Numbers only increase; the answers of one event come in the order of requests.
    fn leased(&mut self, mut rollouts: Vec<RolloutId>) -> Result<(), String> {
        rollouts.sort_unstable();
        for id in rollouts {
            if Some(id) <= self.last_rollout {
                return Err(format!("rollout {id} was leased twice"));
            }
            self.last_rollout = Some(id);
            self.counters.dispatched += 1;
        }
        Ok(())
    }

    fn cut(&mut self, batch: &PackedBatch, moment: &Moment<'_>) -> Result<(), String> {
        let (step, expected) = (batch.step, self.next_step);
        if step != expected {
            return Err(format!("step {step} was cut where step {expected} was due"));
        }
        self.next_step = step.next();
        self.cut_by.insert(step, moment.number);
        // A rollout leaves the set of open ones once: one that was trained before, or never leased, is not among those
        // that end now.
        let trained = moment.ended.iter().filter_map(|fate| match fate.end {
            End::Trained(at) if at == step => Some(fate.life.rollout),
            _ => None,
        });
        let (mut trained, named) = (trained.collect::<Vec<_>>(), rollouts_of(batch));
        trained.sort_unstable();
        let stranger = named.iter().find(|id| trained.binary_search(id).is_err());
        if let Some(stranger) = stranger {
            return Err(format!(
                "rollout {stranger} is in the batch of step {step}, but it had ended before, or was never leased"
            ));
        }
        check_tokens(batch, moment.core.config())?;
        self.check_spooled(batch)
    }

    /// The trainer gets exactly the batch that the journal describes, byte by byte, as this version writes it or an earlier
    /// one did.
    fn check_spooled(&self, batch: &PackedBatch) -> Result<(), String> {
        for rank in 0..batch.ranks.len() as u32 {
            // Whether it has to exist is checked at the end.
            let Ok(spooled) = self.spool.read(batch.step, rank) else {
                continue;
            };
            if !is_of(&spooled, batch, rank).map_err(|error| error.to_string())? {
                let step = batch.step;
                return Err(format!(
                    "spool/step_{step}/rank_{rank}.msgpack is not the batch that the journal describes"
                ));
            }
        }
        Ok(())
    }

    fn given(&self, step: Step, core: &Core) -> Result<(), String> {
        let (kept, next) = (core.batches_kept_from(), self.next_step);
        match (kept..next).contains(&step) {
            true => Ok(()),
            false => Err(format!(
                "the trainer was given step {step}, where steps {kept} to {next} (without the last) could be had"
            )),
        }
    }
}

/// The leases and ends among the counters. Whether a rollout was also truncated, for example, is not an end.
fn ends_of(counters: Counters) -> Counters {
    Counters {
        truncated: 0,
        empty: 0,
        errored: 0,
        ..counters
    }
}

impl Observer for Checker {
    fn saw(&mut self, moment: &Moment<'_>) {
        if self.broken.is_some() {
            return;
        }
        self.broken = self.look(moment).err().map(|what| Broken {
            event: Some(moment.number),
            at_s: Some(seconds(moment.now)),
            what,
        });
    }
}

/// Plays everything that is kept of the journal, and reports what does not hold.
///
/// # Errors
/// The journal cannot be read: it is damaged, or there is none.
pub fn check(output_dir: &Path) -> Result<CheckReport, InspectError> {
    let played = play(output_dir, |beginning| {
        Checker::begin(output_dir, beginning)
    })?;
    let (checker, core) = (played.observer, played.core);
    let mut report = CheckReport {
        story: played.story,
        steps: core.next_step().0 - 1,
        rollouts_trained: core.counters().trained,
        batches_kept: 0,
        batches_owed: 0,
        broken: checker.broken,
    };
    let (next, due) = (core.next_step(), checker.next_step);
    if report.broken.is_none() && due != next {
        report.broken = Some(Broken::at_the_end(format!(
            "the next step is {next}, but the last one that was cut precedes step {due}"
        )));
    }
    if report.broken.is_none() {
        check_spool(output_dir, &core, &checker.cut_by, &mut report)?;
    }
    Ok(report)
}

/// The spool holds every batch that can still be requested. The last batch may be missing, if nothing shows that it was
/// ever written: the orchestrator was killed at that moment, or is about to write it.
fn check_spool(
    output_dir: &Path,
    core: &Core,
    cut_by: &BTreeMap<Step, u64>,
    report: &mut CheckReport,
) -> Result<(), InspectError> {
    let spool = Spool::new(output_dir, core.config().run.data_ranks);
    let steps = core.batches_kept_from().0..core.next_step().0;
    let (there, missing): (Vec<Step>, Vec<Step>) =
        steps.map(Step).partition(|step| spool.has(*step));
    report.batches_kept = there.len() as u64;
    if missing.is_empty() {
        return Ok(());
    }
    // A run that continues may have covered them since.
    let folder = journal_of(output_dir)?;
    let kept_from = journal::restore(&folder)?.core.batches_kept_from();
    let newest_snapshot = journal::newest(&folder).map_err(InspectError::Spool)?;
    for step in missing.into_iter().filter(|step| *step >= kept_from) {
        let by = cut_by.get(&step).copied().unwrap_or(0);
        let was_written = there.last() > Some(&step)
            || core.published_version() >= Some(PolicyVersion(step.0))
            || by <= newest_snapshot;
        if was_written {
            report.broken = Some(Broken::at_the_end(format!(
                "the batch of step {step} is not in {}, but the trainer may ask for it",
                output_dir.join("spool").display()
            )));
            return Ok(());
        }
        report.batches_owed += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use primerl_core::EnvironmentId;
    use primerl_core::config::{RunConfig, TrainingMode, TrajectoryStrategy};
    use primerl_core::pack::{Advantage, MicroBatch, Weighted};
    use primerl_core::sample::samples;
    use primerl_core::testing::{config, turn};

    fn checker() -> Checker {
        let core = Core::new(config()).expect("a valid config");
        let beginning = Beginning {
            core: &core,
            lives: &BTreeMap::new(),
        };
        Checker::begin(Path::new("nowhere"), &beginning)
    }

    fn batch(step: u64, version: u64) -> PackedBatch {
        let turns = vec![turn(None, &[1], &[2], version)];
        let strategy = TrajectoryStrategy::Interleaved;
        let weighted = samples(strategy, RolloutId(4), turns, &[Some(0)])
            .into_iter()
            .map(|sample| Weighted {
                sample,
                environment: EnvironmentId(0),
                advantage: Advantage::Uniform(1.0),
                teacher_logprobs: None,
                mode: None,
                echo: None,
            });
        let micro_batch = MicroBatch::new(weighted.collect());
        PackedBatch {
            step: Step(step),
            ranks: vec![vec![micro_batch]],
            loss_tokens: 1,
            metrics: BTreeMap::new(),
        }
    }

    /// The effect of a core that broke its promise.
    fn said(checker: &mut Checker, batch: PackedBatch) -> String {
        let core = Core::new(config()).expect("a valid config");
        let moment = Moment {
            number: 1,
            now: Time(0),
            event: &Event::Tick,
            effects: &[],
            core: &core,
            lives: &BTreeMap::new(),
            ended: &[],
        };
        checker.cut(&batch, &moment).expect_err("is broken")
    }

    #[test]
    fn each_broken_promise_is_named() {
        assert!(said(&mut checker(), batch(2, 0)).contains("step 2 was cut where step 1 was due"));
        let again = said(&mut checker(), batch(1, 0));
        assert!(again.contains("rollout 4 is in the batch of step 1, but it had ended before"));
        let bound = config().run.max_off_policy_steps;
        let step = bound + 2;
        let stale = check_tokens(&batch(step, 0), &config()).expect_err("is stale");
        assert!(
            stale.contains(&format!("max_off_policy_steps = {bound}")),
            "{stale}"
        );
        check_tokens(&batch(step, 1), &config()).expect("is not");
        let wrong = PackedBatch {
            loss_tokens: 2,
            ..batch(1, 0)
        };
        assert!(check_tokens(&wrong, &config()).is_err());
        let taught = Config {
            run: RunConfig {
                training_mode: TrainingMode::Opd,
                ..config().run
            },
            ..config()
        };
        let unscored = check_tokens(&batch(1, 0), &taught).expect_err("is not scored");
        assert!(unscored.contains("no teacher scored"), "{unscored}");
    }

    #[test]
    fn a_rollout_is_leased_once() {
        let mut checker = checker();
        let ids = |ids: &[u64]| ids.iter().copied().map(RolloutId).collect();
        checker.leased(ids(&[3, 0])).expect("is well");
        assert!(checker.leased(ids(&[3])).is_err());
        assert!(checker.leased(ids(&[5, 5])).is_err());
    }
}
