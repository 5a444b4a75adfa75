//! A run begins, or resumes where its journal ends.

use crate::app::App;
use crate::changed::same_run;
use crate::failure::RunError;
use primerl_core::config::Changes;
use primerl_core::{Core, Effect, Event};
use primerl_engines::engine_records;
use primerl_record::journal::{self, Identity, Journal, JournalError, Restored, Skipped, Tail};
use std::path::{Path, PathBuf};
use tokio_util::sync::CancellationToken;

mod identity;

pub(crate) use identity::identity;

/// The driver's initial state.
pub(crate) struct ResumedRun {
    pub core: Core,
    pub journal: Journal,
    /// `None` for a new run; otherwise the core's decisions that may not be on disk yet.
    pub owed: Option<Vec<Effect>>,
}

/// What was damaged by a crash, and is repaired.
fn warn_of_repairs(restored: &Restored) {
    for remark in &restored.remarks {
        tracing::warn!("{remark}");
    }
    let bytes = restored.tail.torn;
    if bytes > 0 {
        tracing::warn!(
            bytes,
            "the journal's last record was cut short: it is removed"
        );
    }
}

impl ResumedRun {
    /// Resumes the journal in `folder`, or starts it with `core`.
    ///
    /// # Errors
    /// The journal is damaged, cannot be written, or is of a run with another config.
    pub fn open(folder: &Path, core: Core, identity: &Identity) -> Result<ResumedRun, RunError> {
        if journal::exists(folder) {
            return ResumedRun::go_on(folder, core.config(), identity);
        }
        std::fs::create_dir_all(folder).map_err(|source| RunError::OutputFolder {
            path: folder.to_owned(),
            source,
        })?;
        // In this order: a run that is killed in between has a first snapshot, and no events.
        journal::write_snapshot(folder, 0, identity, &core)?;
        let journal = Journal::resume(folder, &Tail::default()).map_err(RunError::Journal)?;
        Ok(ResumedRun {
            core,
            journal,
            owed: None,
        })
    }

    /// Whether a run in `folder`, if any, can be resumed with this config.
    ///
    /// # Errors
    /// The journal is damaged, or is of a run with another config.
    pub fn check(folder: &Path, identity: &Identity) -> Result<(), RunError> {
        if !journal::exists(folder) {
            return Ok(());
        }
        let (begun, _) = journal::newest_snapshot(folder).map_err(RunError::Restore)?;
        same_run(folder, &begun.identity, identity)
    }

    fn go_on(
        folder: &Path,
        config: &primerl_core::Config,
        identity: &Identity,
    ) -> Result<ResumedRun, RunError> {
        let restored = journal::restore(folder).map_err(RunError::Restore)?;
        same_run(folder, &restored.identity, identity)?;
        warn_of_repairs(&restored);
        let mut journal = Journal::resume(folder, &restored.tail).map_err(RunError::Journal)?;
        let mut core = restored.core;
        let mut owed = restored.effects;
        if let Some(changes) = Changes::between(core.config(), config) {
            let event = Event::Reconfigured(changes);
            append(&mut journal, &mut core, event, &mut owed).map_err(RunError::Journal)?;
        }
        Ok(ResumedRun {
            core,
            journal,
            owed: Some(owed),
        })
    }

    /// Marks the failed rollouts of a run that only evaluates, so that they are measured once more. A new run has none.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub fn measuring_again(mut self) -> Result<ResumedRun, RunError> {
        if let Some(owed) = &mut self.owed {
            let event = Event::MeasureAgain;
            append(&mut self.journal, &mut self.core, event, owed).map_err(RunError::Journal)?;
        }
        Ok(self)
    }
}

/// Skips an event of the journal in `folder` that cannot be played back.
///
/// # Errors
/// It is not there, or the journal cannot be written.
pub(crate) fn skip(folder: &Path, event: u64) -> Result<(), RunError> {
    match journal::skip(folder, event)? {
        Skipped::Covered => tracing::warn!(
            "--skip-event {event}: a snapshot covers this event, so it is not played back; nothing was skipped, and \
             the flag is not needed any more"
        ),
        Skipped::LeftOut { path, offset, copy } => tracing::warn!(
            "event {event}, at byte {offset} of {}, is skipped from now on: the run loses what the event recorded; the \
             file as it was is {}",
            path.display(),
            copy.display()
        ),
    }
    Ok(())
}

/// Checks, in the background, the files of the run's journal that this start did not read.
pub(crate) fn look_at_unread(folder: PathBuf, stop: CancellationToken) -> std::io::Result<()> {
    let after = journal::newest(&folder)?;
    let look = move || {
        for problem in journal::check_unread(&folder, after, || stop.is_cancelled()) {
            tracing::warn!(
                "{problem}. The run continues, because a newer snapshot covers those events; `primerl trace` cannot show \
                 the time before that snapshot, and batches from that time cannot be rebuilt"
            );
        }
    };
    // No task waits for it: it ends with the run at the latest.
    let thread = std::thread::Builder::new().name("journal-check".into());
    thread.spawn(look).map(drop)
}

fn append(
    journal: &mut Journal,
    core: &mut Core,
    event: Event,
    owed: &mut Vec<Effect>,
) -> Result<(), JournalError> {
    let now = core.now();
    journal.append(now, &event)?;
    journal.request_sync()?;
    owed.extend(core.handle(event, now));
    Ok(())
}

