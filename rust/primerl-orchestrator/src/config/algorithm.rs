//! `[algorithm]`, and an environment's own one.

use super::{ClientType, Config, ConfigError, TrainEnvironment, field, schema};
use primerl_core::config::{
    Algorithm, AlgorithmKind, AlgorithmProblem, Echo, LengthNormalization, LengthPenalty,
    TrainingMode,
};
use primerl_core::time::Duration;
use primerl_core::turn::MessageRole;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// How rewards become advantages: as core has it, where a type's parameters are the type's own.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "Keys")]
pub struct AlgorithmConfig(pub Algorithm, Option<Unread>);

/// A parameter that is given, and is another type's.
#[derive(Clone, Copy, Debug)]
struct Unread {
    key: &'static str,
    of: &'static str,
}

const PARAMETERS: [Unread; 3] = [
    Unread {
        key: "decay",
        of: "rae",
    },
    Unread {
        key: "episode_agents",
        of: "hierarchical_grpo",
    },
    Unread {
        key: "path",
        of: "custom",
    },
];

/// In the file the parameters of all types stand next to the type.
#[derive(Deserialize)]
struct Keys {
    r#type: String,
    normalize_std: bool,
    /// `None`: the type's own, `constant` for `dr_grpo` and `token` for the others.
    length_normalization: Option<LengthNormalization>,
    shuffle_advantages: bool,
    length_penalty: Option<LengthPenalty>,
    echo: Option<Echo>,
    path: Option<String>,
    timeout_s: f64,
    /// Parameters that core knows by the same name. The keys were compared with the config class before.
    #[serde(flatten)]
    parameters: Map<String, Value>,
}

impl TryFrom<Keys> for AlgorithmConfig {
    type Error = String;

    fn try_from(keys: Keys) -> Result<AlgorithmConfig, String> {
        let name = keys.r#type;
        let mut parameters = keys.parameters;
        parameters.insert("path".into(), json!(keys.path));
        let unread = unread(&name, &parameters);
        parameters.insert("path".into(), keys.path.unwrap_or_default().into());
        let timeout = Duration::from_secs_f64(keys.timeout_s);
        parameters.insert("timeout".into(), json!(timeout));
        // Core reads a kind without parameters from its name, and one with some from a table of that name.
        let kind = AlgorithmKind::deserialize(json!(name))
            .or_else(|_| AlgorithmKind::deserialize(json!({&name: parameters})))
            .map_err(|error| format!("type: {error}"))?;
        let length_normalization = keys.length_normalization;
        let algorithm = Algorithm {
            length_normalization: length_normalization
                .unwrap_or_else(|| kind.usual_length_normalization()),
            kind,
            normalize_std: keys.normalize_std,
            shuffle_advantages: keys.shuffle_advantages,
            length_penalty: keys.length_penalty,
            echo: keys.echo,
        };
        Ok(AlgorithmConfig(algorithm, unread))
    }
}

/// Keys that are not given have their defaults.
fn unread(name: &str, given: &Map<String, Value>) -> Option<Unread> {
    let value = |key: &str| given.get(key).cloned().unwrap_or_default();
    let is_given = |key: &str| schema::is_given("Algorithm", key, value(key));
    let mut others = PARAMETERS.into_iter().filter(|one| one.of != name);
    others.find(|one| is_given(one.key))
}

impl AlgorithmConfig {
    /// Whose messages are learnt.
    pub(super) fn observes(&self) -> Vec<MessageRole> {
        let echo = self.0.echo;
        let is_learnt = |role: &MessageRole| echo.is_some_and(|echo| echo.weight(*role) > 0.0);
        MessageRole::ALL.into_iter().filter(is_learnt).collect()
    }

    /// `place`: what its keys begin with.
    fn validate(&self, place: &str) -> Result<(), ConfigError> {
        if let Some(Unread { key, of }) = self.1 {
            let problem = format!("is read for type = {of:?} only");
            let key = format!("{place}.{key}");
            return Err(field(&key, problem, "omit it, or set the type"));
        }
        match self.0.problem() {
            None => Ok(()),
            Some(AlgorithmProblem {
                key,
                problem,
                remedy,
            }) => Err(field(&format!("{place}.{key}"), problem, remedy)),
        }
    }
}

impl Config {
    pub(super) fn algorithm_of<'a>(&'a self, own: &'a TrainEnvironment) -> &'a AlgorithmConfig {
        own.algorithm.as_ref().unwrap_or(&self.algorithm)
    }

