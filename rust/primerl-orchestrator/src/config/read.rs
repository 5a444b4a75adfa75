//! From a file or a table to a checked config.

use super::{Config, ConfigError, schema};
use std::path::Path;
use toml::{Table, Value};

impl Config {
    /// Read, parse and check a TOML file.
    pub fn from_file(path: &Path) -> Result<Config, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        Config::from_toml(&text, &path.display().to_string())
    }

    /// `origin` names the text in errors.
    pub fn from_toml(text: &str, origin: &str) -> Result<Config, ConfigError> {
        let table = toml::from_str(text).map_err(|error| parse_error(&error, origin))?;
        read(table, origin, |error| {
            // The file itself has lines, a completed table has none.
            let located = toml::from_str::<Config>(text).err();
            located.filter(|located| located.message() == error.message())
        })
    }

    /// Keys as a TOML file has them; `origin` names them in errors.
    pub fn from_table(table: Table, origin: &str) -> Result<Config, ConfigError> {
        read(table, origin, |_| None)
    }
}

/// `located`: the same error with its place in the text, if there is one.
fn read(
    mut table: Table,
    origin: &str,
    located: impl FnOnce(&toml::de::Error) -> Option<toml::de::Error>,
) -> Result<Config, ConfigError> {
    inherit_sampling(&mut table);
    schema::complete(&mut table).map_err(|error| ConfigError::Located {
        origin: origin.into(),
        error: Box::new(error),
    })?;
    let config: Config = table
        .try_into()
        .map_err(|error| parse_error(&located(&error).unwrap_or(error), origin))?;
    config.validate()?;
    Ok(config)
}

fn parse_error(error: &toml::de::Error, origin: &str) -> ConfigError {
    ConfigError::Parse {
        origin: origin.into(),
        message: error.to_string().trim_end().into(),
    }
}

/// Keys that a training environment's `sampling` does not have are the run's.
fn inherit_sampling(config: &mut Table) {
    let run = config.get("sampling").and_then(Value::as_table);
    let run = run.cloned().unwrap_or_default();
    let environments = config
        .get_mut("train")
        .and_then(|train| train.get_mut("env"));
    let environments = environments.and_then(Value::as_array_mut);
    for environment in environments.into_iter().flatten() {
        let own = environment.get_mut("sampling");
        if let Some(own) = own.and_then(Value::as_table_mut) {
            for (key, value) in &run {
                own.entry(key.clone()).or_insert_with(|| value.clone());
            }
        }
    }
}
