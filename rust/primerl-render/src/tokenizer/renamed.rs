//! The model's tokenizer with other names for its control tokens: in a text that holds their own, those are no tokens.

use super::Backend;
use super::stable::Stable;
use crate::error::RenderError;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::path::Path;

/// Begins and ends a new name; of a private-use area, which no normalizer changes.
pub(crate) const RENAMED: char = '\u{f8f0}';

/// New names of tokens, by their texts.
type Names = HashMap<String, String>;

/// The reference library with renamed tokens: the ids, flags and everything else are those of `tokenizer.json`.
pub(crate) struct Renamed {
    backend: Stable,
    names: Names,
    ids: Vec<u32>,
}

impl Renamed {
    /// `tokens`: ids and texts. Errors say why this tokenizer cannot be used so.
    pub fn load(path: &Path, tokens: &[(u32, String)]) -> Result<Self, String> {
        let json = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
        let mut file: Value = serde_json::from_str(&json).map_err(|error| error.to_string())?;
        if let Some(token) = found_in_changed_text(&file, tokens) {
            return Err(format!(
                "token {token:?} is looked for in text that was normalized (\"normalized\": true in tokenizer.json), so other \
                 text may become it"
            ));
        }
        let names = tokens.iter();
        let names: Names = names
            .map(|(id, text)| (text.clone(), new_name(*id)))
            .collect();
        rename(&mut file, &names);
        let backend = Stable::load(&file.to_string())?;
        for (id, text) in tokens {
            if backend.encode(&new_name(*id))? != [*id] {
                let problem = format!("token {id} ({text:?}) cannot be distinguished from text");
                return Err(problem);
            }
        }
        let mut ids: Vec<u32> = tokens.iter().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        Ok(Self {
            backend,
            names,
            ids,
        })
    }

    pub fn encode(&self, text: &str) -> Result<Vec<u32>, RenderError> {
        self.backend.encode(text).map_err(RenderError::Tokenizer)
    }

    pub fn is_renamed(&self, id: u32) -> bool {
        self.ids.binary_search(&id).is_ok()
    }

    /// The new name of the token with this text; a text that is none keeps its own.
    pub fn name<'a>(&'a self, text: &'a str) -> &'a str {
        self.names.get(text).map_or(text, String::as_str)
    }
}

/// A token that other text may become, by what the tokenizer does to text before it looks for the token.
fn found_in_changed_text(file: &Value, tokens: &[(u32, String)]) -> Option<String> {
    if !changes_text(file.get("normalizer")?) {
        return None;
    }
    let mut added = file.get("added_tokens")?.as_array()?.iter();
    added.find_map(|token| {
        let text = token.get("content")?.as_str()?;
        let is_one =
            token.get("normalized")?.as_bool()? && tokens.iter().any(|(_, own)| own == text);
        is_one.then(|| text.to_owned())
    })
}

fn changes_text(normalizer: &Value) -> bool {
    match normalizer.get("normalizers").and_then(Value::as_array) {
        Some(several) => several.iter().any(changes_text),
        None => !normalizer.is_null(),
    }
}

fn new_name(id: u32) -> String {
    format!("{RENAMED}{id}{RENAMED}")
}

fn change(text: Option<&mut Value>, names: &Names) {
    if let Some(Value::String(text)) = text
        && let Some(name) = names.get(text.as_str())
    {
        text.clone_from(name);
    }
}

fn rename(file: &mut Value, names: &Names) {
    let added = file.get_mut("added_tokens").and_then(Value::as_array_mut);
    for token in added.into_iter().flatten() {
        change(token.get_mut("content"), names);
    }
    // It may name tokens, and is not used: it only puts tokens around a text.
    if let Some(post_processor) = file.get_mut("post_processor") {
        *post_processor = Value::Null;
    }
    if let Some(model) = file.get_mut("model") {
        change(model.get_mut("unk_token"), names);
        rename_vocabulary(model.get_mut("vocab"), names);
        drop_merges(model.get_mut("merges"), names);
    }
}

fn rename_vocabulary(vocabulary: Option<&mut Value>, names: &Names) {
    match vocabulary {
        Some(Value::Object(vocabulary)) => {
            let entries = std::mem::take(vocabulary).into_iter();
            let other = |(text, id)| (names.get(&text).cloned().unwrap_or(text), id);
            *vocabulary = entries.map(other).collect::<Map<_, _>>();
        }
        Some(Value::Array(pieces)) => {
            for piece in pieces {
                change(piece.get_mut(0), names);
            }
        }
        _ => {}
    }
}

/// Text must not be merged to a token that has another name.
fn drop_merges(merges: Option<&mut Value>, names: &Names) {
    if let Some(Value::Array(merges)) = merges {
        let is_named = |text: &str| names.contains_key(text);
        merges.retain(|merge| {
            let Some((left, right)) = pair(merge) else {
                return true;
            };
            !(is_named(left) || is_named(right) || is_named(&format!("{left}{right}")))
        });
    }
}

fn pair(merge: &Value) -> Option<(&str, &str)> {
    match merge {
        Value::String(pair) => pair.split_once(' '),
        pair => Some((pair.get(0)?.as_str()?, pair.get(1)?.as_str()?)),
    }
}
