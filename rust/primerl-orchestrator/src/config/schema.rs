//! Defaults and bounds of all keys, from the one place that has them: `schema.json` is what `primerl config schema --of
//! orchestrator` makes of the classes in `python/primerl/config/schema`, and `make reference` writes it.
//!
//! Types are checked by serde when a completed table is read.

use primerl_service::config_error::{ConfigError, field};
use regex::Regex;
use serde::Deserialize;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::sync::LazyLock;
use toml::{Table, Value};

static ROOT: LazyLock<Node> = LazyLock::new(|| {
    serde_json::from_str(include_str!("schema.json")).expect("a test reads the same text")
});

/// The longest time of any key, seconds.
pub(super) const YEAR_S: f64 = 365.0 * 86_400.0;

/// The part of JSON Schema that the classes need. What is not here is refused: a bound that no one checks.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
struct Node {
    #[serde(rename = "$schema")]
    _language: String,
    #[serde(rename = "title")]
    _title: String,
    #[serde(rename = "description")]
    _description: String,
    #[serde(rename = "$defs")]
    definitions: BTreeMap<String, Node>,
    #[serde(rename = "$ref")]
    reference: Option<String>,
    any_of: Vec<Node>,
    r#type: String,
    #[serde(rename = "enum")]
    choices: Vec<String>,
    /// Of a table whose keys are an environment's or a template's: true.
    #[serde(rename = "additionalProperties")]
    others: bool,
    properties: BTreeMap<String, Node>,
    required: Vec<String>,
    items: Option<Box<Node>>,
    default: Option<Json>,
    minimum: Option<f64>,
    exclusive_minimum: Option<f64>,
    maximum: Option<f64>,
    exclusive_maximum: Option<f64>,
    min_length: Option<usize>,
    max_length: Option<usize>,
    min_items: Option<usize>,
    pattern: Option<String>,
}

/// Inserts the default of each key that is not given, and checks what each key alone has to fulfil.
///
/// # Errors
/// An unknown key, one without a default that is not given, or one out of its bounds, with its place in the table.
pub(super) fn complete(table: &mut Table) -> Result<(), ConfigError> {
    ROOT.complete(table, "")
}

impl Node {
    fn complete(&self, table: &mut Table, place: &str) -> Result<(), ConfigError> {
        let place_of = |name: &str| match place {
            "" => name.to_owned(),
            _ => format!("{place}.{name}"),
        };
        let mut names = table.keys();
        if let Some(name) = names.find(|name| !self.others && !self.properties.contains_key(*name))
        {
            let known: Vec<String> = self
                .properties
                .keys()
                .map(|name| format!("`{name}`"))
                .collect();
            let problem = format!(
                "unknown field `{name}`, expected one of {}",
                known.join(", ")
            );
            return Err(field(
                &place_of(name),
                problem,
                "omit it, or correct its name",
            ));
        }
        for (name, node) in &self.properties {
            let key = place_of(name);
            if let (None, Some(default)) =
                (table.get(name), node.default.as_ref().and_then(as_toml))
            {
                table.insert(name.clone(), default);
            }
            let is_required = self.required.contains(name);
            match table.get_mut(name) {
                Some(value) => node.check(value, &key, is_required)?,
                None if is_required => {
                    let hint = "write it into the file, or make the file with `primerl rl @ FILE --dry-run`";
                    return Err(field(&key, "is missing, and has no default", hint));
                }
                None => {}
            }
        }
        Ok(())
    }

    fn check(&self, value: &mut Value, key: &str, is_required: bool) -> Result<(), ConfigError> {
        let Some(node) = self.of(value) else {
            return Ok(());
        };
        match value {
            Value::Table(table) => return node.complete(table, key),
            Value::Array(values) => {
                for (index, inner) in values.iter_mut().enumerate() {
                    let place = entry_of(key, index, inner);
                    let items = node.items.as_deref();
                    items.map_or(Ok(()), |node| node.check(inner, &place, true))?;
                }
            }
            _ => {}
        }
        if node.holds(value) {
            return Ok(());
        }
        let problem = match value {
            Value::Integer(number) => format!("is {number}"),
            Value::Float(number) => format!("is {number}"),
            Value::Array(values) => format!("has {} entries", values.len()),
            // A key may have been written in its place.
            _ => "is not what it may be".to_owned(),
        };
        let omit = if is_required { "" } else { ", or omit it" };
        Err(field(key, problem, format!("give {}{omit}", node.bounds())))
    }

