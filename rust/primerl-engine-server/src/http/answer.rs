//! From completions to bodies.

use super::structured::Applied;
use super::wire::*;
use crate::backend::ScoredToken;
use crate::experts::ExpertRows;
use crate::sequence::Completion;
use crate::versions::VersionSpan;
use serde_json::{Map, Value, json};

/// JSON has no infinity; vLLM writes this instead.
pub const NO_PROBABILITY: f32 = -9999.0;

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() {
        logprob
    } else {
        NO_PROBABILITY
    }
}

/// `logprobs` as asked for; `None` when not.
pub fn logprobs(tokens: &[ScoredToken], asked: Option<i64>) -> Option<Logprobs> {
    let asked = asked?;
    Some(Logprobs {
        content: tokens
            .iter()
            .map(|token| token_logprob(token, asked))
            .collect(),
    })
}

/// At most max(k, 1) entries: the sampled token first, then the most likely ones in rank order.
fn token_logprob(token: &ScoredToken, asked: i64) -> TokenLogprob {
    let own = Logprob {
        token_id: token.token_id,
        logprob: finite(token.logprob),
        rank: token.rank,
    };
    let most = match asked {
        ..0 => usize::MAX,
        asked => (asked.max(1) - 1) as usize,
    };
    let others = token.top.iter();
    let others = others.filter(|top| top.token_id != token.token_id);
    let others = others.take(most);
    let others = others.map(|top| Logprob {
        token_id: top.token_id,
        logprob: finite(top.logprob),
        rank: top.rank,
    });
    TokenLogprob {
        own,
        top_logprobs: std::iter::once(own).chain(others).collect(),
    }
}

/// One entry a prompt token, the first `null`; keys are token ids as strings, the actual token first.
pub fn prompt_logprobs(scores: &[ScoredToken]) -> Value {
    let entry = |logprob: f32, rank: u32| json!({"logprob": finite(logprob), "rank": rank, "decoded_token": ""});
    let scored = scores.iter().map(|token| {
        let mut entries = Map::with_capacity(1 + token.top.len());
        entries.insert(token.token_id.to_string(), entry(token.logprob, token.rank));
        for top in token
            .top
            .iter()
            .filter(|top| top.token_id != token.token_id)
        {
            entries.insert(top.token_id.to_string(), entry(top.logprob, top.rank));
        }
        Value::Object(entries)
    });
    Value::Array(std::iter::once(Value::Null).chain(scored).collect())
}

fn spans(versions: &[VersionSpan]) -> Vec<WireSpan<'_>> {
    versions
        .iter()
        .map(|span| WireSpan {
            version: &span.version,
            start: span.start,
            end: span.end,
        })
        .collect()
}

/// A finished choice with its tokens from `from` on.
pub fn final_choice<'a>(
    index: u32,
    completion: &'a Completion,
    from: usize,
    asked: Option<i64>,
    grammar: Option<&Applied>,
) -> Choice<'a> {
    let tokens = &completion.tokens[from.min(completion.tokens.len())..];
    Choice {
        index,
        finish_reason: Some(completion.finish.as_str()),
        stop_reason: completion.stop_token,
        token_ids: tokens.iter().map(|token| token.token_id).collect(),
        routed_experts: completion.experts.as_ref().map(ExpertRows::base64),
        sampling_mask: None,
        weight_versions: Some(spans(&completion.versions)),
        logprobs: logprobs(tokens, asked),
        grammar: grammar.cloned(),
    }
}

/// A choice that is not finished.
pub fn partial_choice(index: u32, tokens: &[ScoredToken], asked: Option<i64>) -> Choice<'static> {
    Choice {
        index,
        finish_reason: None,
        stop_reason: None,
        token_ids: tokens.iter().map(|token| token.token_id).collect(),
        routed_experts: None,
        sampling_mask: None,
        weight_versions: None,
        logprobs: logprobs(tokens, asked),
        grammar: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::TopToken;

    fn token() -> ScoredToken {
        let top = [74, 12, 5]
            .iter()
            .zip(1..)
            .map(|(&token_id, rank)| TopToken {
                token_id,
                logprob: -1.0,
                rank,
            });
        ScoredToken {
            token_id: 96,
            logprob: f32::NEG_INFINITY,
            rank: 63,
            top: top.collect(),
        }
    }

    #[test]
    fn sampled_token_comes_first_and_the_count_holds() {
        for (asked, expected) in [
            (0, vec![96]),
            (1, vec![96]),
            (3, vec![96, 74, 12]),
            (-1, vec![96, 74, 12, 5]),
        ] {
            let ids: Vec<u32> = token_logprob(&token(), asked)
                .top_logprobs
                .iter()
                .map(|l| l.token_id)
                .collect();
            assert_eq!(ids, expected, "logprobs={asked}");
        }
        assert_eq!(token_logprob(&token(), 0).own.logprob, NO_PROBABILITY);
    }

    #[test]
    fn prompt_entries_start_with_null_and_the_actual_token() {
        let value = prompt_logprobs(&[token()]);
        assert_eq!(value[0], Value::Null);
        let keys: Vec<&String> = value[1].as_object().unwrap().keys().collect();
        assert_eq!(keys, ["96", "74", "12", "5"]);
    }
}
