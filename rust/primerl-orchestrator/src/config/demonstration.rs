//! `[demonstration]`, and an environment's own one: what the policy sees to be its own teacher.

use super::{ClientType, Config, ConfigError, TrainEnvironment, field, schema};
use primerl_core::EnvironmentId;
use primerl_core::config::TrainingMode;
use serde::Deserialize;

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

    pub(super) fn validate_demonstrations(&self) -> Result<(), ConfigError> {
        self.demonstration.validate("demonstration")?;
        for environment in &self.train.env {
            self.validate_demonstration_of(environment)?;
        }
        if self.train.env.is_empty() || !self.demonstrations().is_empty() {
            return Ok(());
        }
        match self.demonstration.given() {
            None => Ok(()),
            Some(name) => Err(field(
                &format!("demonstration.{name}"),
                "is read only with training_mode = opsd, which no environment has",
                "omit it, or set training_mode",
            )),
        }
    }

    fn validate_demonstration_of(&self, environment: &TrainEnvironment) -> Result<(), ConfigError> {
        let shows = self.mode_of(environment) == TrainingMode::Opsd;
        if let Some(own) = &environment.demonstration {
            let key = format!("{}.demonstration", environment.key());
            own.validate(&key)?;
            if !shows {
                return Err(field(
                    &key,
                    "is read only with training_mode = opsd, but this environment has another",
                    "omit it, or set training_mode",
                ));
            }
        }
        if shows && self.client_type != ClientType::Renderer {
            return Err(field(
                "client_type",
                "cannot render the message that training_mode = opsd adds to the prompt of the tokens it scores",
                "omit client_type",
            ));
        }
        Ok(())
    }
}

impl DemonstrationConfig {
    fn validate(&self, place: &str) -> Result<(), ConfigError> {
        match self.template.contains(PLACE) {
            true => Ok(()),
            false => Err(field(
                &format!("{place}.template"),
                "has no {demonstration}",
                "add it, or omit the template",
            )),
        }
    }

    /// A key that has another value than where it is not given.
    fn given(&self) -> Option<&'static str> {
        let keys = [("key", &self.key), ("template", &self.template)];
        let is_given = |key: &str, value: &str| schema::is_given("Demonstration", key, value);
        let mut given = keys.into_iter().filter(|(key, value)| is_given(key, value));
        given.next().map(|(key, _)| key)
    }
}

#[cfg(test)]
mod tests {
    use crate::config::testing::refusal;

    #[test]
    fn a_demonstration_is_given_where_it_is_shown() {
        let shown = "training_mode = \"opsd\"\n";
        let rendering = "client_type = \"openai_chat_completions_token\"\n";
        let own = "demonstration = { key = \"answer\" }";
        for (keys, tables, key) in [
            ("", own, "train.env.e.demonstration"),
            ("", "[demonstration]\nkey = \"answer\"", "demonstration.key"),
            (
                "",
                "[demonstration]\ntemplate = \"{demonstration}\"",
                "demonstration.template",
            ),
            (
                "",
                "[demonstration]\ntemplate = \"x\"",
                "demonstration.template",
            ),
            (
                shown,
                "demonstration = { template = \"x\" }",
                "train.env.e.demonstration.template",
            ),
            (&format!("{shown}{rendering}"), "", "client_type"),
            (rendering, "training_mode = \"opsd\"", "client_type"),
        ] {
            let (found, message) = refusal(keys, tables).expect_err(key);
            assert_eq!(found.as_deref(), Some(key), "{message}");
        }
        for (keys, tables) in [
            (shown, own),
            (shown, "[demonstration]\nkey = \"answer\""),
            (
                "",
                "training_mode = \"opsd\"\n[demonstration]\nkey = \"answer\"",
            ),
            ("", "[demonstration]\nkey = \"demonstration\""),
        ] {
            refusal(keys, tables).expect(tables);
        }
    }
}
