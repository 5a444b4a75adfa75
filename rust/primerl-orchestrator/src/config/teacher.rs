//! `training_mode` and `teacher` of the run and of its environments: whom the policy learns from.

use super::{ClientConfig, ClientType, Config, ConfigError, TrainEnvironment, field};
use primerl_core::EnvironmentId;
use primerl_core::config::TrainingMode;
use serde::Deserialize;

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TeacherConfig {
    pub client: ClientConfig,
}

/// What the policy is shown in front of what it sampled, to be its own teacher.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DemonstrationConfig {
    /// Where the environment's examples have it; workers read it.
    pub key: String,
    /// A system message, with the demonstration in place of `{demonstration}`.
    pub template: String,
}

const PLACE: &str = "{demonstration}";

impl DemonstrationConfig {
    /// The system message with this demonstration.
    pub fn message(&self, demonstration: &str) -> String {
        self.template.replace(PLACE, demonstration)
    }
}

/// A teacher that environments learn from.
pub(crate) struct Taught<'a> {
    pub mode: TrainingMode,
    /// What its keys begin with.
    pub place: String,
    pub client: &'a ClientConfig,
}

impl Config {
    fn demonstration_of<'a>(&'a self, own: &'a TrainEnvironment) -> &'a DemonstrationConfig {
        own.demonstration.as_ref().unwrap_or(&self.demonstration)
    }

    /// What workers of the environment report of its examples.
    pub(crate) fn demonstration_key(&self, environment: EnvironmentId) -> Option<String> {
        let mut shown = self.demonstrations().into_iter();
        shown.find_map(|(id, shown)| (id == environment).then_some(shown.key))
    }

    /// What the policy sees in each environment in which it is its own teacher.
    pub(crate) fn demonstrations(&self) -> Vec<(EnvironmentId, DemonstrationConfig)> {
        let environments = self.train.env.iter().enumerate();
        let own = environments
            .filter(|(_, environment)| self.mode_of(environment) == TrainingMode::Opsd)
            .map(|(index, environment)| {
                let shown = self.demonstration_of(environment).clone();
                (EnvironmentId(index as u32), shown)
            });
        own.collect()
    }

    fn mode_of(&self, environment: &TrainEnvironment) -> TrainingMode {
        environment
            .own
            .training_mode
            .unwrap_or(self.run.training_mode)
    }

    /// By training environment; `None` where no teacher is asked.
    pub(crate) fn teachers(&self) -> Vec<Option<Taught<'_>>> {
        let of = |environment| {
            let mode = self.mode_of(environment);
            let taught = |place, client| Taught {
                mode,
                place,
                client,
            };
            match (mode, &environment.teacher, &self.teacher) {
                (TrainingMode::Rl | TrainingMode::Opsd, ..) | (_, None, None) => None,
                (_, Some(own), _) => {
                    let place = format!("train.env.{}.teacher.client", environment.name());
                    Some(taught(place, &own.client))
                }
                (_, None, Some(run)) => Some(taught("teacher.client".to_owned(), &run.client)),
            }
        };
        self.train.env.iter().map(of).collect()
    }

    /// Longest time that a group waits for its scores. A request that hangs is given up, and counts as an outage, before
    /// that: an outage ends the run, and loses nothing.
    pub(super) fn teacher_patience_s(&self) -> f64 {
        let answers = self.teachers().into_iter().flatten();
        let longest = answers
            .map(|taught| taught.client.timeout_s)
            .reduce(f64::max);
        // Without a teacher, the run's own engines may score.
        2.0 * longest.unwrap_or(self.timeouts.engine_request_s) + self.timeouts.no_engine_s
    }

    pub(super) fn validate_teacher(&self) -> Result<(), ConfigError> {
        let teachers = self.teachers();
        for (environment, taught) in self.train.env.iter().zip(&teachers) {
            let mode = self.mode_of(environment);
            refuse_unused_teacher(environment, mode)?;
            match mode {
                TrainingMode::Rl => {}
                TrainingMode::Opsd => self.validate_demonstration(environment)?,
                TrainingMode::Opd | TrainingMode::Sft => {
                    validate_taught(environment, mode, taught.as_ref())?;
                }
            }
        }
        let mut taught = teachers.iter().flatten();
        let may_be = self.train.env.is_empty() && !self.run.training_mode.is_rl();
        if self.teacher.is_some()
            && !may_be
            && !taught.any(|taught| taught.place == "teacher.client")
        {
            return Err(field(
                "teacher",
                "is given, and no environment learns from it",
                "leave it out, or set training_mode to opd or sft",
            ));
        }
        Ok(())
    }
    fn validate_demonstration(&self, environment: &TrainEnvironment) -> Result<(), ConfigError> {
        match self.demonstration_of(environment).template.contains(PLACE) {
            true => Ok(()),
            false => Err(field(
                &key_of(environment, "demonstration"),
                "has a template without {demonstration}",
                "add it, or omit the template",
            )),
        }
    }
}

fn key_of(environment: &TrainEnvironment, key: &str) -> String {
    format!("train.env.{}.{key}", environment.name())
}

fn refuse_unused_teacher(
    environment: &TrainEnvironment,
    mode: TrainingMode,
) -> Result<(), ConfigError> {
    let learns_from_none = matches!(mode, TrainingMode::Rl | TrainingMode::Opsd);
    if learns_from_none && environment.teacher.is_some() {
        return Err(field(
            &key_of(environment, "teacher"),
            format!("is given, and training_mode = {mode:?} learns from none"),
            "leave it out, or set training_mode to opd or sft",
        ));
    }
    Ok(())
}

/// Of an environment that learns from a teacher.
fn validate_taught(
    environment: &TrainEnvironment,
    mode: TrainingMode,
    taught: Option<&Taught<'_>>,
) -> Result<(), ConfigError> {
    let Some(taught) = taught else {
        return Err(field(
            &key_of(environment, "training_mode"),
            format!("is {mode:?}, which learns from a teacher, and there is none"),
            "give [teacher.client] with base_url and model, to the run or to the environment",
        ));
    };
    let wanted = match mode {
        TrainingMode::Sft => ClientType::OpenaiChatCompletions,
        _ => ClientType::Renderer,
    };
    taught.client.validate(&taught.place, wanted)
}
