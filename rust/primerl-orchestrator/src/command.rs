//! The command `primerl-orchestrate`, as a function: the native binary and the Python package are two shells of it.

use crate::address::listen;
use crate::config::{Config, ConfigError};
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
    /// Check config and model folder, start nothing
    #[arg(long)]
    check: bool,
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
    let program = std::iter::once(OsString::from("primerl-orchestrate"));
    let arguments =
        match Arguments::try_parse_from(program.chain(arguments.into_iter().map(Into::into))) {
            Ok(arguments) => arguments,
            Err(error) => {
                // Nobody is left to tell if stderr is gone.
                let _ = error.print();
                return error.exit_code();
            }
        };
    let prepared = match Config::from_file(&arguments.config)
        .and_then(|config| Prepared::new(config, functions))
    {
        Ok(prepared) => prepared,
        Err(error) => return refuse(&error),
    };
    if arguments.check {
        if let Err(error) = prepared.check_folder() {
            eprintln!("error: {error}");
            return EXIT_INPUT;
        }
        println!("{}: fine", arguments.config.display());
        return EXIT_FINISHED;
    }
    let prepared = prepared
        .going_back_to(arguments.resume_step.map(Step))
        .measuring_again(arguments.measure_again)
        .skipping(arguments.skip_event);
    log::to_stderr(&prepared.config().log.level);
    let runtime = match runtime::build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: cannot start the runtime: {error}");
            return EXIT_FAILED;
        }
    };
    let code = runtime.block_on(serve(prepared));
    // A request that renders on a blocking thread must not hold up the exit.
    runtime.shutdown_background();
    code
}

fn refuse(error: &ConfigError) -> i32 {
    eprintln!("error: {error}");
    EXIT_INPUT
}

async fn serve(prepared: Prepared) -> i32 {
    let outcome = async {
        let listener = listen(prepared.config()).await?;
        let shutdown = CancellationToken::new();
        // Handled from here on: whoever finds the run can stop it.
        let signals = Signals::install();
        let signals = tokio::spawn(cancel_on_signal(signals, shutdown.clone()));
        let running = prepared.start(listener).await?;
        let is_over = running.is_over();
        let outcome = running.wait(shutdown).await;
        signals.abort();
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

struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn install() -> std::io::Result<Signals> {
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }
}

/// SIGINT and SIGTERM are one path; the second one does not wait.
async fn cancel_on_signal(signals: std::io::Result<Signals>, shutdown: CancellationToken) {
    let mut signals = match signals {
        Ok(signals) => signals,
        Err(error) => {
            tracing::warn!(%error, "signals cannot be handled; the run stops hard");
            return;
        }
    };
    loop {
        tokio::select! {
            _ = signals.interrupt.recv() => {}
            _ = signals.terminate.recv() => {}
        }
        if shutdown.is_cancelled() {
            std::process::exit(EXIT_INTERRUPTED);
        }
        shutdown.cancel();
    }
}
