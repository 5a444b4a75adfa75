//! `training_mode` and `[teacher]`: whom the policy learns from.

use super::{ClientConfig, ClientType, Config, ConfigError, field};
use primerl_core::config::TrainingMode;
use serde::Deserialize;

/// What the policy learns from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainingModeType {
    /// Rewards.
    #[default]
    Rl,
    /// On-policy distillation: a teacher's log-probabilities of what the policy sampled.
    Opd,
    /// A teacher's answers in place of the policy's.
    Sft,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TeacherConfig {
    pub client: ClientConfig,
}

impl From<TrainingModeType> for TrainingMode {
    fn from(mode: TrainingModeType) -> Self {
        match mode {
            TrainingModeType::Rl => TrainingMode::Rl,
            TrainingModeType::Opd => TrainingMode::Opd,
            TrainingModeType::Sft => TrainingMode::Sft,
        }
    }
}

impl Config {
    /// The teacher that scores what the policy samples.
    pub fn scoring_teacher(&self) -> Option<&ClientConfig> {
        let teacher = self.teacher.as_ref()?;
        (self.training_mode == TrainingModeType::Opd).then_some(&teacher.client)
    }

    /// The teacher that answers in the policy's place.
    pub fn answering_teacher(&self) -> Option<&ClientConfig> {
        let teacher = self.teacher.as_ref()?;
        (self.training_mode == TrainingModeType::Sft).then_some(&teacher.client)
    }

    /// Longest time that a group waits for its scores. A request that hangs is given up, and counts as an outage, before
    /// that: an outage ends the run, and loses nothing.
    pub(super) fn teacher_patience_s(&self) -> f64 {
        let answer = self
            .teacher
            .as_ref()
            .map_or(300.0, |teacher| teacher.client.timeout_s);
        2.0 * answer + self.timeouts.no_engine_s
    }

    pub(super) fn validate_teacher(&self) -> Result<(), ConfigError> {
        let (mode, wanted) = match (self.training_mode, &self.teacher) {
            (TrainingModeType::Rl, None) => return Ok(()),
            (TrainingModeType::Rl, Some(_)) => {
                return Err(field(
                    "teacher",
                    "is given, and training_mode = \"rl\" learns from rewards",
                    "leave it out, or set training_mode to opd or sft",
                ));
            }
            (TrainingModeType::Opd, _) => ("opd", ClientType::Renderer),
            (TrainingModeType::Sft, _) => ("sft", ClientType::OpenaiChatCompletions),
        };
        let Some(teacher) = &self.teacher else {
            return Err(field(
                "teacher",
                format!("is missing, and training_mode = \"{mode}\" learns from one"),
                "give [teacher.client] with base_url and model",
            ));
        };
        teacher.client.validate("teacher.client", wanted)
    }
}
