//! One model folder, ready to turn messages into tokens and back.

mod abilities;
mod extend;
mod neutral;
mod parsing;

pub use abilities::RoleSupport;
pub use extend::{Body, Extension, ExtensionContext, NotExtendable};
pub(crate) use extend::{call_id, scenario_answer, scenario_tool};

use self::abilities::Abilities;
use self::extend::Proofs;
use crate::control_tokens::ControlTokens;
use crate::error::{LoadError, RenderError};
use crate::message::Message;
use crate::model_files::ModelFiles;
use crate::neutral::{ControlTokenPolicy, Neutral};
use crate::parse::{AnswerParser, ParserChoice, ParserSetting};
use crate::template::{ChatTemplate, PreparedCache, PreparedOptions, RenderOptions};
use crate::tokenizer::Tokenizer;
use std::path::Path;

/// Tokenizer, chat template and stop tokens of one model. Shared freely: every method takes `&self`, and none
/// blocks on anything but the processor.
pub struct Renderer {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    /// For conversations with tools, in the few models that have a separate template.
    tool_template: Option<ChatTemplate>,
    stop_token_ids: Vec<u32>,
    max_positions: Option<u32>,
    vocabulary_size: Option<u32>,
    parser: AnswerParser,
    pub(crate) prepared: PreparedCache,
    pub(crate) proofs: Proofs,
    pub(crate) abilities: Abilities,
    pub(crate) control_tokens: ControlTokens,
    /// Where control tokens in the text of messages are made text.
    pub(crate) neutral: Option<Neutral>,
    /// [`Renderer::with_renderable_content`].
    pub(crate) null_content_fails: bool,
}

/// What is set by hand about a model. Default: all by the model's own files.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    pub tool_parser: Option<ParserSetting>,
    pub reasoning_parser: Option<ParserSetting>,
    pub control_tokens: ControlTokenPolicy,
}

impl Renderer {
    /// Reads `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`, `config.json` and
    /// `generation_config.json`, checks the tokenizer against its reference, and tries out for which kinds of
    /// new messages a conversation can be extended.
    pub fn load(model_dir: &Path) -> Result<Self, LoadError> {
        Self::load_with(model_dir, &LoadOptions::default())
    }

    /// [`Renderer::load`] with parsers set by hand.
    pub fn load_with(model_dir: &Path, load_options: &LoadOptions) -> Result<Self, LoadError> {
        let files = ModelFiles::read(model_dir)?;
        let (default, tool_use) = files.templates()?;
        let parsers = tool_use
            .iter()
            .fold(default.source.clone(), |all, other| all + &other.source);
        let parsers = ParserChoice::of_model(&parsers, files.model_type()).with(
            load_options.tool_parser.as_ref(),
            load_options.reasoning_parser.as_ref(),
        )?;
        let special_tokens = files.special_tokens();
        let compile = |found: crate::model_files::TemplateSource| {
            ChatTemplate::new(&found.source, special_tokens.clone(), &found.path)
        };
        let template = compile(default)?;
        let tool_template = tool_use.map(compile).transpose()?;
        let tokenizer = Tokenizer::load(&files.tokenizer())?;
        let stop_token_ids = files.stop_token_ids(|token| tokenizer.token_id(token))?;
        let parser = AnswerParser::new(parsers, &tokenizer);
        let control_tokens = ControlTokens::of(&tokenizer, |text| {
            sources_contain(&template, tool_template.as_ref(), text)
        });
        let mut renderer = Self {
            tokenizer,
            template,
            tool_template,
            stop_token_ids,
            max_positions: files.max_positions(),
            vocabulary_size: files.vocabulary_size(),
            parser,
            prepared: PreparedCache::default(),
            proofs: Proofs::default(),
            abilities: Abilities::default(),
            control_tokens,
            neutral: None,
            null_content_fails: false,
        };
        if load_options.control_tokens == ControlTokenPolicy::Neutralize {
            renderer.neutral = Some(renderer.neutral_of(&files.tokenizer())?);
            renderer.check_writes_text_as_it_is(model_dir)?;
        }
        renderer.null_content_fails = renderer.fails_on_null_content();
        renderer.learn_turn_end();
        let newlines = renderer.learn_newlines();
        renderer.parser.set_newlines(newlines);
        renderer.prove_common_shapes();
        Ok(renderer)
    }

