//! What a server says of its models, as OpenAI's `/v1/models`.

use serde::Deserialize;

#[derive(Deserialize)]
pub struct Models {
    pub data: Vec<ModelCard>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct ModelCard {
    pub id: String,
    /// Of an adapter: the model that it adapts.
    pub parent: Option<String>,
    /// Prompt and answer together, tokens.
    pub max_model_len: Option<u32>,
}
