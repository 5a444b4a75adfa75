//! Extensions in which control tokens of messages are text ([`crate::neutral`]).

use super::{Asked, ExtensionContext, NotExtendable};
use crate::message::Message;
use crate::neutral::{Originals, Restored};
use crate::renderer::Renderer;
use crate::template::RenderOptions;

/// What is asked for, with sentinels.
pub(super) struct Extended<'a> {
    sampled: &'a [u32],
    answer: Message,
    own: String,
    new: Vec<Message>,
    options: RenderOptions,
    originals: Originals,
}

impl<'a> Extended<'a> {
    /// `None` where control tokens are kept, or there are none.
    pub fn of(renderer: &Renderer, asked: &Asked<'a>) -> Option<Self> {
        let mut texts = renderer.neutral_texts(asked.previous.options)?;
        let answer = texts.message(asked.previous.answer);
        let own = texts.appended(asked.own);
        let new = asked.new.iter().map(|message| texts.message(message));
        let new = new.collect();
        let options = texts.options(asked.previous.options);
        Some(Self {
            sampled: asked.previous.sampled,
            answer,
            own,
            new,
            options,
            originals: texts.replaced()?,
        })
    }

    pub fn asked(&self) -> Asked<'_> {
        Asked {
            previous: ExtensionContext {
                answer: &self.answer,
                sampled: self.sampled,
                options: &self.options,
            },
            own: &self.own,
            new: &self.new,
        }
    }

    /// The ids of `suffix`, which was rendered with sentinels.
    pub fn encode(
        &self,
        renderer: &Renderer,
        asked: &Asked<'_>,
        suffix: &str,
    ) -> Result<(Vec<u32>, Restored), NotExtendable> {
        let options = RenderOptions {
            now: self.options.now,
            ..asked.previous.options.clone()
        };
        let previous = ExtensionContext {
            options: &options,
            ..asked.previous
        };
        let text = renderer.proven_suffix(&Asked { previous, ..*asked })?;
        renderer
            .encode_neutral(suffix, &self.originals, &text)
            .map_err(|_| NotExtendable::ControlTokens)
    }
}
