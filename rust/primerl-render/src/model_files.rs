//! Reading a model folder: the files that say how its text is made, as `transformers` reads them.

use crate::error::LoadError;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Names of the special tokens that templates may use as variables (`SPECIAL_TOKENS_ATTRIBUTES`).
const SPECIAL_TOKEN_NAMES: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// A template's source and the file it came from.
pub(crate) struct TemplateSource {
    pub source: String,
    pub path: PathBuf,
}

/// The parsed JSON files of a model folder; absent ones are empty.
pub(crate) struct ModelFiles {
    folder: PathBuf,
    tokenizer_config: Map<String, Value>,
    special_tokens_map: Map<String, Value>,
    config: Map<String, Value>,
    generation_config: Map<String, Value>,
}

impl ModelFiles {
    pub fn read(folder: &Path) -> Result<Self, LoadError> {
        if !folder.is_dir() {
            return Err(LoadError::NoFolder(folder.to_path_buf()));
        }
        if !folder.join("tokenizer.json").is_file() {
            return Err(LoadError::NoTokenizer(folder.to_path_buf()));
        }
        let object = |name: &str| read_object(&folder.join(name));
        Ok(Self {
            folder: folder.to_path_buf(),
            tokenizer_config: object("tokenizer_config.json")?,
            special_tokens_map: object("special_tokens_map.json")?,
            config: object("config.json")?,
            generation_config: object("generation_config.json")?,
        })
    }

    pub fn tokenizer(&self) -> PathBuf {
        self.folder.join("tokenizer.json")
    }

    /// The default template, and the one for conversations with tools where the folder has a separate one.
    /// A file `chat_template.jinja` comes before the entry in `tokenizer_config.json`.
    pub fn templates(&self) -> Result<(TemplateSource, Option<TemplateSource>), LoadError> {
        let file = |name: &str| -> Result<Option<TemplateSource>, LoadError> {
            let path = self.folder.join(name);
            Ok(read_text(&path)?.map(|source| TemplateSource { source, path }))
        };
        if let Some(default) = file("chat_template.jinja")? {
            return Ok((default, file("additional_chat_templates/tool_use.jinja")?));
        }
        let path = self.folder.join("tokenizer_config.json");
        let found = |source: &str| TemplateSource {
            source: source.to_owned(),
            path: path.clone(),
        };
        let named = |name: &str| {
            let list = self.tokenizer_config.get("chat_template")?.as_array()?;
            let entry = list
                .iter()
                .find(|entry| entry.get("name").and_then(Value::as_str) == Some(name))?;
            entry.get("template")?.as_str().map(found)
        };
        match self.tokenizer_config.get("chat_template") {
            Some(Value::String(source)) => Ok((found(source), None)),
            _ => match named("default") {
                Some(default) => Ok((default, named("tool_use"))),
                None => Err(LoadError::NoChatTemplate(self.folder.clone())),
            },
        }
    }

    /// Text of each named special token.
    pub fn special_tokens(&self) -> Map<String, Value> {
        let named = |name: &str| {
            let text = [&self.tokenizer_config, &self.special_tokens_map]
                .iter()
                .find_map(|file| token_text(file.get(name)?))?;
            Some((name.to_owned(), Value::String(text.to_owned())))
        };
        SPECIAL_TOKEN_NAMES
            .iter()
            .filter_map(|name| named(name))
            .collect()
    }

    /// Ids that end a turn: `eos_token_id` of `generation_config.json` and `config.json`, and the id of the
    /// tokenizer's `eos_token`, found by `id_of`.
    pub fn stop_token_ids(
        &self,
        id_of: impl Fn(&str) -> Option<u32>,
    ) -> Result<Vec<u32>, LoadError> {
        let values = [
            self.generation_config.get("eos_token_id"),
            self.model_value("eos_token_id"),
        ];
        let mut ids: Vec<u32> = values.into_iter().flatten().flat_map(as_ids).collect();
        if let Some(Value::String(token)) = self.special_tokens().get("eos_token") {
            let path = self.folder.join("tokenizer_config.json");
            ids.push(id_of(token).ok_or_else(|| LoadError::UnknownStopToken {
                path,
                token: token.clone(),
            })?);
        }
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    /// The family of the model's architecture, such as `qwen3`.
    pub fn model_type(&self) -> Option<&str> {
        self.config.get("model_type").and_then(Value::as_str)
    }

    /// Context length in tokens; `None` when `config.json` does not say.
    pub fn max_positions(&self) -> Option<u32> {
        let names = ["max_position_embeddings", "n_positions", "max_seq_len"];
        names
            .iter()
            .find_map(|name| self.model_value(name).and_then(as_id))
    }

    /// Tokens the model knows; `None` when `config.json` does not say.
    pub fn vocabulary_size(&self) -> Option<u32> {
        self.model_value("vocab_size").and_then(as_id)
    }

    // Multimodal configs keep the language model's values one level down.
    fn model_value(&self, name: &str) -> Option<&Value> {
        let inner = self.config.get("text_config").and_then(Value::as_object);
        self.config
            .get(name)
            .or_else(|| inner.and_then(|config| config.get(name)))
    }
}

/// One id or a list of ids.
fn as_ids(value: &Value) -> Vec<u32> {
    match value {
        Value::Array(ids) => ids.iter().filter_map(as_id).collect(),
        value => as_id(value).into_iter().collect(),
    }
}

fn as_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn token_text(value: &Value) -> Option<&str> {
    value
        .as_str()
        .or_else(|| value.get("content").and_then(Value::as_str))
}

fn read_text(path: &Path) -> Result<Option<String>, LoadError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(LoadError::Read {
            path: path.to_path_buf(),
            source,
        }),
    }
}

fn read_object(path: &Path) -> Result<Map<String, Value>, LoadError> {
    let Some(text) = read_text(path)? else {
        return Ok(Map::new());
    };
    serde_json::from_str(&text).map_err(|source| LoadError::Json {
        path: path.to_path_buf(),
        source,
    })
}
