//! A streamed answer of `/inference/v1/generate`: joins server-sent events to one answer.

use super::error::EngineError;
use super::experts::BYTES_A_ROW;
use super::generate::{Applied, Choice, Logprobs, TokenLogprob, VersionSpan};
use serde::Deserialize;

/// Largest event; a larger one is an error.
const LARGEST_EVENT: usize = 16 << 20;

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Part>,
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Part {
    #[serde(default)]
    token_ids: Vec<u32>,
    finish_reason: Option<String>,
    logprobs: Option<Logprobs>,
    weight_versions: Option<Vec<VersionSpan>>,
    grammar: Option<Applied>,
    routed_experts: Option<String>,
}

/// Takes the bytes as they come.
#[derive(Default)]
pub(super) struct Assembly {
    /// The requested number of tokens: an engine that sends without end must not fill the memory.
    max_tokens: usize,
    /// Tokens whose experts the last event may report.
    experts_rows: usize,
    buffer: Vec<u8>,
    token_ids: Vec<u32>,
    content: Vec<TokenLogprob>,
    finish_reason: Option<String>,
    weight_versions: Option<Vec<VersionSpan>>,
    grammar: Option<Applied>,
    routed_experts: Option<String>,
}

impl Assembly {
    pub(crate) fn new(max_tokens: u32) -> Assembly {
        Assembly {
            max_tokens: max_tokens as usize,
            ..Assembly::default()
        }
    }

    /// The last event may report the experts of so many tokens.
    pub(crate) fn with_experts(mut self, rows: usize) -> Assembly {
        self.experts_rows = rows;
        self
    }

    /// The tokens that the bytes completed.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<(&[u32], &[TokenLogprob]), EngineError> {
        let before = self.token_ids.len();
        self.buffer.extend_from_slice(bytes);
        let mut begin = 0;
        while let Some(length) = find_end(&self.buffer[begin..]) {
            let event = begin..begin + length;
            begin += length + 2;
            let part = parse(&self.buffer[event])?;
            self.add(part);
            if self.token_ids.len() > self.max_tokens {
                return Err(too_many(self.max_tokens));
            }
        }
        self.buffer.drain(..begin);
        let most = LARGEST_EVENT.saturating_add(self.experts_rows.saturating_mul(BYTES_A_ROW));
        if self.buffer.len() > most {
            return Err(malformed("an event of the stream does not end".into()));
        }
        if self.content.len() != self.token_ids.len() {
            let problem = "the log-probabilities are not those of the sampled tokens";
            return Err(malformed(problem.into()));
        }
        Ok((&self.token_ids[before..], &self.content[before..]))
    }

    fn add(&mut self, part: Option<Part>) {
        let Some(part) = part else {
            return;
        };
        self.token_ids.extend(part.token_ids);
        let content = part.logprobs.map(|logprobs| logprobs.content);
        self.content.extend(content.unwrap_or_default());
        self.finish_reason = part.finish_reason.or(self.finish_reason.take());
        self.weight_versions = part.weight_versions.or(self.weight_versions.take());
        self.grammar = part.grammar.or(self.grammar.take());
        self.routed_experts = part.routed_experts.or(self.routed_experts.take());
    }

    /// The whole answer. An answer that was cut off, or that only the engine ended, is an error, and stays here.
    pub(crate) fn finish(&mut self, ended_by_us: bool) -> Result<Choice, EngineError> {
        let tokens = self.token_ids.len();
        match self.finish_reason.as_deref() {
            None => Err(EngineError::CutOff { tokens }),
            Some("abort" | "error") if !ended_by_us => Err(EngineError::Aborted { tokens }),
            Some(_) => Ok(self.take()),
        }
    }

    /// The tokens that have come.
    pub(crate) fn take(&mut self) -> Choice {
        let all = std::mem::take(self);
        Choice {
            token_ids: all.token_ids,
            finish_reason: all.finish_reason,
            logprobs: Some(Logprobs {
                content: all.content,
            }),
            weight_versions: all.weight_versions,
            grammar: all.grammar,
            routed_experts: all.routed_experts,
        }
    }
}

