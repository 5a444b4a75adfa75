//! Custom advantages: a user's function, called for one group after the other on a separate thread.
//!
//! The program that embeds the orchestrator gives the function (the Python package does); the core waits for its answer
//! with a deadline, so a function that hangs costs groups, and in the end the run, but delays nothing else.

use crate::config::Config;
use primerl_core::Event;
use primerl_core::config::AlgorithmKind;
use primerl_core::effect::AdvantagesRequest;
use primerl_service::config_error::{ConfigError, field};
use primerl_service::inbox::DriverHandle;
use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Finds and calls the functions that `algorithm.path` names.
pub trait CustomAdvantages: Send + Sync {
    /// Finds the function `module:function`, or the installed one of this name; called before the run starts.
    ///
    /// # Errors
    /// Why there is no such function.
    fn load(&self, path: &str) -> Result<(), String>;

    /// The advantages of one group: one value per token for each of the request's samples. May take long.
    ///
    /// # Errors
    /// What went wrong, for people.
    fn compute(
        &self,
        request: &AdvantagesRequest,
        environment: &str,
    ) -> Result<Vec<Vec<f32>>, String>;
}

/// Finds every function that the config names.
pub(crate) fn load(
    config: &Config,
    functions: Option<&dyn CustomAdvantages>,
) -> Result<(), ConfigError> {
    for (path, place) in named(config) {
        let Some(functions) = functions else {
            return Err(field(
                &format!("{place}.type"),
                "`custom` calls a Python function, and this program has no Python",
                "start the run with `primerl` or from a script that imports it",
            ));
        };
        functions.load(path).map_err(|problem| {
            let remedy = "give module:function of a function that Python can import: run from the folder of its module, \
                        install it, or set PYTHONPATH";
            field(&format!("{place}.path"), format!("`{path}`: {problem}"), remedy)
        })?;
    }
    Ok(())
}

/// The paths of the functions, each with a place that names it.
fn named(config: &Config) -> BTreeMap<&str, String> {
    let own = config.train.env.iter().map(|own| match &own.algorithm {
        Some(algorithm) => (format!("train.env.{}.algorithm", own.name()), algorithm),
        None => ("algorithm".to_owned(), &config.algorithm),
    });
    let paths = own.filter_map(|(place, algorithm)| match &algorithm.0.kind {
        AlgorithmKind::Custom { path, .. } => Some((path.as_str(), place)),
        _ => None,
    });
    paths.collect()
}

struct Job {
    request: Arc<AdvantagesRequest>,
    asked: Instant,
}

/// The handle of the thread.
#[derive(Clone, Debug)]
pub(crate) struct AdvantagesThread(mpsc::Sender<Job>);

impl AdvantagesThread {
    /// The thread ends when every `AdvantagesThread` is gone, and no one waits for its end: it may hang in the
    /// function. `environments` are names by environment.
    pub fn start(
        functions: Arc<dyn CustomAdvantages>,
        environments: Vec<String>,
        driver: DriverHandle,
    ) -> std::io::Result<AdvantagesThread> {
        let (jobs, receiver) = mpsc::channel::<Job>();
        let work = move || {
            for Job { request, asked } in receiver {
                if asked.elapsed() >= Duration::from_micros(request.timeout.0) {
                    continue; // The core has given it up.
                }
                let environment = environments
                    .get(request.environment.0 as usize)
                    .map_or("", String::as_str);
                let result = functions.compute(&request, environment);
                let group = request.group;
                driver.send(Event::AdvantagesComputed { group, result });
            }
        };
        std::thread::Builder::new()
            .name("advantages".into())
            .spawn(work)?;
        Ok(AdvantagesThread(jobs))
    }

    pub fn compute(&self, request: Arc<AdvantagesRequest>) {
        let asked = Instant::now();
        // The thread lives as long as the driver does.
        let _ = self.0.send(Job { request, asked });
    }
}