    /// Of several types, that of the value; `None` where there is none, which serde refuses.
    fn of(&self, value: &Value) -> Option<&Node> {
        if let Some(reference) = &self.reference {
            let name = reference.rsplit('/').next().unwrap_or_default();
            return ROOT.definitions.get(name)?.of(value);
        }
        if !self.any_of.is_empty() {
            return self.any_of.iter().find_map(|node| node.of(value));
        }
        let fits = match self.r#type.as_str() {
            "integer" => value.is_integer(),
            "number" => value.is_integer() || value.is_float(),
            "string" => value.is_str(),
            "boolean" => value.is_bool(),
            "array" => value.is_array(),
            "object" => value.is_table(),
            _ => false,
        };
        fits.then_some(self)
    }

    fn holds(&self, value: &Value) -> bool {
        let number = match value {
            Value::Integer(number) => *number as f64,
            Value::Float(number) => *number,
            Value::String(text) => {
                let length = text.chars().count();
                let pattern = self.pattern.as_deref().map(Regex::new);
                let matches =
                    pattern.is_none_or(|found| found.is_ok_and(|found| found.is_match(text)));
                let is_one = self.choices.is_empty() || self.choices.contains(text);
                return is_one
                    && matches
                    && self.min_length.is_none_or(|least| length >= least)
                    && self.max_length.is_none_or(|most| length <= most);
            }
            Value::Array(values) => {
                return self.min_items.is_none_or(|least| values.len() >= least);
            }
            _ => return true,
        };
        number.is_finite()
            && self.minimum.is_none_or(|least| number >= least)
            && self.exclusive_minimum.is_none_or(|least| number > least)
            && self.maximum.is_none_or(|most| number <= most)
            && self.exclusive_maximum.is_none_or(|most| number < most)
    }

    /// What the value may be, in words.
    fn bounds(&self) -> String {
        let mut parts = Vec::new();
        let number = |bound: f64| match bound == YEAR_S {
            true => "a year".to_owned(),
            false => bound.to_string(),
        };
        let above = |bound| format!("more than {}", number(bound));
        let below = |bound| format!("less than {}", number(bound));
        match (self.minimum, self.maximum) {
            (Some(least), Some(most)) => {
                parts.push(format!("{} to {}", number(least), number(most)))
            }
            (least, most) => {
                parts.extend(least.map(|least| format!("at least {}", number(least))));
                parts.extend(self.exclusive_minimum.map(above));
                parts.extend(most.map(|most| format!("at most {}", number(most))));
            }
        }
        parts.extend(self.exclusive_maximum.map(below));
        parts.extend(
            self.min_length
                .map(|least| format!("at least {least} characters")),
        );
        parts.extend(
            self.max_length
                .map(|most| format!("at most {most} characters")),
        );
        parts.extend(self.min_items.map(|least| format!("at least {least}")));
        parts.extend(
            self.pattern
                .as_ref()
                .map(|pattern| format!("text that matches {pattern}")),
        );
        if !self.choices.is_empty() {
            parts.push(format!("one of {}", self.choices.join(", ")));
        }
        match parts.is_empty() {
            true => "a finite number".to_owned(),
            false => parts.join(" and "),
        }
    }
}

/// An environment is called by its name.
fn entry_of(key: &str, index: usize, value: &Value) -> String {
    let name = value.get("name").or_else(|| value.get("id"));
    match name.and_then(Value::as_str) {
        Some(name) => format!("{key}.{name}"),
        None => format!("{key}[{index}]"),
    }
}

