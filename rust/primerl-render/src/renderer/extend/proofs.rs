//! That what a template writes for new messages does not depend on the conversation before them, tried out once a shape.

use super::NotExtendable;
use super::scenario::{AnswerShape, ContentKind, Given, Shape, scenario_histories, scenario_tool};
use crate::renderer::Renderer;
use crate::template::{PreparedOptions, RenderOptions};
use serde_json::json;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

/// Shapes remembered; far more than one run shows.
const MAX_PROOFS: usize = 1024;

/// Verdicts so far. Written by the first caller that meets a new shape; held only to look up or insert.
#[derive(Default)]
pub(crate) struct Proofs(Mutex<HashMap<Shape, Result<(), NotExtendable>>>);

impl Renderer {
    /// Tries the shapes that agents use, so that a run's first turns find the verdict.
    pub(crate) fn prove_common_shapes(&self) {
        let (tool, user) = (("tool".to_owned(), 0), ("user".to_owned(), 0));
        let shapes = [
            (vec![user.clone()], 0, Given::None),
            (vec![user.clone()], 0, Given::Some),
            (vec![tool.clone()], 1, Given::Some),
            (vec![tool.clone(), tool.clone()], 2, Given::Some),
            (vec![tool, user], 1, Given::Some),
        ];
        let options = PreparedOptions::new(RenderOptions::default());
        for (messages, tool_calls, tools) in shapes {
            let content = if tool_calls > 0 {
                ContentKind::Null
            } else {
                ContentKind::Text
            };
            let shape = Shape {
                messages,
                answer: AnswerShape {
                    tool_calls,
                    content,
                },
                tools,
                documents: Given::None,
                add_generation_prompt: true,
                template_kwargs: options.kwargs_key.clone(),
            };
            // A refusal is remembered; the turn that meets it forks with this reason.
            let _ = self.prove(shape, &options);
        }
    }

    pub(super) fn prove(
        &self,
        shape: Shape,
        options: &PreparedOptions,
    ) -> Result<(), NotExtendable> {
        if let Some(verdict) = self
            .proofs
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&shape)
        {
            return verdict.clone();
        }
        // Proven outside of the lock: two threads may prove the same shape once, and find the same.
        let verdict = self.prove_scenarios(&shape, options);
        let mut proofs = self.proofs.0.lock().unwrap_or_else(PoisonError::into_inner);
        if proofs.len() >= MAX_PROOFS {
            proofs.clear();
        }
        proofs.insert(shape, verdict.clone());
        verdict
    }

    fn prove_scenarios(
        &self,
        shape: &Shape,
        options: &PreparedOptions,
    ) -> Result<(), NotExtendable> {
        let options = PreparedOptions::new(RenderOptions {
            tools: shape.tools.filled(scenario_tool),
            documents: shape
                .documents
                .filled(|| json!({"title": "t", "text": "x"})),
            add_generation_prompt: shape.add_generation_prompt,
            template_kwargs: options.options.template_kwargs.clone(),
            // One moment for all renders.
            now: Some(SystemTime::now()),
        });
        let mut compared = 0;
        for (answer_text, text) in [
            ("yes", "z"),
            ("Two words.\n\n1. more", "Line one\n\n  é 12\n<b>"),
        ] {
            let answer = shape.answer.scenario(answer_text);
            let new_messages = shape.scenario_messages(text);
            let suffix = self.suffix_text(&answer, &new_messages, &options)?;
            for history in scenario_histories() {
                let mut messages = history;
                messages.push(answer.clone());
                messages.extend_from_slice(&new_messages);
                // Not every template takes every history (system messages, tools).
                let Ok(full) = self.prepared_text(&messages, &options) else {
                    continue;
                };
                self.compare(&full, &suffix, answer_text, shape.answer.tool_calls == 0)?;
                compared += 1;
            }
        }
        if compared >= 4 {
            Ok(())
        } else {
            Err(NotExtendable::DependsOnHistory)
        }
    }

    /// Whether `full` is some text, then `suffix`, in letters and in tokens.
    fn compare(
        &self,
        full: &str,
        suffix: &str,
        answer: &str,
        answer_ends: bool,
    ) -> Result<(), NotExtendable> {
        let before = full
            .strip_suffix(suffix)
            .ok_or(NotExtendable::DependsOnHistory)?;
        if answer_ends && !before.ends_with(answer) {
            return Err(NotExtendable::AnswerNotVerbatim);
        }
        let encode = |text| {
            self.tokenizer()
                .encode(text)
                .map_err(|error| NotExtendable::TemplateFailed(error.to_string()))
        };
        let mut ids = encode(before)?;
        ids.extend(self.encode_suffix(suffix)?);
        if ids == encode(full)? {
            Ok(())
        } else {
            Err(NotExtendable::TokensMerge)
        }
    }
}
