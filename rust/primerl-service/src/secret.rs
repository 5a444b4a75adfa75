//! Keys that must not appear in logs, traces and errors.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A key. It is serialised as plain text; `Debug` only shows that there is one, and it has no `Display`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: impl Into<String>) -> Secret {
        Secret(text.into())
    }

    /// The key itself, for the header that carries it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Secret(***)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_not_seen_but_crosses_the_wire() {
        let secret = Secret::new("abc");
        assert_eq!(format!("{secret:?}"), "Secret(***)");
        assert_eq!(serde_json::json!({"key": secret})["key"], "abc");
    }
}