/// Without nulls, for which TOML has no word: such keys are not given.
fn as_toml(value: &Json) -> Option<Value> {
    match value {
        Json::Null => None,
        Json::Bool(value) => Some(Value::Boolean(*value)),
        Json::Number(number) => match number.as_i64() {
            Some(number) => Some(Value::Integer(number)),
            None => number.as_f64().map(Value::Float),
        },
        Json::String(text) => Some(Value::String(text.clone())),
        Json::Array(values) => Some(Value::Array(values.iter().filter_map(as_toml).collect())),
        Json::Object(map) => {
            let keys = map.iter();
            let keys = keys.filter_map(|(name, value)| Some((name.clone(), as_toml(value)?)));
            Some(Value::Table(keys.collect()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    fn completed(text: &str) -> Result<Table, String> {
        let mut table: Table = toml::from_str(text).expect("is TOML");
        match complete(&mut table) {
            Ok(()) => Ok(table),
            Err(error) => Err(error.to_string()),
        }
    }

    const SHORT: &str = "output_dir = \"o\"\nmax_steps = 1\n";
    const REST: &str = "[model]\npath = \"m\"\n[[train.env]]\nid = \"e\"\n";

    #[test]
    fn keys_that_are_not_given_have_their_defaults() {
        let table = completed(&format!("{SHORT}batch_size = 4\n{REST}limits.turns = 3\n"));
        let table = table.expect("is complete");
        let number = |key: &str| table[key].as_integer();
        assert_eq!(
            (number("batch_size"), number("group_size")),
            (Some(4), Some(8))
        );
        assert_eq!(table["sampling"]["temperature"].as_float(), Some(1.0));
        let environment = &table["train"]["env"][0];
        assert_eq!(environment["max_retries"].as_integer(), Some(2));
        assert_eq!(environment["limits"]["turns"].as_integer(), Some(3));
        // Unset is no value.
        assert!(table.get("token_batch_size").is_none() && table.get("teacher").is_none());
    }

    #[test]
    fn a_key_out_of_its_bounds_or_missing_is_refused_by_its_place() {
        let client = "[teacher.client]\nmodel = \"m\"\nbase_url = \"u\"\n";
        for (head, tail, said) in [
            (
                "batch_size = 0",
                "",
                "batch_size: is 0; give more than 0 and at most 1000000",
            ),
            (
                "",
                "[timeouts]\nworker_s = 0.5",
                "timeouts.worker_s: is 0.5; give 1 to a year",
            ),
            (
                "probe_tolerance = nan",
                "",
                "probe_tolerance: is NaN; give more than 0, or omit it",
            ),
            (
                "oversampling_factor = inf",
                "",
                "oversampling_factor: is inf; give 1 to 1000",
            ),
            (
                "",
                "ratio = 0.0",
                "train.env.e.ratio: is 0; give more than 0, or omit it",
            ),
            (
                "",
                "[buffer]\nease = 1",
                "buffer.ease: unknown field `ease`, expected one of `easy_",
            ),
            (
                "",
                "[buffer]\nenv_ratios = [1.0, 0.0]",
                "buffer.env_ratios[1]: is 0; give more than 0",
            ),
            (
                "",
                "name = \"a/b\"",
                "train.env.a/b.name: is not what it may be; give",
            ),
            (
                "",
                "[log]\nlevel = \"loud\"",
                "log.level: is not what it may be; give one of trace, debug, info, warn, error",
            ),
            (
                "",
                "training_mode = \"rll\"",
                "train.env.e.training_mode: is not what it may be; give one of rl, opd, sft, opsd, or omit it",
            ),
            (
                "",
                &format!("{client}api_key_env = \"sk-1\""),
                "teacher.client.api_key_env: is not",
            ),
        ] {
            let refused = completed(&format!("{SHORT}{head}\n{REST}{tail}\n")).expect_err(said);
            assert!(
                refused.contains(said) && !refused.contains("sk-1"),
                "{refused}"
            );
        }
        let refused = completed("max_steps = 1\n[model]\npath = \"m\"").expect_err("is incomplete");
        assert!(refused.starts_with("output_dir: is missing"), "{refused}");
    }

    /// The schema's nodes that hold one value, each with its place.
    fn leaves(node: &'static Node, place: &str, found: &mut Vec<(String, &'static Node)>) {
        let inner = node
            .reference
            .as_ref()
            .and_then(|name| name.rsplit('/').next());
        if let Some(name) = inner {
            leaves(&ROOT.definitions[name], place, found);
        }
        for node in node.any_of.iter().chain(node.items.as_deref()) {
            leaves(node, place, found);
        }
        for (name, node) in &node.properties {
            leaves(node, &format!("{place}.{name}"), found);
        }
        if matches!(node.r#type.as_str(), "integer" | "number") {
            found.push((place.to_owned(), node));
        }
    }

    #[test]
    fn each_bound_of_a_number_is_kept() {
        let mut found = Vec::new();
        leaves(&ROOT, "", &mut found);
        let mut checked = 0;
        for (place, node) in found {
            let is_refused = |number: f64| {
                let mut value = match node.r#type.as_str() {
                    "integer" => Value::Integer(number as i64),
                    _ => Value::Float(number),
                };
                node.check(&mut value, &place, true).is_err()
            };
            let mut bounds = Vec::new();
            bounds.extend(node.minimum.map(|least| (least, least - 1.0)));
            bounds.extend(node.exclusive_minimum.map(|least| (least + 0.5, least)));
            bounds.extend(node.maximum.map(|most| (most, most + 1.0)));
            bounds.extend(node.exclusive_maximum.map(|most| (most - 0.5, most)));
            for (within, beyond) in bounds {
                // Above 2^53 not every number is one of floating point.
                if beyond.abs() < 2_f64.powi(53) && node.r#type == "number" {
                    assert!(!is_refused(within), "{place} = {within}");
                }
                if beyond.abs() < 2_f64.powi(53) {
                    assert!(is_refused(beyond), "{place} = {beyond}");
                    checked += 1;
                }
            }
        }
        assert!(checked > 90, "{checked}");
    }

    /// A value of each key, also of those that are unset by default.
    fn sample(node: &Node) -> Value {
        if let Some(name) = &node.reference {
            return sample(&ROOT.definitions[name.rsplit('/').next().unwrap_or_default()]);
        }
        if let Some(node) = node.any_of.first() {
            return sample(node);
        }
        if let Some(choice) = node.choices.last() {
            return Value::String(choice.clone());
        }
        match node.r#type.as_str() {
            "integer" => Value::Integer(1),
            "number" => Value::Float(0.5),
            "string" => Value::String("a".to_owned()),
            "boolean" => Value::Boolean(true),
            "array" => Value::Array(node.items.iter().map(|node| sample(node)).collect()),
            _ => {
                let keys = node.properties.iter();
                Value::Table(
                    keys.map(|(name, node)| (name.clone(), sample(node)))
                        .collect(),
                )
            }
        }
    }

    #[test]
    fn each_key_of_the_classes_is_read() {
        let config: Config = sample(&ROOT).try_into().expect("every key is known");
        assert_eq!(config.train.env[0].rollout_s, Some(0.5));
        assert_eq!(config.eval.env[0].measured.num_examples, Some(1));
    }

    /// Serde ignores what it does not know of a table that is flattened into another one.
    #[test]
    fn flattened_tables_have_every_key() {
        use primerl_core::config::{Buffer, Evaluation};
        let evaluation = Evaluation {
            num_examples: Some(1),
            rollouts_per_example: 1,
            interval: Some(1),
            base_model: true,
            pass_threshold: 0.5,
        };
        let own = "id name validates sampling client rollout_s limits worker";
        for (name, core, own) in [
            ("Buffer", serde_json::json!(Buffer::off()), "env_ratios"),
            ("ServedEvaluationSource", serde_json::json!(evaluation), own),
        ] {
            let core = core.as_object().expect("is a table");
            let mut known: Vec<&str> = core.keys().map(String::as_str).collect();
            known.extend(own.split(' '));
            known.sort_unstable();
            let given: Vec<&String> = ROOT.definitions[name].properties.keys().collect();
            assert_eq!(given, known, "{name}");
        }
    }
}
