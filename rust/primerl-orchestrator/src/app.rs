//! State that the endpoints share. It is complete before the first request; every field is immutable or has its own
//! lock.

use crate::config::Config;
use crate::envs::joining::FirstWorkers;
use crate::envs::refusals::Refusals;
use crate::envs::workers::Workers;
use crate::failure::Failures;
use crate::page::Page;
use crate::telemetry::Telemetry;
use crate::trainer::holder::Holder;
use primerl_core::event::Outcome;
use primerl_core::failure::RolloutError;
use primerl_core::{Event, RolloutId, WorkerId};
use primerl_engines::Engines;
use primerl_gateway::{RunEnd, Sampling, Service};
use primerl_service::http::{ApiError, Bodies, ReadsBodies};
use primerl_service::inbox::DriverHandle;
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use tokio::sync::watch;

pub struct App {
    pub config: Config,
    pub core_config: primerl_core::Config,
    /// Indexed by environment.
    pub samplings: Vec<Sampling>,
    /// Address for peers that do not say how they reached us.
    pub url: String,
    pub driver: DriverHandle,
    pub gateway: Arc<Service>,
    pub engines: Arc<Engines>,
    pub workers: Arc<Workers>,
    pub refusals: Refusals,
    pub telemetry: Arc<Telemetry>,
    pub failures: Failures,
    /// Which trainer has the run.
    pub holder: Holder,
    /// The first worker of each environment, with which the others are compared.
    pub first_workers: Arc<FirstWorkers>,
    /// The reason, once the run is over and recorded.
    pub finished: watch::Receiver<Option<String>>,
    pub origin: Instant,
    /// The page for people.
    pub page: Arc<Page>,
    /// The final status, for requests after the driver has ended. Written once.
    pub last_status: OnceLock<serde_json::Value>,
}

/// The parts that were created before.
pub(crate) struct Parts {
    pub gateway: Arc<Service>,
    pub failures: Failures,
    pub page: Arc<Page>,
    pub holder: Holder,
}

impl ReadsBodies for App {
    fn bodies(&self) -> &Bodies {
        &self.gateway.bodies
    }
}

impl App {
    pub(crate) fn new(
        config: Config,
        core_config: primerl_core::Config,
        url: String,
        parts: Parts,
        finished: watch::Receiver<Option<String>>,
    ) -> App {
        let Parts {
            gateway,
            failures,
            page,
            holder,
        } = parts;
        let telemetry = Telemetry::new(Arc::clone(&gateway.metrics), gateway.waits.clone());
        App {
            samplings: config.samplings(),
            driver: gateway.driver.clone(),
            engines: Arc::clone(&gateway.engines),
            gateway,
            core_config,
            url,
            workers: Arc::default(),
            refusals: Refusals::default(),
            telemetry: Arc::new(telemetry),
            failures,
            holder,
            first_workers: Arc::default(),
            finished,
            page,
            origin: Instant::now(),
            last_status: OnceLock::new(),
            config,
        }
    }

    /// Names by environment id.
    pub fn environment_names(&self) -> Vec<String> {
        self.core_config
            .environments
            .iter()
            .map(|environment| environment.name.clone())
            .collect()
    }

    /// The answer to callers once the driver is gone.
    pub fn over(&self) -> ApiError {
        self.failures.over()
    }

    /// The worker never got these leases, or lost them: unreported, they would block their groups until the rollout's
    /// deadline.
    pub fn lease_lost(&self, worker: WorkerId, rollouts: &[RolloutId]) {
        report_lost_leases(&self.driver, worker, rollouts);
    }
}

pub(crate) fn report_lost_leases(driver: &DriverHandle, worker: WorkerId, rollouts: &[RolloutId]) {
    for &rollout in rollouts {
        let error = RolloutError {
            kind: "worker_lost".into(),
            message: "the worker does not know of this lease".into(),
            ..RolloutError::default()
        };
        let outcome = Outcome {
            ok: false,
            traces: Vec::new(),
            error: Some(error),
            refusal: None,
        };
        driver.send(Event::RolloutFinished {
            rollout,
            worker,
            outcome,
        });
    }
}
