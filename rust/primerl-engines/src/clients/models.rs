//! The models that a server lists, as in OpenAI's `/v1/models`.

use serde::Deserialize;

#[derive(Deserialize)]
pub struct Models {
    pub data: Vec<ModelCard>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct ModelCard {
    pub id: String,
    /// The model that an adapter adapts.
    pub parent: Option<String>,
    /// Context length, prompt and answer together, tokens.
    pub max_model_len: Option<u32>,
}
