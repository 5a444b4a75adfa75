//! Whether a server is the run's teacher: the model's name, its vocabulary, room for the longest sample, and the same
//! log-probabilities of a text as the other servers.

use primerl_engines::clients::{EndpointError, Scorer, distance};
use primerl_render::Renderer;
use std::time::Duration;

/// Words, letters, digits, spaces, newlines, accents, other scripts and an emoji: any two vocabularies differ on some
/// of these.
const PROBE: &str = "The quick brown fox jumps over the lazy dog, and then there is another thing: 12345.678 + 90\n\n\tif (x != y) \
                     { return  \"Größe\"; }\r\n# Привет, мир! 知識は力なり 🙂 https://example.org/a_b?c=d%20e \\begin{equation}";
/// Number of its tokens that are scored.
const SCORED: usize = 64;
/// Servers of one model differ by half precision and other kernels, a tenth of this; servers of two models differ by
/// more. Mean of the differences, nats.
const SAME_MODEL: f64 = 0.1;

#[derive(Debug, thiserror::Error)]
pub(super) enum ProofError {
    /// It may be proved later.
    #[error(transparent)]
    Outage(EndpointError),
    #[error("{0}")]
    Wrong(String),
}

impl ProofError {
    fn of(error: EndpointError) -> ProofError {
        match error.is_outage() {
            true => ProofError::Outage(error),
            false => ProofError::Wrong(error.to_string()),
        }
    }
}

/// A server's answers about the text.
#[derive(Clone, Debug)]
pub(super) struct Said {
    pub name: String,
    pub scores: Vec<f32>,
    /// Context length, prompt and answer together, tokens; `None` if the server does not say.
    pub max_model_len: Option<u32>,
    /// Whether it is known to have the run's vocabulary; unknown if it has no route to ask.
    pub knows_vocabulary: bool,
}

/// Asks a server for all that it can report by itself; what takes longer than `longest` has failed.
pub(super) async fn ask(
    scorer: &Scorer,
    renderer: &Renderer,
    longest: Duration,
) -> Result<Said, ProofError> {
    let asked = tokio::time::timeout(longest, ask_all(scorer, renderer)).await;
    asked.unwrap_or_else(|_| {
        let problem = format!("it has not scored a short text within {longest:?}");
        Err(ProofError::Outage(EndpointError::Transport(problem)))
    })
}

async fn ask_all(scorer: &Scorer, renderer: &Renderer) -> Result<Said, ProofError> {
    let refused = |(error, _)| ProofError::of(error);
    let max_model_len = scorer.max_model_len().await.map_err(refused)?;
    let theirs = scorer.tokenize(PROBE).await.map_err(refused)?;
    let encoded = renderer.tokenizer().encode(PROBE);
    let ours = encoded.map_err(|error| ProofError::Wrong(error.to_string()))?;
    if theirs.as_ref().is_some_and(|theirs| *theirs != ours) {
        return Err(ProofError::Wrong(
            "it makes other tokens of a text than the model; its log-probabilities would be of other tokens".into(),
        ));
    }
    let scores = scorer
        .score(&ours[..ours.len().min(scored(max_model_len))])
        .await;
    Ok(Said {
        name: scorer.describe(),
        scores: scores.map_err(refused)?,
        max_model_len,
        knows_vocabulary: theirs.is_some(),
    })
}

/// Tokens that are scored, in addition to the one that is always sampled.
fn scored(max_model_len: Option<u32>) -> usize {
    max_model_len.map_or(SCORED, |most| SCORED.min(most.saturating_sub(1) as usize))
}

/// Whether two servers, or one server at two times, have the same model.
pub(super) fn agree(before: &Said, now: &Said) -> Result<(), ProofError> {
    let (mean, _) = distance(&before.scores, &now.scores);
    // `!(x <= max)` instead of `x > max`, so that NaN fails.
    if mean <= SAME_MODEL {
        return Ok(());
    }
    let whose = match before.name == now.name {
        true => "its own earlier ones".to_owned(),
        false => format!("those of {}", before.name),
    };
    let count = before
        .scores
        .len()
        .min(now.scores.len())
        .saturating_sub(1)
        .max(1);
    Err(ProofError::Wrong(format!(
        "its log-probabilities of a text of {count} tokens differ by {mean:.3} nats on average from {whose} (up to \
         {SAME_MODEL} is rounding), so it serves another checkpoint; serve the same one everywhere"
    )))
}

/// It has room for `longest` tokens and the one that it always samples.
pub(super) fn has_room(max_model_len: u32, longest: u32) -> Result<(), ProofError> {
    if max_model_len > longest {
        return Ok(());
    }
    Err(ProofError::Wrong(format!(
        "it takes {max_model_len} tokens (max_model_len), one of which it samples itself, and a sample may have {longest} \
         (the lesser of seq_len and the engines' max_model_len): start it with a max_model_len of {} or more, or set \
         seq_len to {} or less",
        u64::from(longest) + 1,
        max_model_len.saturating_sub(1)
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use primerl_engines::clients::ClientConfig;

    fn said(name: &str, scores: &[f32]) -> Said {
        Said {
            name: name.into(),
            scores: scores.into(),
            max_model_len: None,
            knows_vocabulary: true,
        }
    }

    #[test]
    fn the_first_token_and_rounding_do_not_count() {
        let one = said("a", &[0.0, -1.0, -2.0]);
        assert!(agree(&one, &said("b", &[-9.0, -1.09, -2.09])).is_ok());
        let error = agree(&one, &said("b", &[0.0, -1.3, -2.0])).expect_err("is refused");
        let said_ = error.to_string();
        assert!(
            said_.contains("0.150 nats on average from those of a ("),
            "{said_}"
        );
        let error = agree(&one, &said("a", &[0.0, f32::NAN, -2.0])).expect_err("is refused");
        assert!(error.to_string().contains("from its own earlier ones"));
    }

    #[test]
    fn a_server_is_asked_for_no_more_than_it_takes() {
        let asked = [None, Some(1024), Some(65), Some(64), Some(1), Some(0)].map(scored);
        assert_eq!(asked, [64, 64, 64, 63, 0, 0]);
    }

    #[tokio::test]
    async fn a_proof_has_a_separate_timeout() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let chatml = primerl_render::testing::CHATML;
        let end = ("<|im_end|>", true);
        primerl_render::testing::write_model(folder.path(), &[end], &[], chatml, end.0, end.0)
            .expect("writes");
        let renderer = Renderer::load(folder.path()).expect("loads");
        // A server that accepts connections and never answers.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
        let config = ClientConfig {
            base_urls: vec![format!(
                "http://{}",
                listener.local_addr().expect("is bound")
            )],
            model: "big".into(),
            api_key_env: None,
            client_type: None,
            timeout_s: 600.0,
        };
        let scorers = Scorer::open_all("teacher.client", &config).expect("opens");
        let asked = ask(&scorers[0], &renderer, Duration::from_millis(50)).await;
        let error = asked.expect_err("does not answer");
        assert!(matches!(error, ProofError::Outage(_)), "{error}");
        assert!(error.to_string().contains("within 50ms"), "{error}");
    }

    #[test]
    fn a_sample_leaves_room_for_one_token() {
        assert!(has_room(1025, 1024).is_ok());
        let said = has_room(1024, 1024).expect_err("is refused").to_string();
        assert!(
            said.contains("max_model_len of 1025 or more, or set seq_len to 1023"),
            "{said}"
        );
    }
}
