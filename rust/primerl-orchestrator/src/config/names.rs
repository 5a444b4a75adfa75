//! How environments are called: in metrics, logs and files, and by the workers that join.

use super::{Config, ConfigError, EvalEnvironment, TrainEnvironment, field, schema};

/// What the means over all environments, and over all batches of an age, are called in metrics.
const ALL: &str = "all";
const BY_AGE: &str = "staleness_";

/// `owner/name@version` is `name`.
fn label(id: &str) -> &str {
    let name = id.rsplit('/').next().unwrap_or(id);
    name.split('@').next().unwrap_or(name)
}

impl TrainEnvironment {
    pub fn name(&self) -> String {
        let of_id = || label(&self.id).to_owned();
        self.name.clone().unwrap_or_else(of_id)
    }

    pub(super) fn key(&self) -> String {
        format!("train.env.{}", self.name())
    }
}

impl EvalEnvironment {
    pub fn name(&self) -> String {
        let of_id = || format!("{}-eval", label(&self.id));
        self.name.clone().unwrap_or_else(of_id)
    }

    pub(super) fn key(&self) -> String {
        format!("eval.env.{}", self.name())
    }
}

impl Config {
    /// That they are distinct, the core says.
    pub(super) fn validate_names(&self) -> Result<(), ConfigError> {
        let training = self.train.env.iter().map(|own| (own.name(), own.key()));
        let evaluation = self.eval.env.iter().map(|own| (own.name(), own.key()));
        for (name, key) in training.chain(evaluation) {
            validate_name(&name, &key)?;
        }
        Ok(())
    }
}

fn validate_name(name: &str, key: &str) -> Result<(), ConfigError> {
    if !schema::is_name(name) {
        return Err(field(
            &format!("{key}.id"),
            format!("makes {name:?}, which cannot name metrics and files"),
            "set name to letters, digits, '.', '_' and '-'",
        ));
    }
    if name == ALL || name.starts_with(BY_AGE) {
        return Err(field(
            key,
            format!("is called {name:?}, which is a name of metrics"),
            "give it another name",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::testing::refusal;

    fn named(environment: &str) -> Result<Config, (Option<String>, String)> {
        refusal("", environment)
    }

    #[test]
    fn a_name_follows_from_the_id() {
        let config = named("[[train.env]]\nid = \"owner/a@1.0\"\n[[eval.env]]\nid = \"owner/a\"\n");
        let config = config.expect("is a config");
        assert_eq!(config.train.env[1].name(), "a");
        assert_eq!(config.eval.env[0].name(), "a-eval");
    }

    #[test]
    fn a_name_that_others_cannot_use_is_refused() {
        for (environment, key, said) in [
            (
                "[[train.env]]\nid = \"a b\"",
                "train.env.a b.id",
                "set name",
            ),
            (
                "[[eval.env]]\nid = \"owner/\"",
                "eval.env.-eval.id",
                "set name",
            ),
            (
                "[[train.env]]\nid = \"all\"",
                "train.env.all",
                "another name",
            ),
            (
                "[[eval.env]]\nid = \"a\"\nname = \"staleness_1\"",
                "eval.env.staleness_1",
                "a name of metrics",
            ),
            ("[[train.env]]\nid = \"o/e\"", "train.env.e", "2 times"),
            (
                "[[eval.env]]\nid = \"a\"\nname = \"e\"",
                "eval.env.e",
                "2 times",
            ),
        ] {
            let (found, message) = named(environment).expect_err(environment);
            assert_eq!(found.as_deref(), Some(key), "{message}");
            assert!(message.contains(said), "{message}");
        }
    }
}
