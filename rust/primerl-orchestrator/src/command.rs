//! The command `primerl-orchestrate`, as a function: the native binary and the Python package are two shells of it.

use crate::address::listen;
use crate::config::Config;
use crate::custom::CustomAdvantages;
use crate::failure::RunError;
use crate::log;
use crate::run::Prepared;
use crate::runtime;
use clap::Parser;
use primerl_core::Step;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

pub const EXIT_FINISHED: i32 = 0;
pub const EXIT_FAILED: i32 = 1;
/// Config or input is wrong; nothing was started.
pub const EXIT_INPUT: i32 = 2;
/// Interrupted a second time.
const EXIT_INTERRUPTED: i32 = 130;

/// Run the orchestrator of one training run.
#[derive(Debug, Parser)]
#[command(name = "primerl-orchestrate", version)]
struct Arguments {
    /// TOML file that describes the run
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Check config, model folder and the run to resume, start nothing
    #[arg(long)]
    check: bool,
    /// Write why the check refuses to standard output, as JSON: code, key, the value it had and has, message
    #[arg(long, requires = "check")]
    json: bool,
    /// Go back to the trainer's checkpoint of this step, at this start: what the run did after it is set aside
    #[arg(long, value_name = "STEP")]
    resume_step: Option<u64>,
    /// Measure again, at this start, what a run that only evaluates has measured as failed, or did not measure in time
    #[arg(long)]
    measure_again: bool,
    /// Leave this event of the journal out, from this start on: one that cannot be played back would be refused at every
    /// start
    #[arg(long, value_name = "NUMBER")]
    skip_event: Option<u64>,
}

/// Run the command with `arguments` (without the program's name); the result is the exit code. `functions` calls
/// custom algorithms; without it a config that names one is refused.
pub fn run_command<I>(arguments: I, functions: Option<Arc<dyn CustomAdvantages>>) -> i32
where
    I: IntoIterator,
    I::Item: Into<OsString> + Clone,
{
    let arguments = match parse(arguments.into_iter().map(Into::into)) {
        Ok(arguments) => arguments,
        Err(code) => return code,
    };
    let runtime = match runtime::build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: cannot start the runtime: {error}");
            return EXIT_FAILED;
        }
    };
    // Before anything that takes long: if Python handled the signals, none would end the process while it reads a
    // model.
    let stopping = Stopping::default();
    let watching = runtime.block_on(async { Signals::install() });
    runtime.spawn(stop_on_signal(watching, stopping.clone()));
    let code = answer(&arguments, functions, &runtime, &stopping);
    // A request that renders on a blocking thread must not delay the exit.
    runtime.shutdown_background();
    code
}

/// The error is the exit code.
fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Arguments, i32> {
    let program = std::iter::once(OsString::from("primerl-orchestrate"));
    Arguments::try_parse_from(program.chain(arguments)).map_err(|error| {
        // If stderr is closed, the message has no reader.
        let _ = error.print();
        error.exit_code()
    })
}

fn answer(
    arguments: &Arguments,
    functions: Option<Arc<dyn CustomAdvantages>>,
    runtime: &Runtime,
    stopping: &Stopping,
) -> i32 {
    let prepared =
        Config::from_file(&arguments.config).and_then(|config| Prepared::new(config, functions));
    let prepared = match prepared {
        Ok(prepared) => prepared.going_back_to(arguments.resume_step.map(Step)),
        Err(error) => return refuse(&RunError::Config(error), arguments.json),
    };
    if arguments.check {
        return check(&prepared, arguments);
    }
    let prepared = prepared
        .measuring_again(arguments.measure_again)
        .skipping(arguments.skip_event);
    log::to_stderr(&prepared.config().log.level);
    runtime.block_on(serve(prepared, stopping))
}

fn check(prepared: &Prepared, arguments: &Arguments) -> i32 {
    match prepared.check_folder() {
        Ok(()) => {
            println!("{}: fine", arguments.config.display());
            EXIT_FINISHED
        }
        Err(error) => refuse(&error, arguments.json),
    }
}

fn refuse(error: &RunError, json: bool) -> i32 {
    if json {
        println!("{}", serde_json::json!(error.refusal()));
    }
    eprintln!("error: {error}");
    EXIT_INPUT
}

async fn serve(prepared: Prepared, stopping: &Stopping) -> i32 {
    let outcome = async {
        let listener = listen(prepared.config()).await?;
        // From here on a stop is orderly: any process that finds the run can stop it.
        stopping.is_prepared.store(true, Ordering::Release);
        let running = prepared.start(listener).await?;
        let is_over = running.is_over();
        let outcome = running.wait(stopping.shutdown.clone()).await;
        if let (true, Ok(reason)) = (is_over, &outcome) {
            eprintln!("the run in this output_dir is over: {}", reason.0);
        }
        outcome
    };
    match outcome.await {
        Ok(_) => EXIT_FINISHED,
        Err(error) => report(&error),
    }
}

fn report(error: &Arc<RunError>) -> i32 {
    eprintln!("error: {error}");
    if error.is_input() {
        EXIT_INPUT
    } else {
        EXIT_FAILED
    }
}

/// How far the command is, for the code that stops it.
#[derive(Clone, Default)]
struct Stopping {
    /// Written once, before the run starts: until then there is nothing to stop.
    is_prepared: Arc<AtomicBool>,
    shutdown: CancellationToken,
}

struct Signals {
    interrupt: Signal,
    terminate: Signal,
    /// `None` if it is ignored (`nohup`), or if that cannot be known.
    hangup: Option<Signal>,
}

impl Signals {
    fn install() -> std::io::Result<Signals> {
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: match hangup_is_ignored() {
                Some(false) => Some(signal(SignalKind::hangup())?),
                Some(true) | None => None,
            },
        })
    }

    async fn next(&mut self) -> SignalKind {
        let hangup = async {
            match &mut self.hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => SignalKind::interrupt(),
            _ = self.terminate.recv() => SignalKind::terminate(),
            _ = hangup => SignalKind::hangup(),
        }
    }
}

/// Whether this process was started with SIGHUP ignored, as Linux reports it.
fn hangup_is_ignored() -> Option<bool> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))?;
    let mask = u64::from_str_radix(mask.trim(), 16).ok()?;
    Some(mask & (1 << (SignalKind::hangup().as_raw_value() - 1)) != 0)
}

/// SIGINT, SIGTERM and SIGHUP are handled in the same way; the second signal ends the process at once, and so does one
/// that comes before the run has started.
async fn stop_on_signal(signals: std::io::Result<Signals>, stopping: Stopping) {
    let mut signals = match signals {
        Ok(signals) => signals,
        Err(error) => {
            tracing::warn!(%error, "signals cannot be handled; they end the run abruptly");
            return;
        }
    };
    loop {
        let number = signals.next().await.as_raw_value();
        if !stopping.is_prepared.load(Ordering::Acquire) {
            std::process::exit(128 + number);
        }
        if stopping.shutdown.is_cancelled() {
            std::process::exit(EXIT_INTERRUPTED);
        }
        stopping.shutdown.cancel();
    }
}
