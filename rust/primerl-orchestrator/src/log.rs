//! The destination of log lines: stderr for the command, the run's log file inside another program.

use parking_lot::Mutex;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Overrides the config's level; takes the directives of `tracing_subscriber::EnvFilter`.
const ENVIRONMENT_VARIABLE: &str = "PRIMERL_LOG";

fn filter(level: &str) -> EnvFilter {
    EnvFilter::try_from_env(ENVIRONMENT_VARIABLE).unwrap_or_else(|_| EnvFilter::new(level))
}

/// Logs to stderr. If the program has set up a log already, that one stays.
pub(crate) fn to_stderr(level: &str) {
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter(level))
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .try_init();
}

/// The file of the run that was started last: a process has one log, but may have several runs one after the other.
static FILE: Mutex<Option<Arc<File>>> = Mutex::new(None);

struct ToFile;

impl<'a> MakeWriter<'a> for ToFile {
    type Writer = Box<dyn Write + 'a>;

    fn make_writer(&'a self) -> Self::Writer {
        match FILE.lock().clone() {
            Some(file) => Box::new(file),
            None => Box::new(io::sink()),
        }
    }
}

/// Logs to `path`, from now on. If the program has set up a log already, that one stays.
pub(crate) fn to_file(level: &str, path: &Path) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    *FILE.lock() = Some(Arc::new(
        File::options().create(true).append(true).open(path)?,
    ));
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter(level))
        .with_writer(ToFile)
        .with_ansi(false)
        .try_init();
    Ok(())
}
