//! How requests say which policy they want, and how answers say which one they had. Only this module knows the
//! difference between engines that load each version over the last, and engines that hold several adapters.
//!
//! ```text
//!                     request's `model`      answer's `model`    answer's `weight_versions`
//! whole weights       the run's model        not looked at       the versions, token by token
//! an adapter          the version's adapter  that adapter        the label of the base model, whose weights stay
//! ```

use super::error::EngineError;
use super::generate::{Choice, GenerateAnswer};
use primerl_core::PolicyVersion;

/// The version that an engine has proved, and the name under which it serves that version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    pub version: PolicyVersion,
    /// The name in requests.
    pub model: String,
    /// For an adapter: what the engine calls the weights that it adapts.
    pub base: Option<String>,
}

impl Named {
    pub fn weights(model: &str, version: PolicyVersion) -> Named {
        Named {
            version,
            model: model.to_owned(),
            base: None,
        }
    }

    /// The same version with other weights, from a trainer that went back to a checkpoint, has another name.
    pub fn adapter(model: &str, version: PolicyVersion, digest: &str, base: String) -> Named {
        let digest: String = digest.chars().take(12).collect();
        Named {
            version,
            model: format!("{}{version}-{digest}", Named::prefix(model)),
            base: Some(base),
        }
    }

    /// The prefix of the names of all adapters of a run.
    pub fn prefix(model: &str) -> String {
        format!("{model}@")
    }

    /// The engine's label of its weights, while it serves this.
    pub fn label(&self) -> String {
        self.base
            .clone()
            .unwrap_or_else(|| self.version.to_string())
    }

    pub fn check_model(&self, answered: Option<&str>) -> Result<(), EngineError> {
        if self.base.is_none() || answered == Some(&self.model) {
            return Ok(());
        }
        Err(EngineError::Misnamed {
            asked: self.model.clone(),
            answered: answered.unwrap_or("nothing").to_owned(),
        })
    }

    /// Checks an answer whose versions account for all of its tokens.
    pub fn answer(&self, answer: GenerateAnswer) -> Result<GenerateAnswer, EngineError> {
        self.check_model(answer.model.as_deref())?;
        let choices = answer
            .choices
            .into_iter()
            .map(|choice| self.choice(choice))
            .collect::<Result<_, _>>()?;
        Ok(GenerateAnswer { choices, ..answer })
    }

    /// Like [`Named::answer`], for a part that does not name its weights: only an engine that has this adapter, by a
    /// name that holds its digest, answers to the name at all.
    pub(super) fn choice(&self, mut choice: Choice) -> Result<Choice, EngineError> {
        let Some(base) = &self.base else {
            return Ok(choice);
        };
        for span in choice.weight_versions.iter_mut().flatten() {
            if span.version != *base {
                // The base weights differ from those that the adapter was trained on.
                let label = std::mem::take(&mut span.version);
                return Err(EngineError::Unproved { label });
            }
            span.version = self.version.to_string();
        }
        Ok(choice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Bounds, Generated};
    use serde_json::{Value, json};

    fn named() -> Named {
        Named::adapter(
            "m",
            PolicyVersion(7),
            "0123456789abcdef0123456789abcdef",
            "default".into(),
        )
    }

    fn read(named: &Named, model: Value, label: &str) -> Result<Generated, EngineError> {
        let answer = json!({"model": model, "choices": [{"index": 0, "finish_reason": "length", "token_ids": [5, 6],
            "weight_versions": [{"version": label, "start": 0, "end": 1}, {"version": label, "start": 1, "end": 2}],
            "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}, {"token_id": 6, "logprob": -2.0}]}}]});
        let bounds = Bounds {
            max_tokens: 2,
            top_logprobs: 0,
            vocabulary_size: None,
            lowest_logprob: -100.0,
            stop_token_ids: &[],
            experts: None,
            experts_rows: 0,
        };
        let answer = GenerateAnswer::parse(answer.to_string().as_bytes())?;
        named.answer(answer)?.check(&bounds)
    }

    #[test]
    fn an_adapters_version_is_that_of_all_tokens() {
        let named = named();
        assert_eq!(named.model, "m@7-0123456789ab");
        let generated = read(&named, json!(named.model), "default").expect("is its own");
        let versions: Vec<u64> = generated.versions.iter().map(|run| run.version.0).collect();
        assert_eq!(versions, [7, 7]);
    }

    #[test]
    fn answers_of_anything_else_are_refused() {
        let other = read(&named(), json!("m@6-0123456789ab"), "default");
        assert!(
            matches!(other, Err(EngineError::Misnamed { answered, .. }) if answered == "m@6-0123456789ab")
        );
        assert!(matches!(
            read(&named(), Value::Null, "default"),
            Err(EngineError::Misnamed { .. })
        ));
        let moved = read(&named(), json!(named().model), "8");
        assert!(matches!(moved, Err(EngineError::Unproved { label }) if label == "8"));
    }

    #[test]
    fn whole_weights_are_named_by_the_answer() {
        let named = Named::weights("m", PolicyVersion(7));
        let generated = read(&named, Value::Null, "6").expect("is read");
        assert_eq!(generated.versions[0].version, PolicyVersion(6));
        assert_eq!((named.label().as_str(), named.model.as_str()), ("7", "m"));
    }
}
