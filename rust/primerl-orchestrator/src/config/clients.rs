//! Who answers in place of the engines.

use super::{ClientConfig, Config};
use primerl_core::EnvironmentId;
use primerl_core::config::TrainingMode;
use primerl_engines::clients::{Endpoint, Scorer};
use primerl_service::config_error::ConfigError;
use std::sync::Arc;

impl Config {
    /// By environment.
    pub(crate) fn endpoints(&self) -> Result<Vec<Option<Arc<Endpoint>>>, ConfigError> {
        let mut opened: Vec<(&ClientConfig, Arc<Endpoint>)> = Vec::new();
        let teachers = self.teachers().into_iter();
        let training = teachers.map(|taught| {
            let Some(taught) = taught.filter(|taught| taught.mode == TrainingMode::Sft) else {
                return Ok(None);
            };
            // One server, one connection pool, however many environments learn from it.
            if let Some((_, known)) = opened.iter().find(|(client, _)| *client == taught.client) {
                return Ok(Some(Arc::clone(known)));
            }
            let endpoint = Arc::new(Endpoint::open(&taught.place, taught.client)?);
            opened.push((taught.client, Arc::clone(&endpoint)));
            Ok(Some(endpoint))
        });
        let evaluation = self.eval.env.iter().map(|environment| {
            let Some(client) = &environment.client else {
                return Ok(None);
            };
            let name = format!("eval.env.{}.client", environment.name());
            Ok(Some(Arc::new(Endpoint::open(&name, client)?)))
        });
        training.chain(evaluation).collect()
    }

    /// The teachers that score, each with the environments that learn from it.
    pub(crate) fn scoring_teachers(&self) -> Result<Vec<ScoringTeacher>, ConfigError> {
        let mut found: Vec<(&ClientConfig, ScoringTeacher)> = Vec::new();
        for (index, taught) in self.teachers().into_iter().enumerate() {
            let Some(taught) = taught.filter(|taught| taught.mode == TrainingMode::Opd) else {
                continue;
            };
            let environment = EnvironmentId(index as u32);
            let mut known = found.iter_mut();
            if let Some((_, known)) = known.find(|(client, _)| *client == taught.client) {
                known.environments.push(environment);
                continue;
            }
            let scorers = Scorer::open_all(&taught.place, taught.client)?;
            let environments = vec![environment];
            found.push((
                taught.client,
                ScoringTeacher {
                    environments,
                    scorers,
                },
            ));
        }
        Ok(found.into_iter().map(|(_, teacher)| teacher).collect())
    }
}

/// Servers of one teacher, and who learns from it.
pub(crate) struct ScoringTeacher {
    pub environments: Vec<EnvironmentId>,
    pub scorers: Vec<Scorer>,
}
