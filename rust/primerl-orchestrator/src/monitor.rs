//! Checks once per second: rates, whether any engine is left, whether the trainer lives, and whether any wait is too
//! long.

use crate::app::App;
use crate::failure::RunError;
use crate::telemetry::TrainerOverdue;
use primerl_engines::EngineStatus;
use primerl_service::waits::{Overdue, Wait, Waiting};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

const INTERVAL: Duration = Duration::from_secs(1);
/// Log an error if all engines are gone for this long, again every `REPEAT`.
const PATIENCE_S: f64 = 30.0;
const REPEAT: Duration = Duration::from_secs(10);
/// A driver that takes no message for this long hangs.
const STUCK: Duration = Duration::from_secs(20);
/// A slower driver is late, and appears in the waits.
const LATE: Duration = Duration::from_secs(2);
/// If its own timer fires later than this, the orchestrator itself was suspended, and has yet to read what came
/// meanwhile.
const STALL: Duration = Duration::from_secs(5);
/// An engine that never served may still be starting: large models take minutes.
const START_UP_S: f64 = 600.0;

/// Runs until `stop`.
pub(crate) async fn watch(app: Arc<App>, stop: CancellationToken) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut monitor = Monitor::new();
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = stop.cancelled() => return,
        }
        if let Some(error) = monitor.look(&app) {
            app.failures.fail(error);
            return;
        }
    }
}

struct Monitor {
    pulse: Pulse,
    /// When it last looked.
    previous: Instant,
    /// When it last logged that no engine is usable, if none is.
    told: Option<Instant>,
}

impl Monitor {
    fn new() -> Monitor {
        Monitor {
            pulse: Pulse::default(),
            previous: Instant::now(),
            told: None,
        }
    }

    /// The error of something without which the run cannot continue.
    fn look(&mut self, app: &App) -> Option<RunError> {
        if self.previous.elapsed() > STALL {
            app.telemetry.trainer.postpone(self.previous.elapsed());
            app.telemetry.waits.postpone(self.previous.elapsed());
        }
        self.previous = Instant::now();
        app.telemetry.gateway.sample_rate();
        self.pulse.feel(app);
        trainer_silent(app)
            .or_else(|| stuck(app))
            .or_else(|| self.look_at_engines(app))
    }

    fn look_at_engines(&mut self, app: &App) -> Option<RunError> {
        let engines = app.engines.status();
        if let Some(error) = unfit(&engines) {
            return Some(error);
        }
        let Some(seconds) = all_down_for(&engines) else {
            self.told = None;
            return None;
        };
        let limit = match engines.iter().any(|engine| engine.was_proved) {
            true => app.config.timeouts.no_engine_s,
            false => app.config.timeouts.no_engine_s.max(START_UP_S),
        };
        if seconds > limit {
            let engines = describe(&engines);
            return Some(RunError::NoEngine { seconds, engines });
        }
        if seconds > PATIENCE_S.min(limit / 2.0) {
            self.name_engines(seconds as u64, &engines);
        }
        None
    }

    fn name_engines(&mut self, seconds: u64, engines: &[EngineStatus]) {
        if self.told.is_none_or(|told| told.elapsed() > REPEAT) {
            self.told = Some(Instant::now());
            tracing::error!(seconds, engines = describe(engines), "no engine is usable");
        }
    }
}

/// Whether the driver processes messages: one ping at a time.
#[derive(Default)]
struct Pulse(Option<(oneshot::Receiver<()>, Waiting)>);

impl Pulse {
    fn feel(&mut self, app: &App) {
        if let Some((answer, _)) = &mut self.0
            && matches!(answer.try_recv(), Err(oneshot::error::TryRecvError::Empty))
        {
            return;
        }
        let waits = &app.telemetry.waits;
        // Once per second, and usually finished within a millisecond.
        let waiting = waits.begin_unseen(
            "the monitor",
            "the driver",
            LATE,
            STUCK,
            Overdue::FailsTheRun,
        );
        self.0 = Some((app.driver.ping(), waiting));
    }
}

/// Names every overdue wait; returns the error of one that the run cannot continue without.
fn stuck(app: &App) -> Option<RunError> {
    let mut fatal = None;
    for wait in app.telemetry.waits.take_overdue(REPEAT) {
        let Wait {
            who,
            waiting_for,
            since_s,
            fails_the_run,
            ..
        } = wait;
        tracing::error!(who, waiting_for, since_s, "a wait is overdue");
        if fails_the_run {
            fatal.get_or_insert(RunError::Stuck {
                who,
                waiting_for,
                seconds: since_s,
            });
        }
    }
    fatal
}

fn trainer_silent(app: &App) -> Option<RunError> {
    let patience = Duration::from_secs_f64(app.config.timeouts.trainer_s);
    Some(match app.telemetry.trainer.overdue(patience)? {
        TrainerOverdue::Silent { silent, doing } => RunError::TrainerSilent {
            seconds: silent.as_secs_f64(),
            doing,
        },
        TrainerOverdue::NotBack { within, why } => RunError::TrainerNotBack {
            seconds: within.as_secs_f64(),
            why,
        },
    })
}

/// No engine has served yet, and one has shown that it never will.
fn unfit(engines: &[EngineStatus]) -> Option<RunError> {
    let (url, lacking) = engines
        .iter()
        .find_map(|engine| Some((engine.url.clone(), engine.unfit.clone()?)))?;
    let any_served = engines.iter().any(|engine| engine.was_proved);
    (!any_served).then_some(RunError::UnfitEngine { url, lacking })
}

/// Seconds since the last engine went down, if all are and there is any.
fn all_down_for(engines: &[EngineStatus]) -> Option<f64> {
    let down: Option<Vec<f64>> = engines
        .iter()
        .map(|engine| engine.down_for.map(|down| down.as_secs_f64()))
        .collect();
    down?.into_iter().reduce(f64::min)
}

fn describe(engines: &[EngineStatus]) -> String {
    let lines: Vec<String> = engines
        .iter()
        .map(|engine| format!("{} ({})", engine.url, engine.doing))
        .collect();
    lines.join(", ")
}
