//! Servers that answer: the route of the run's engines, and clients of other servers.

use super::parse_base_url;
use primerl_service::config_error::{ConfigError, field};
use serde::de::value::SeqAccessDeserializer;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;

/// Which side turns messages into tokens, and what the answer contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientType {
    /// Our renderer makes the ids; engines take and give token ids.
    Renderer,
    /// The engine renders, and reports the ids of the prompt and of the sample.
    OpenaiChatCompletionsToken,
    /// Messages in, text out.
    OpenaiChatCompletions,
}

impl ClientType {
    pub fn as_str(self) -> &'static str {
        match self {
            ClientType::Renderer => "renderer",
            ClientType::OpenaiChatCompletionsToken => "openai_chat_completions_token",
            ClientType::OpenaiChatCompletions => "openai_chat_completions",
        }
    }

    /// The client types of the run's own engines.
    pub fn check_for_training(self) -> Result<(), ConfigError> {
        match self {
            ClientType::Renderer | ClientType::OpenaiChatCompletionsToken => Ok(()),
            ClientType::OpenaiChatCompletions => Err(field(
                "client_type",
                "is openai_chat_completions, whose answers are text: without the ids and log-probabilities of the \
                 sampled tokens nothing can be trained",
                "use renderer or openai_chat_completions_token; an evaluation environment may have a client of that \
                 type (eval.env.client)",
            )),
        }
    }
}

/// One server that is not an engine of the run. The same table wherever there is one.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientConfig {
    /// URLs as SDKs take them, with `/v1` if the server has it; several if any of them may be asked.
    #[serde(rename = "base_url", deserialize_with = "one_or_many")]
    pub base_urls: Vec<String>,
    /// The name of the model there.
    pub model: String,
    /// The environment variable that holds the key; `None` sends none.
    pub api_key_env: Option<String>,
    /// Which route to use; `None`: the one that the server's purpose needs.
    pub client_type: Option<ClientType>,
    /// Longest time of one answer, seconds.
    pub timeout_s: f64,
}

fn one_or_many<'de, D: Deserializer<'de>>(values: D) -> Result<Vec<String>, D::Error> {
    struct OneOrMany;

    impl<'de> Visitor<'de> for OneOrMany {
        type Value = Vec<String>;

        fn expecting(&self, to: &mut fmt::Formatter) -> fmt::Result {
            to.write_str("a URL or a list of URLs")
        }

        fn visit_str<E>(self, value: &str) -> Result<Vec<String>, E> {
            Ok(vec![value.to_owned()])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, values: A) -> Result<Vec<String>, A::Error> {
            Vec::deserialize(SeqAccessDeserializer::new(values))
        }
    }

    values.deserialize_any(OneOrMany)
}

impl ClientConfig {
    /// `name` is that of the table; `wanted` is the client type that the server's purpose needs.
    pub fn validate(&self, name: &str, wanted: ClientType) -> Result<(), ConfigError> {
        let key = |key: &str| format!("{name}.{key}");
        self.validate_urls(&key("base_url"), wanted)?;
        let given = self.client_type.unwrap_or(wanted);
        if given != wanted {
            let why = match wanted {
                ClientType::Renderer => {
                    "but a teacher of training_mode = \"opd\" is an engine that gives log-probabilities of token ids"
                }
                _ => "which is for engines: messages go to this server, and text comes back",
            };
            let problem = format!("is {}, {why}", given.as_str());
            let hint = format!("use {}, or unset it", wanted.as_str());
            return Err(field(&key("client_type"), problem, hint));
        }
        Ok(())
    }

    fn validate_urls(&self, key: &str, wanted: ClientType) -> Result<(), ConfigError> {
        let hint = "give a URL like http://host:port/v1";
        let mut seen = Vec::new();
        for url in &self.base_urls {
            let url = parse_base_url(url).map_err(|problem| field(key, problem, hint))?;
            // Scoring has its route outside the OpenAI prefix: URLs with and without the prefix are the same server.
            let root = url.strip_suffix("/v1").unwrap_or(&url).to_owned();
            if seen.contains(&root) {
                let problem = format!("names {root} twice");
                return Err(field(key, problem, "name each server once"));
            }
            seen.push(root);
        }
        match (seen.len(), wanted) {
            (0, _) => Err(field(key, "names no server", hint)),
            (1, _) | (_, ClientType::Renderer) => Ok(()),
            (count, _) => Err(field(
                key,
                format!(
                    "names {count} servers, and only a teacher that scores (training_mode = \"opd\") may be several"
                ),
                "give one URL; a proxy in front of several servers has one",
            )),
        }
    }
}
