//! Errors in the configuration: each names the field and how to fix it.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    #[error("cannot read {path}: {source}; give the path of a TOML file")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{origin}: {message}")]
    Parse { origin: String, message: String },
    /// What is wrong with one key of a file that may not have been made by hand.
    #[error("{origin}: {error}")]
    Located {
        origin: String,
        error: Box<ConfigError>,
    },
    #[error("{field}: {problem}; {hint}")]
    Field {
        field: String,
        problem: String,
        hint: String,
    },
    #[error(transparent)]
    Core(#[from] primerl_core::config::ConfigError),
    #[error("model.path: {0}")]
    Model(String),
}

impl ConfigError {
    /// The key to change first, where it is about one.
    pub fn key(&self) -> Option<&str> {
        match self {
            ConfigError::Read { .. } | ConfigError::Parse { .. } => None,
            ConfigError::Located { error, .. } => error.key(),
            ConfigError::Field { field, .. } => Some(field),
            ConfigError::Core(error) => Some(error.key()),
            ConfigError::Model(_) => Some("model.path"),
        }
    }
}

pub fn field(name: &str, problem: impl Into<String>, hint: impl Into<String>) -> ConfigError {
    ConfigError::Field {
        field: name.into(),
        problem: problem.into(),
        hint: hint.into(),
    }
}
