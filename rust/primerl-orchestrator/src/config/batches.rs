//! What a step is full with.

use super::{Config, ConfigError, field, schema};
use serde_json::json;

impl Config {
    /// Keys that count rollouts say nothing of a step of tokens.
    pub(super) fn validate_token_batches(&self) -> Result<(), ConfigError> {
        if self.run.token_batch_size.is_none() {
            return Ok(());
        }
        let counted = [
            ("batch_size", json!(self.run.batch_size)),
            ("oversampling_factor", json!(self.run.oversampling_factor)),
        ];
        let mut given = counted
            .into_iter()
            .filter(|(key, value)| schema::is_given("", key, value.clone()));
        match given.next() {
            None => Ok(()),
            Some((key, _)) => Err(field(
                key,
                "counts rollouts, and token_batch_size makes a step of so many tokens",
                "omit one of them",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::testing::refusal;

    #[test]
    fn a_step_of_tokens_has_no_number_of_rollouts() {
        for (keys, key) in [
            ("batch_size = 64", "batch_size"),
            ("oversampling_factor = 2", "oversampling_factor"),
        ] {
            let toml = format!("token_batch_size = 4096\n{keys}");
            let (found, message) = refusal(&toml, "").expect_err(keys);
            assert_eq!(found.as_deref(), Some(key), "{message}");
        }
        // As a file has them whose defaults were written.
        let defaults = "token_batch_size = 4096\nbatch_size = 128\noversampling_factor = 1";
        refusal(defaults, "").expect("is a config");
    }
}
