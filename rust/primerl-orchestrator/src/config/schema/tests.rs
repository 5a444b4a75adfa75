//! Keys that are completed, bounds that are kept, and that no key is ignored.

mod fields;

use super::*;
use crate::config::Config;

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
            "batch_size = \"8\"",
            "",
            "batch_size: is text, an invalid type; give a whole number",
        ),
        (
            "token_batch_size = 1.5\nengines = [1]",
            "",
            "engines[0]: is a whole number, an invalid type; give text",
        ),
        (
            "token_batch_size = 1.5",
            "",
            "token_batch_size: is a number, an invalid type; give a whole number, or omit it",
        ),
        (
            "",
            "teacher = 1979-05-27",
            "train.env.e.teacher: is a date, an invalid type; give a table, or omit it",
        ),
        (
            "",
            "[parsers]\ntool = 1",
            "parsers.tool: is a whole number, an invalid type; give text or a table, or omit it",
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

/// Each value of a table with what no type of a key takes in its place.
fn spoilt(table: &Table, place: &str, found: &mut Vec<(String, Table)>) {
    for (name, value) in table {
        let key = format!("{place}.{name}");
        let with = |value: Value| {
            let mut table = table.clone();
            table.insert(name.clone(), value);
            table
        };
        let mut inner = Vec::new();
        let is_list = match value {
            Value::Table(table) => {
                spoilt(table, &key, &mut inner);
                false
            }
            Value::Array(values) => {
                if let Some(Value::Table(table)) = values.first() {
                    spoilt(table, &key, &mut inner);
                }
                true
            }
            _ => false,
        };
        for (key, table) in inner {
            let value = Value::Table(table);
            let value = if is_list {
                Value::Array(vec![value])
            } else {
                value
            };
            found.push((key, with(value)));
        }
        let other = match value {
            Value::Table(_) | Value::Array(_) => Value::Boolean(true),
            _ => Value::Array(vec![Value::Array(Vec::new())]),
        };
        found.push((key, with(other)));
    }
}

/// Serde ignores what it does not know in a table that holds a flattened one, and what it ignores may be anything.
#[test]
fn no_key_of_the_classes_is_ignored() {
    let whole = sample(&ROOT);
    let mut found = Vec::new();
    spoilt(whole.as_table().expect("is a table"), "", &mut found);
    assert!(found.len() > 150, "{}", found.len());
    // An algorithm reads the parameters of its own type alone, and a worker's settings are handed on as they are.
    let is_of_others = |key: &str| {
        key.contains(".env.worker.")
            || key.ends_with(".algorithm.decay")
            || key.ends_with(".algorithm.episode_agents")
    };
    for (key, table) in found {
        let read: Result<Config, _> = Value::Table(table).try_into();
        assert_eq!(read.is_ok(), is_of_others(&key), "{key}");
    }
}
