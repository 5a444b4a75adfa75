//! Configs of tests.

use super::Config;

/// A small run: `keys` at the top, `tables` behind the training environment `e`. What it is refused for: key and message.
pub(super) fn refusal(keys: &str, tables: &str) -> Result<Config, (Option<String>, String)> {
    let toml = format!(
        "output_dir = \"o\"\nmax_steps = 1\n{keys}\n[model]\npath = \"m\"\n[[train.env]]\nid = \"e\"\n{tables}\n"
    );
    let read = Config::from_toml(&toml, "test");
    read.map_err(|error| (error.key().map(str::to_owned), error.to_string()))
}
