//! `[algorithm]`, and an environment's own one.

use super::{ClientType, Config, ConfigError, TrainEnvironment, field};
use primerl_core::config::{Algorithm, AlgorithmKind, Echo, LengthNormalization, LengthPenalty};
use primerl_core::time::Duration;
use primerl_core::turn::MessageRole;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// How rewards become advantages: as core has it, where a type's parameters are the type's own.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "Keys")]
pub struct AlgorithmConfig(pub Algorithm);

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
        if name != "custom" && keys.path.is_some() {
            return Err("path is read for type = \"custom\" only; omit it, or set the type".into());
        }
        let mut parameters = keys.parameters;
        parameters.insert("path".into(), keys.path.unwrap_or_default().into());
        let timeout = Duration::from_secs_f64(keys.timeout_s);
        parameters.insert("timeout".into(), json!(timeout));
        // Core reads a kind without parameters from its name, and one with some from a table of that name.
        let kind = AlgorithmKind::deserialize(json!(name))
            .or_else(|_| AlgorithmKind::deserialize(json!({&name: parameters})))
            .map_err(|error| format!("type: {error}"))?;
        let length_normalization = keys.length_normalization;
        Ok(AlgorithmConfig(Algorithm {
            length_normalization: length_normalization
                .unwrap_or_else(|| kind.usual_length_normalization()),
            kind,
            normalize_std: keys.normalize_std,
            shuffle_advantages: keys.shuffle_advantages,
            length_penalty: keys.length_penalty,
            echo: keys.echo,
        }))
    }
}

impl AlgorithmConfig {
    /// Whose messages are learnt.
    pub(super) fn observes(&self) -> Vec<MessageRole> {
        let echo = self.0.echo;
        let is_learnt = |role: &MessageRole| echo.is_some_and(|echo| echo.weight(*role) > 0.0);
        MessageRole::ALL.into_iter().filter(is_learnt).collect()
    }
}

impl Config {
    pub(super) fn algorithm_of<'a>(&'a self, own: &'a TrainEnvironment) -> &'a AlgorithmConfig {
        own.algorithm.as_ref().unwrap_or(&self.algorithm)
    }

    pub(super) fn validate_algorithms(&self) -> Result<(), ConfigError> {
        for environment in &self.train.env {
            let echoes = self.algorithm_of(environment).0.echo.is_some();
            if echoes && self.client_type != ClientType::Renderer {
                return Err(field(
                    "algorithm.echo",
                    "is set, and engines that render messages do not say which tokens are whose",
                    "leave out client_type, or echo",
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_type_of_the_classes_is_a_kind_of_the_core() {
        let schema: serde_json::Value =
            serde_json::from_str(include_str!("schema.json")).expect("is JSON");
        let types = &schema["$defs"]["Algorithm"]["properties"]["type"]["enum"];
        let types = types.as_array().expect("is a list");
        assert!(types.len() >= 8);
        for name in types {
            let path = match name.as_str() {
                Some("custom") => "path = \"m:f\"\n",
                _ => "",
            };
            let toml = format!(
                "output_dir = \"o\"\nmax_steps = 1\n[model]\npath = \"m\"\n[[train.env]]\nid = \"e\"\n\
                 [algorithm]\ntype = {name}\nepisode_agents = [\"a\"]\n{path}"
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
        let unused = "output_dir = \"o\"\nmax_steps = 1\n[model]\npath = \"m\"\n[[train.env]]\nid = \"e\"\n\
                      algorithm.path = \"m:f\"";
        let error = Config::from_toml(unused, "test").expect_err("is refused");
        let said = error.to_string();
        assert!(
            said.contains("path is read for type = \"custom\" only"),
            "{said}"
        );
        assert!(said.contains("train.env.algorithm"), "{said}");
    }
}