    pub(super) fn validate_algorithms(&self) -> Result<(), ConfigError> {
        self.algorithm.validate("algorithm")?;
        for environment in &self.train.env {
            if let Some(own) = &environment.algorithm {
                own.validate(&format!("{}.algorithm", environment.key()))?;
            }
            self.validate_echo(environment)?;
        }
        Ok(())
    }

    fn validate_echo(&self, environment: &TrainEnvironment) -> Result<(), ConfigError> {
        if self.algorithm_of(environment).0.echo.is_none() {
            return Ok(());
        }
        let key = match environment.algorithm {
            Some(_) => format!("{}.algorithm.echo", environment.key()),
            None => "algorithm.echo".to_owned(),
        };
        if self.client_type != ClientType::Renderer {
            return Err(field(
                &key,
                "needs to know which message each token belongs to, which this client_type does not report",
                "omit one of them",
            ));
        }
        if self.mode_of(environment) == TrainingMode::Sft {
            return Err(field(
                &key,
                "learns what the environment says to the policy, but with training_mode = sft it speaks to a teacher",
                "omit it",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::testing::refusal;

    #[test]
    fn each_type_of_the_classes_is_a_kind_of_the_core() {
        let schema: serde_json::Value =
            serde_json::from_str(include_str!("schema.json")).expect("is JSON");
        let types = &schema["$defs"]["Algorithm"]["properties"]["type"]["enum"];
        let types = types.as_array().expect("is a list");
        assert!(types.len() >= 8);
        for name in types {
            let parameter = match name.as_str() {
                Some("custom") => "path = \"m:f\"\n",
                Some("hierarchical_grpo") => "episode_agents = [\"a\"]\n",
                _ => "",
            };
            let toml = format!(
                "output_dir = \"o\"\nmax_steps = 1\n[model]\npath = \"m\"\n[[train.env]]\nid = \"e\"\n\
                 [algorithm]\ntype = {name}\n{parameter}"
            );
            let config = Config::from_toml(&toml, "test").expect("is a config");
            let kind = serde_json::json!(config.algorithm.0.kind);
            let written = kind.as_str().map(str::to_owned);
            let with_parameters = kind
                .as_object()
                .and_then(|kind| kind.keys().next().cloned());
            let found = written
                .or(with_parameters)
                .map(|name| name.replace("max_rl", "maxrl"));
            assert_eq!(found.as_deref(), name.as_str());
        }
    }

    #[test]
    fn keys_that_do_not_go_together_are_refused_by_their_place() {
        let own = |keys: &str| format!("algorithm.{}", keys.replace('\n', "\nalgorithm."));
        for (keys, key, said) in [
            (
                "path = \"m:f\"",
                "path",
                "is read for type = \"custom\" only; omit it, or set the type",
            ),
            ("decay = 0.5", "decay", "is read for type = \"rae\" only"),
            (
                "episode_agents = [\"a\"]",
                "episode_agents",
                "\"hierarchical_grpo\" only",
            ),
            (
                "type = \"hierarchical_grpo\"",
                "episode_agents",
                "names no seat; name",
            ),
            ("type = \"custom\"", "path", "must be \"module:function\""),
            (
                "type = \"rloo\"\nnormalize_std = true",
                "normalize_std",
                "leave it false",
            ),
            ("echo = { tool = 0 }", "echo", "no weight above 0; give"),
        ] {
            let table = format!("[algorithm]\n{keys}\n");
            let of_run = refusal("", &table).expect_err(keys);
            let of_environment = refusal("", &own(keys)).expect_err(keys);
            for (place, (found, message)) in [("", of_run), ("train.env.e.", of_environment)] {
                assert_eq!(found, Some(format!("{place}algorithm.{key}")), "{message}");
                assert!(message.contains(said), "{message}");
            }
        }
    }

    #[test]
    fn what_an_environment_says_to_a_teacher_is_not_learnt() {
        let teacher = "teacher.client = { base_url = \"http://t/v1\", model = \"m\" }\n";
        let taught = format!("{teacher}training_mode = \"sft\"");
        for (tables, key) in [
            ("algorithm.echo = {}", "train.env.e.algorithm.echo"),
            ("[algorithm]\necho = {}", "algorithm.echo"),
        ] {
            let (found, message) = refusal(&taught, tables).expect_err(key);
            assert_eq!(found.as_deref(), Some(key), "{message}");
        }
    }
}