    fn neutral_of(&self, path: &Path) -> Result<Neutral, LoadError> {
        let written = |text: &str| self.template_sources_contain(text);
        Neutral::new(&self.tokenizer, path, written).map_err(|reason| LoadError::NotNeutralized {
            path: path.to_path_buf(),
            reason,
        })
    }

    /// The conversation as text, exactly as `transformers`' `apply_chat_template` renders it.
    pub fn render_text(
        &self,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<String, RenderError> {
        self.prepared_text(messages, &self.prepared.prepare(options))
    }

    pub(crate) fn prepared_text(
        &self,
        messages: &[Message],
        options: &PreparedOptions,
    ) -> Result<String, RenderError> {
        self.template_for(&options.options)
            .render_prepared(messages, options, false)
    }

    /// The conversation as token ids; of its text, unless control tokens in it are neutralized ([`LoadOptions`]).
    pub fn render(
        &self,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<Vec<u32>, RenderError> {
        let Some(neutral) = self.neutralized(messages, options) else {
            return self.tokenizer.encode(&self.render_text(messages, options)?);
        };
        let (ids, _) = self.encode_neutralized(messages, options, &neutral)?;
        Ok(ids)
    }

    /// The parsers of this model.
    pub fn parsers(&self) -> ParserChoice {
        self.parser.choice()
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Ids that end the assistant's turn, ascending: the model's end-of-sequence ids, and the special token with which
    /// its template closes an answer.
    pub fn stop_token_ids(&self) -> &[u32] {
        &self.stop_token_ids
    }

    pub fn is_stop_token(&self, id: u32) -> bool {
        self.stop_token_ids.binary_search(&id).is_ok()
    }

    /// Context length of the model in tokens, when `config.json` says it.
    pub fn max_positions(&self) -> Option<u32> {
        self.max_positions
    }

    /// Numbers of tokens the model computes a probability for, when `config.json` says it; some of them may be no tokens
    /// of the tokenizer.
    pub fn vocabulary_size(&self) -> Option<u32> {
        self.vocabulary_size
    }

    pub(crate) fn template_for(&self, options: &RenderOptions) -> &ChatTemplate {
        match &self.tool_template {
            Some(template) if options.tools.is_some() => template,
            _ => &self.template,
        }
    }

    /// Whether a template of the model holds this text.
    pub(crate) fn template_sources_contain(&self, text: &str) -> bool {
        sources_contain(&self.template, self.tool_template.as_ref(), text)
    }

    /// The longest stop token that `text` begins with.
    pub(crate) fn leading_stop_token(&self, text: &str) -> Option<(u32, usize)> {
        self.stop_token_texts()
            .filter(|(_, stop)| text.starts_with(stop))
            .map(|(id, stop)| (id, stop.len()))
            .max_by_key(|(_, length)| *length)
    }

    pub(crate) fn stop_token_texts(&self) -> impl Iterator<Item = (u32, &str)> {
        self.tokenizer
            .added_tokens()
            .filter(|token| self.is_stop_token(token.id))
            .map(|token| (token.id, token.content.as_str()))
    }

    // Llama 3's base configs name <|end_of_text|> only, while the template closes turns with <|eot_id|>. Harmony closes
    // an answer with <|end|> when it writes the history, which within an answer ends a message and not the turn: what
    // closes the last answer counts first.
    fn learn_turn_end(&mut self) {
        let Some([followed, last]) = self.texts_after_answer() else {
            return;
        };
        if self.leading_stop_token(&last).is_some() {
            return;
        }
        let Some(id) = self
            .leading_special_token(&last)
            .or_else(|| self.leading_special_token(&followed))
        else {
            return;
        };
        if let Err(at) = self.stop_token_ids.binary_search(&id) {
            self.stop_token_ids.insert(at, id);
        }
    }

    fn leading_special_token(&self, text: &str) -> Option<u32> {
        let tokens = self.tokenizer.added_tokens();
        let leading = tokens.filter(|token| token.special && text.starts_with(&token.content));
        leading
            .max_by_key(|token| token.content.len())
            .map(|token| token.id)
    }
}

fn sources_contain(template: &ChatTemplate, others: Option<&ChatTemplate>, text: &str) -> bool {
    let templates = std::iter::once(template).chain(others);
    let mut sources = templates.filter_map(ChatTemplate::source);
    sources.any(|source| source.contains(text))
}
