//! What a template is given besides the messages, converted once: a conversation asks many times with the same tools.

use super::clock::{NOW, microseconds};
use super::python_value::{dict, from_json};
use minijinja::value::Value;
use serde_json::{Map, Value as Json};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

/// What the template is given besides the messages.
#[derive(Clone, Debug, PartialEq)]
pub struct RenderOptions {
    /// Tool schemas in OpenAI's shape; `None` and an empty list differ to some templates.
    pub tools: Option<Vec<Json>>,
    /// Texts to answer from, as mappings (`title` and `text`, by custom), for templates that know them.
    pub documents: Option<Vec<Json>>,
    /// Ends the text where the assistant's next answer begins.
    pub add_generation_prompt: bool,
    /// Further variables (`chat_template_kwargs`), such as `enable_thinking`.
    pub template_kwargs: Map<String, Json>,
    /// The time that `strftime_now` formats, in the local time zone; `None` asks the clock.
    pub now: Option<SystemTime>,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self {
            tools: None,
            documents: None,
            add_generation_prompt: true,
            template_kwargs: Map::new(),
            now: None,
        }
    }
}

/// [`RenderOptions`] as the template engine wants them.
pub(crate) struct PreparedOptions {
    pub options: RenderOptions,
    /// Canonical text of `template_kwargs`.
    pub kwargs_key: String,
    pub(super) variables: Value,
}

impl PreparedOptions {
    pub fn new(options: RenderOptions) -> Self {
        let list = |items: &Option<Vec<Json>>| match items {
            Some(items) => super::python_value::list(items.iter().map(from_json).collect()),
            None => Value::from(()),
        };
        // The first of two entries with one name counts: kwargs cannot replace these.
        let mut variables: Vec<(Arc<str>, Value)> = vec![
            ("tools".into(), list(&options.tools)),
            ("documents".into(), list(&options.documents)),
            (
                "add_generation_prompt".into(),
                Value::from(options.add_generation_prompt),
            ),
        ];
        variables.extend(
            options
                .now
                .and_then(microseconds)
                .map(|now| (NOW.into(), Value::from(now))),
        );
        let kwargs = options.template_kwargs.iter();
        variables.extend(kwargs.map(|(name, value)| (name.as_str().into(), from_json(value))));
        Self {
            kwargs_key: crate::message::canonical_json(&Json::Object(
                options.template_kwargs.clone(),
            )),
            variables: dict(variables),
            options,
        }
    }
}

/// Options prepared lately, by their hash. Written by the first caller that renders with new ones; held only to look up or insert.
#[derive(Default)]
pub(crate) struct PreparedCache(Mutex<HashMap<u64, Arc<PreparedOptions>>>);

impl PreparedCache {
    /// Far more sets of tools than one run has.
    const MOST: usize = 256;

    pub fn prepare(&self, options: &RenderOptions) -> Arc<PreparedOptions> {
        let mut hasher = DefaultHasher::new();
        options.tools.hash(&mut hasher);
        options.documents.hash(&mut hasher);
        options.template_kwargs.hash(&mut hasher);
        (options.add_generation_prompt, options.now).hash(&mut hasher);
        let key = hasher.finish();
        let cached = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&key)
            .cloned();
        if let Some(prepared) = cached.filter(|prepared| prepared.options == *options) {
            return prepared;
        }
        let prepared = Arc::new(PreparedOptions::new(options.clone()));
        let mut cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.len() >= Self::MOST {
            cache.clear();
        }
        cache.insert(key, Arc::clone(&prepared));
        prepared
    }
}
