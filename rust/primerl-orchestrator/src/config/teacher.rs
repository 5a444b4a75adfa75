//! `training_mode` and `teacher` of the run and of its environments: whom the policy learns from.

use super::{ClientConfig, ClientType, Config, ConfigError, TrainEnvironment, field};
use primerl_core::config::TrainingMode;
use serde::Deserialize;

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TeacherConfig {
    pub client: ClientConfig,
}

/// A teacher that environments learn from.
pub(crate) struct Taught<'a> {
    pub mode: TrainingMode,
    /// What its keys begin with.
    pub place: String,
    pub client: &'a ClientConfig,
}

impl Config {
    pub(super) fn mode_of(&self, environment: &TrainEnvironment) -> TrainingMode {
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
                    let place = format!("{}.teacher.client", environment.key());
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
                TrainingMode::Rl | TrainingMode::Opsd => {}
                TrainingMode::Opd | TrainingMode::Sft => {
                    validate_taught(environment, mode, taught.as_ref())?;
                }
            }
        }
        let mut taught = teachers.iter().flatten();
        let has_teacher = matches!(
            self.run.training_mode,
            TrainingMode::Opd | TrainingMode::Sft
        );
        let may_be = self.train.env.is_empty() && has_teacher;
        if self.teacher.is_some()
            && !may_be
            && !taught.any(|taught| taught.place == "teacher.client")
        {
            return Err(field(
                "teacher",
                "is given, and no environment learns from it",
                "omit it, or set training_mode to opd or sft",
            ));
        }
        Ok(())
    }
}

fn refuse_unused_teacher(
    environment: &TrainEnvironment,
    mode: TrainingMode,
) -> Result<(), ConfigError> {
    let learns_from_none = matches!(mode, TrainingMode::Rl | TrainingMode::Opsd);
    if learns_from_none && environment.teacher.is_some() {
        return Err(field(
            &format!("{}.teacher", environment.key()),
            format!("is given, and training_mode = {mode:?} learns from none"),
            "omit it, or set training_mode to opd or sft",
        ));
    }
    Ok(())
}

/// Checks an environment that learns from a teacher.
fn validate_taught(
    environment: &TrainEnvironment,
    mode: TrainingMode,
    taught: Option<&Taught<'_>>,
) -> Result<(), ConfigError> {
    let Some(taught) = taught else {
        let key = match environment.own.training_mode {
            Some(_) => format!("{}.training_mode", environment.key()),
            None => "training_mode".to_owned(),
        };
        return Err(field(
            &key,
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
