//! A tiny model folder without weights, for tests of this crate and of the crates above it.

#![allow(clippy::expect_used, reason = "tests may panic")]

use crate::error::LoadError;
pub use crate::parse::fuzz;
use crate::renderer::{LoadOptions, Renderer};
use crate::tokenizer::bytes::byte_alphabet;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Plain ChatML: each message `<|im_start|>{role}\n{content}<|im_end|>\n`.
pub const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// End of turn and end of sequence of the tiny model.
pub const IM_END: u32 = 256;
/// Padding.
pub const END_OF_TEXT: u32 = 257;
pub const IM_START: u32 = 258;
/// Number of rows of the embedding; ids 262 and 263 have no token.
pub const VOCABULARY_SIZE: u32 = 264;

/// Writes `tokenizer.json`, `tokenizer_config.json`, `config.json` and `generation_config.json` of the demo's model:
/// bytes 0-255, `<|im_end|>`, `<|endoftext|>`, `<|im_start|>`, and the words `system`, `user`, `assistant`.
pub fn write_tiny_model(folder: &Path) -> std::io::Result<()> {
    let added = [
        ("<|im_end|>", true),
        ("<|endoftext|>", true),
        ("<|im_start|>", true),
        ("system", false),
        ("user", false),
        ("assistant", false),
    ];
    write_model(folder, &added, &[], CHATML, "<|im_end|>", "<|endoftext|>")
}

/// The renderer of the tiny model.
pub fn tiny() -> Renderer {
    let folder = tempfile::tempdir().expect("temporary folder");
    write_tiny_model(folder.path()).expect("model folder");
    Renderer::load(folder.path()).expect("loads")
}

/// A model as [`write_model`] writes it: ChatML over bytes, unless told otherwise.
pub struct TestModel<'a> {
    pub added: &'a [(&'a str, bool)],
    pub merges: &'a [(&'a str, &'a str)],
    pub template: &'a str,
    pub eos: &'a str,
    pub pad: &'a str,
    pub options: LoadOptions,
}

impl Default for TestModel<'_> {
    fn default() -> Self {
        Self {
            added: &[
                ("<|im_end|>", true),
                ("<|endoftext|>", true),
                ("<|im_start|>", true),
            ],
            merges: &[],
            template: CHATML,
            eos: "<|im_end|>",
            pad: "<|endoftext|>",
            options: LoadOptions::default(),
        }
    }
}

impl TestModel<'_> {
    /// Loads the model from a folder of its own, which is gone then.
    ///
    /// # Errors
    /// Those of [`Renderer::load_with`].
    ///
    /// # Panics
    /// There is no room for a folder.
    pub fn load(&self) -> Result<Renderer, LoadError> {
        let folder = tempfile::tempdir().expect("temporary folder");
        let written = write_model(
            folder.path(),
            self.added,
            self.merges,
            self.template,
            self.eos,
            self.pad,
        );
        written.expect("model folder");
        Renderer::load_with(folder.path(), &self.options)
    }

    /// [`TestModel::load`] of a model that can be loaded.
    ///
    /// # Panics
    /// It cannot.
    pub fn renderer(&self) -> Renderer {
        self.load().expect("loads")
    }
}

/// Writes a model folder with a byte-level tokenizer: 256 bytes, then `merges` (pairs of texts, each made of tokens that
/// exist by then), then `added` (text, special).
pub fn write_model(
    folder: &Path,
    added: &[(&str, bool)],
    merges: &[(&str, &str)],
    template: &str,
    eos: &str,
    pad: &str,
) -> std::io::Result<()> {
    let alphabet = byte_alphabet();
    let written = |text: &str| {
        text.bytes()
            .map(|byte| alphabet[usize::from(byte)])
            .collect::<String>()
    };
    let mut tokens: Vec<String> = alphabet.iter().map(char::to_string).collect();
    tokens.sort();
    tokens.extend(
        merges
            .iter()
            .map(|(left, right)| written(left) + &written(right)),
    );
    let first_added = tokens.len();
    let id_of = |text: &str| {
        added
            .iter()
            .position(|(token, _)| *token == text)
            .map(|at| first_added + at)
    };
    let vocabulary: Map<String, Value> = tokens
        .into_iter()
        .zip(0u32..)
        .map(|(t, id)| (t, json!(id)))
        .collect();
    let added_tokens: Vec<Value> = added
        .iter()
        .enumerate()
        .map(|(at, (content, special))| {
            json!({"id": first_added + at, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special})
        })
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added_tokens, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary,
            "merges": merges.iter().map(|(left, right)| json!([written(left), written(right)])).collect::<Vec<_>>()},
    });
    let write = |name: &str, value: Value| std::fs::write(folder.join(name), value.to_string());
    std::fs::create_dir_all(folder)?;
    write("tokenizer.json", tokenizer)?;
    write(
        "tokenizer_config.json",
        json!({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": pad,
            "chat_template": template, "clean_up_tokenization_spaces": false}),
    )?;
    write(
        "config.json",
        model_config(first_added + added.len(), id_of(eos)),
    )?;
    write(
        "generation_config.json",
        json!({"eos_token_id": id_of(eos), "pad_token_id": id_of(pad)}),
    )
}

fn model_config(vocabulary: usize, eos: Option<usize>) -> Value {
    json!({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": vocabulary.next_multiple_of(8),
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": true, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "initializer_range": 0.08, "eos_token_id": eos})
}