fn find_end(bytes: &[u8]) -> Option<usize> {
    let mut from = 0;
    while let Some(at) = bytes[from..].iter().position(|byte| *byte == b'\n') {
        if bytes.get(from + at + 1) == Some(&b'\n') {
            return Some(from + at);
        }
        from += at + 1;
    }
    None
}

/// `None` for events that carry no tokens: comments, usage, the end mark.
fn parse(event: &[u8]) -> Result<Option<Part>, EngineError> {
    let Some(data) = event.strip_prefix(b"data: ") else {
        return Ok(None);
    };
    if data == b"[DONE]" {
        return Ok(None);
    }
    let chunk: Chunk =
        serde_json::from_slice(data).map_err(|error| malformed(format!("the stream: {error}")))?;
    if let Some(error) = chunk.error {
        // vLLM has sent status 200 by then; the status that it meant is in the error.
        let status = error["code"].as_u64().and_then(|code| code.try_into().ok());
        return Err(EngineError::Status {
            call: "generate",
            status: status.unwrap_or(500),
            message: error["message"].as_str().unwrap_or_default().to_owned(),
        });
    }
    let mut choices = chunk.choices;
    match choices.len() {
        0 => Ok(None),
        1 => Ok(choices.pop()),
        n => Err(malformed(format!("{n} choices instead of one"))),
    }
}

fn too_many(max_tokens: usize) -> EngineError {
    malformed(format!(
        "more tokens came than the {max_tokens} that were asked for"
    ))
}

fn malformed(problem: String) -> EngineError {
    EngineError::Malformed {
        call: "generate",
        problem,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STREAM: &str = concat!(
        "data: {\"choices\":[{\"token_ids\":[5],\"logprobs\":{\"content\":[{\"token_id\":5,\"logprob\":-1.0}]}}]}\n\n",
        ": a comment\n\n",
        "data: {\"choices\":[{\"routed_experts\":\"rows\",\"token_ids\":[6,7],\"logprobs\":{\"content\":[{\"token_id\":6,\"logprob\":-2.0},",
        "{\"token_id\":7,\"logprob\":-3.0}]},\"finish_reason\":\"stop\",",
        "\"weight_versions\":[{\"version\":\"3\",\"start\":0,\"end\":3}]}]}\n\n",
        "data: {\"choices\":[],\"usage\":{}}\n\ndata: [DONE]\n\n"
    );

    proptest! {
        #[test]
        fn an_answer_is_the_same_however_its_bytes_are_split(cuts in prop::collection::vec(0..STREAM.len(), 0..8)) {
            let mut cuts = cuts;
            cuts.extend([0, STREAM.len()]);
            cuts.sort_unstable();
            let mut assembly = Assembly::new(3);
            let mut seen = Vec::new();
            for pair in cuts.windows(2) {
                let (ids, logprobs) = assembly.push(&STREAM.as_bytes()[pair[0]..pair[1]]).expect("is a stream");
                prop_assert_eq!(ids.len(), logprobs.len());
                seen.extend_from_slice(ids);
            }
            prop_assert_eq!(seen, [5, 6, 7]);
            let choice = assembly.finish(false).expect("is whole");
            prop_assert_eq!(choice.token_ids, [5, 6, 7]);
            prop_assert_eq!(choice.finish_reason.as_deref(), Some("stop"));
            prop_assert_eq!(choice.routed_experts.as_deref(), Some("rows"));
        }
    }

    #[test]
    fn an_invalid_stream_is_refused() {
        let refused = |text: &str| match Assembly::new(3).push(text.as_bytes()) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{text} was taken"),
        };
        assert!(refused("data: {\n\n").contains("the stream"));
        let error = "data: {\"error\": {\"message\": \"too long\", \"code\": 400}}\n\n";
        assert!(refused(error).contains("status 400: too long"));
        let without = "data: {\"choices\":[{\"token_ids\":[5]}]}\n\n";
        assert!(refused(without).contains("log-probabilities"));
        assert!(matches!(
            Assembly::default().finish(false),
            Err(EngineError::CutOff { tokens: 0 })
        ));
    }
}