/// Gives the shell the core's state: open rollouts with their conversations, workers, engines.
pub(crate) fn restore(app: &App, core: &Core) {
    app.gateway.gateway.rollouts.begin_at(core.next_rollout());
    for open in core.open_rollouts() {
        let sampling = app.samplings[open.lease.environment.0 as usize].clone();
        app.gateway.gateway.restore(&open, sampling);
    }
    let workers = core.open_workers();
    let leases = core.open_rollouts();
    app.workers.restore(
        workers.map(|open| (open.worker, open.environment, open.name)),
        leases.map(|open| (open.worker, open.lease.rollout)),
        core.next_worker(),
    );
    app.first_workers
        .restore(core.known_examples(), &app.config.output_dir);
    for record in engine_records::read(&app.config.output_dir, core.known_engines()) {
        if let Err(problem) = app.engines.restore(&record) {
            tracing::error!(engine = %record.engine, url = record.url, problem, "cannot use this engine");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::identity::flatten;
    use super::*;
    use crate::config::Config;
    use primerl_core::config::RunConfig;
    use primerl_core::testing::{config, environment, evaluation};

    #[test]
    fn another_config_is_named_by_its_field() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("journal");
        let core = || Core::new(config()).expect("a valid config");
        let of = |config: &primerl_core::Config| {
            let mut identity = Identity::new();
            flatten("", &serde_json::json!(config), &mut identity);
            identity
        };
        ResumedRun::check(&path, &of(&config())).expect("nothing has begun");
        let first = ResumedRun::open(&path, core(), &of(&config())).expect("begins");
        assert!(first.owed.is_none());
        drop(first);
        let again = ResumedRun::open(&path, core(), &of(&config())).expect("resumes");
        assert_eq!(again.owed.map(|owed| owed.len()), Some(0));
        let mut other = config();
        other.environments[0].ratio = 2.0;
        ResumedRun::check(&path, &of(&config())).expect("can be resumed");
        let checked = ResumedRun::check(&path, &of(&other)).expect_err("is refused");
        let error = ResumedRun::open(&path, core(), &of(&other))
            .err()
            .expect("is refused");
        let text = error.to_string();
        assert_eq!(checked.to_string(), text);
        assert!(
            text.contains("environments.0.ratio = 2.0") && text.contains("1.0"),
            "{text}"
        );
    }

    #[test]
    fn the_evaluation_interval_may_change_and_the_batch_size_if_nothing_is_trained() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let of = |config: &primerl_core::Config| {
            let mut identity = Identity::new();
            flatten("", &serde_json::json!(config), &mut identity);
            identity.remove("max_steps");
            identity
        };
        let begun = |name: &str, config: &primerl_core::Config| {
            let path = folder.path().join(name);
            let core = Core::new(config.clone()).expect("a valid config");
            ResumedRun::open(&path, core, &of(config)).expect("begins");
            path
        };
        let every = |interval| primerl_core::Config {
            environments: vec![environment("train"), evaluation("evaluation", interval)],
            ..config()
        };
        let path = begun("trains", &every(Some(3)));
        let now = every(None);
        ResumedRun::check(&path, &of(&now)).expect("can be resumed");
        let core = Core::new(now.clone()).expect("a valid config");
        let resumed = ResumedRun::open(&path, core, &of(&now)).expect("resumes");
        assert_eq!(Changes::between(resumed.core.config(), &now), None);
        let larger = primerl_core::Config {
            run: RunConfig {
                batch_size: 8,
                ..every(Some(3)).run
            },
            ..every(Some(3))
        };
        let error = ResumedRun::check(&path, &of(&larger)).expect_err("is refused");
        assert!(error.to_string().contains("batch_size = 4"), "{error}");

        let only = |batch_size| primerl_core::Config {
            run: RunConfig {
                batch_size,
                max_steps: 0,
                ..config().run
            },
            environments: vec![evaluation("evaluation", None)],
            ..config()
        };
        let path = begun("evaluates", &only(4));
        let core = Core::new(only(32)).expect("a valid config");
        let resumed = ResumedRun::open(&path, core, &of(&only(32))).expect("resumes");
        assert_eq!(resumed.core.config().run.batch_size, 32);
    }

    #[test]
    fn how_rollouts_are_sampled_is_written_as_it_was_before_they_could_truncate() {
        let of = |sampling: &str| {
            let toml = format!(
                "output_dir = \"o\"\nmax_steps = 1\n[model]\npath = \"m\"\n[[train.env]]\nid = \"e\"\n[sampling]\n\
                 max_tokens = 12\n{sampling}"
            );
            let config = Config::from_toml(&toml, "test").expect("is a config");
            let mut identity = identity(&config, &primerl_core::testing::config());
            identity.retain(|name, _| name.contains("sampling of environment"));
            identity.into_iter().collect::<Vec<_>>()
        };
        let plain = (
            "sampling of environment 0".to_owned(),
            "Sampling { temperature: 1.0, max_tokens: 12, rollout_max_tokens: None }".to_owned(),
        );
        let alone = of("");
        assert_eq!((alone.len(), &alone[0]), (1, &plain));
        let truncated = of("truncated = \"replay\"\ntop_k = 5");
        assert_eq!(truncated[0], plain);
        assert_eq!(truncated[1].0, "truncated sampling of environment 0");
        assert!(truncated[1].1.contains("top_k: 5"));
    }
}
