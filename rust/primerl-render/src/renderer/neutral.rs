//! What the renderer makes of control tokens in the text of messages.

use super::Renderer;
use crate::error::{LoadError, RenderError};
use crate::message::Message;
use crate::neutral::{Neutralized, Originals, Restored, Texts};
use crate::template::RenderOptions;
use std::path::Path;

/// What templates might change within a text, and so make a control token of.
const CHANGEABLE: &str = "zprimerlq Ab&lt;c&gt; D\nE\n\nF  g</think>H<br>i\\n";

impl Renderer {
    /// A template that changes what users say could make a control token of text that is none.
    pub(super) fn check_writes_text_as_it_is(&self, model_dir: &Path) -> Result<(), LoadError> {
        let options = RenderOptions {
            add_generation_prompt: true,
            ..RenderOptions::default()
        };
        let is_written = |text: &str| text.to_lowercase().contains(&CHANGEABLE[..9]);
        // A template that takes no such conversation says so when it meets one, and one for parts alone writes nothing.
        match self.render_text(&[Message::user(CHANGEABLE)], &options) {
            Ok(text) if is_written(&text) && !text.contains(CHANGEABLE) => {
                Err(LoadError::NotNeutralized {
                    path: model_dir.to_path_buf(),
                    reason: "its chat template changes what users say".to_owned(),
                })
            }
            _ => Ok(()),
        }
    }

    /// Whether a message holds text that becomes control tokens: none does where they are neutralized. Only of what comes
    /// from outside: an answer is the model's own, and a system message the author's.
    pub fn holds_control_tokens(&self, message: &Message) -> bool {
        let is_outside = !matches!(message.role.as_str(), "assistant" | "system" | "developer");
        let text = || message.content.joined().unwrap_or_default();
        self.neutral.is_none() && is_outside && self.control_tokens.is_in(&text())
    }

    /// The conversation with sentinels; `None` where its text holds no control tokens, or they are kept.
    pub(crate) fn neutralized(
        &self,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Option<Neutralized> {
        let mut texts = self.neutral_texts(options)?;
        let messages = messages.iter().map(|message| texts.message(message));
        let messages = messages.collect();
        let options = texts.options(options);
        let originals = texts.replaced()?;
        Some(Neutralized {
            messages,
            options,
            originals,
        })
    }

    /// Replaces control tokens in texts; `None` where they are kept.
    pub(crate) fn neutral_texts(&self, options: &RenderOptions) -> Option<Texts<'_>> {
        let takes_mappings = self.template_for(options).takes_mappings();
        let neutral = self.neutral.as_ref()?;
        Some(Texts::new(&neutral.every, &neutral.special, takes_mappings))
    }

    /// The ids of a conversation, of which `neutral` is the one with sentinels, and its text.
    pub(crate) fn encode_neutralized(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        neutral: &Neutralized,
    ) -> Result<(Vec<u32>, Restored), RenderError> {
        let options = RenderOptions {
            now: neutral.options.now,
            ..options.clone()
        };
        let text = self.render_text(messages, &options)?;
        let rendered = self.render_text(&neutral.messages, &neutral.options)?;
        self.encode_neutral(&rendered, &neutral.originals, &text)
    }

    /// The ids of `rendered`, a text with sentinels, which stands for `text`.
    pub(crate) fn encode_neutral(
        &self,
        rendered: &str,
        originals: &Originals,
        text: &str,
    ) -> Result<(Vec<u32>, Restored), RenderError> {
        let unproven = || RenderError::ControlTokens {
            found: originals.first().to_owned(),
        };
        let neutral = self.neutral.as_ref().ok_or_else(unproven)?;
        let restored = neutral.restore(rendered, originals);
        let restored = restored.filter(|restored| restored.text == text);
        let restored = restored.ok_or_else(unproven)?;
        let tokenizer = &neutral.tokenizer;
        let with_sentinels = tokenizer.encode(&restored.coded_sentinels)?;
        let ids = tokenizer.encode(&restored.coded)?;
        let is_control = |id: &&u32| tokenizer.is_renamed(**id);
        let control = ids.iter().filter(is_control);
        let is_proven = with_sentinels == self.tokenizer().encode(rendered)?
            && with_sentinels.iter().filter(is_control).eq(control);
        match is_proven {
            true => Ok((ids, restored)),
            false => Err(unproven()),
        }
    }

    /// What is encoded of a text up to one of its bytes, by itself.
    pub(crate) fn encode_head(
        &self,
        restored: &Restored,
        byte: usize,
    ) -> Result<Option<Vec<u32>>, RenderError> {
        match (restored.coded_until(byte), &self.neutral) {
            (Some(head), Some(neutral)) => neutral.tokenizer.encode(head).map(Some),
            _ => Ok(None),
        }
    }
}
