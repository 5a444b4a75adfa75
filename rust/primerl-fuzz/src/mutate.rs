//! New inputs from seeds: bytes are changed, and JSON is changed as JSON, for random bytes do not get past a parser.

use rand::Rng;
use rand::seq::IndexedRandom;
use serde_json::{Value, json};

const MOST_CHANGES: u32 = 6;
const TEXTS: &[&str] = &[
    "",
    " \n\t",
    "\u{0}",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>",
    "{{ 7 * 7 }}{% raw %}",
    "assistant",
    "system",
    "tool",
    "👩‍👩‍👧e\u{301}\u{200d}\u{feff}",
    "\u{fffd}\u{10ffff}",
    "{\"a\": [1, 2.50, null]}",
    "-0.0",
];
const NUMBERS: &[f64] = &[
    0.0,
    -0.0,
    -1.0,
    1.0,
    2.0,
    0.1,
    1e308,
    5e-324,
    9_007_199_254_740_993.0,
    1e19,
];

/// An input that no seed is.
pub fn mutate(seeds: &[Vec<u8>], rng: &mut impl Rng) -> Vec<u8> {
    let mut input = seeds.choose(rng).cloned().unwrap_or_default();
    for _ in 0..rng.random_range(1..=MOST_CHANGES) {
        input = match rng.random_range(0..4) {
            0 => change_bytes(input, seeds, rng),
            _ => change_json(input, seeds, rng),
        };
    }
    input
}

fn change_bytes(mut input: Vec<u8>, seeds: &[Vec<u8>], rng: &mut impl Rng) -> Vec<u8> {
    let at = rng.random_range(0..=input.len());
    let end = rng.random_range(at..=input.len().min(at + 64));
    match rng.random_range(0..6) {
        0 if at < input.len() => input[at] = rng.random(),
        1 => input.truncate(at),
        2 => drop(input.drain(at..end)),
        3 => {
            let copied = input[at..end].to_vec();
            input.splice(at..at, copied);
        }
        4 => {
            let text = TEXTS.choose(rng).unwrap_or(&"");
            input.splice(at..at, text.bytes());
        }
        _ => {
            let other = seeds.choose(rng).map_or(&[][..], Vec::as_slice);
            let from = rng.random_range(0..=other.len());
            input.truncate(at);
            input.extend_from_slice(&other[from..]);
        }
    }
    input
}

/// Changes one value of one line; an input that is no JSON is changed as bytes.
fn change_json(input: Vec<u8>, seeds: &[Vec<u8>], rng: &mut impl Rng) -> Vec<u8> {
    let mut lines: Vec<&[u8]> = input.split(|byte| *byte == b'\n').collect();
    let line = rng.random_range(0..lines.len());
    let Ok(mut value) = serde_json::from_slice::<Value>(lines[line]) else {
        return change_bytes(input, seeds, rng);
    };
    let paths = paths_of(&value);
    let donor = match rng.random_bool(0.3) {
        true => donated(seeds, rng),
        false => None,
    };
    let new = donor.unwrap_or_else(|| invented(rng));
    if let Some(place) = paths.choose(rng).and_then(|path| value.pointer_mut(path)) {
        change_value(place, new, rng);
    }
    let text = value.to_string();
    lines[line] = text.as_bytes();
    lines.join(&b'\n')
}

fn change_value(place: &mut Value, new: Value, rng: &mut impl Rng) {
    match (place, rng.random_range(0..4)) {
        (Value::Array(items), 0) if !items.is_empty() => {
            items.remove(rng.random_range(0..items.len()));
        }
        (Value::Array(items), 1) if !items.is_empty() => {
            let item = items[rng.random_range(0..items.len())].clone();
            items.insert(rng.random_range(0..=items.len()), item);
        }
        (Value::Array(items), 2) => items.insert(rng.random_range(0..=items.len()), new),
        (Value::Object(fields), 0) if !fields.is_empty() => {
            let name = fields
                .keys()
                .nth(rng.random_range(0..fields.len()))
                .cloned();
            name.and_then(|name| fields.remove(&name));
        }
        (Value::Object(fields), 1) => {
            let names: Vec<String> = fields.keys().cloned().collect();
            let name = names.choose(rng).map_or("extra", String::as_str);
            fields.insert(format!("{name}_"), new);
        }
        (Value::String(text), 0..=1) => {
            let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
            let at = ends.choose(rng).copied().unwrap_or(0);
            text.insert_str(at, TEXTS.choose(rng).unwrap_or(&""));
        }
        (place, 2) => *place = json!([place.take()]),
        (place, _) => *place = new,
    }
}

fn donated(seeds: &[Vec<u8>], rng: &mut impl Rng) -> Option<Value> {
    let seed = seeds.choose(rng)?;
    let line = seed.split(|byte| *byte == b'\n').next()?;
    let value: Value = serde_json::from_slice(line).ok()?;
    let paths = paths_of(&value);
    value.pointer(paths.choose(rng)?).cloned()
}

fn invented(rng: &mut impl Rng) -> Value {
    match rng.random_range(0..8) {
        0 => Value::Null,
        1 => Value::Bool(rng.random()),
        2 => json!(NUMBERS.choose(rng)),
        3 => json!(rng.random::<i64>() >> rng.random_range(0..64)),
        4 => json!(
            TEXTS
                .choose(rng)
                .unwrap_or(&"")
                .repeat(rng.random_range(1..200))
        ),
        5 => (0..rng.random_range(1..100)).fold(json!("deep"), |inner, _| json!([inner])),
        6 => json!({}),
        _ => json!(TEXTS.choose(rng)),
    }
}

/// JSON pointers of every value in it.
fn paths_of(value: &Value) -> Vec<String> {
    let mut paths = vec![String::new()];
    let mut open = vec![(String::new(), value)];
    while let Some((path, value)) = open.pop() {
        let children: Vec<(String, &Value)> = match value {
            Value::Array(items) => {
                let items = items.iter().enumerate();
                items
                    .map(|(at, item)| (format!("{path}/{at}"), item))
                    .collect()
            }
            Value::Object(fields) => {
                let escaped = |name: &str| name.replace('~', "~0").replace('/', "~1");
                let fields = fields.iter();
                fields
                    .map(|(name, item)| (format!("{path}/{}", escaped(name)), item))
                    .collect()
            }
            _ => continue,
        };
        paths.extend(children.iter().map(|(path, _)| path.clone()));
        open.extend(children);
    }
    paths
}
