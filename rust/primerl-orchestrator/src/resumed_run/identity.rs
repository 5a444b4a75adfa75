//! What identifies a run: a folder's run is resumed only as what it is.

use crate::config::Config;
use primerl_engines::clients::ClientType;
use primerl_gateway::Sampling;
use primerl_record::journal::Identity;
use primerl_render::ControlTokenPolicy;
use xxhash_rust::xxh3::xxh3_64;

/// Fields of the core's config that do not identify a run: they may change between two starts.
const MAY_CHANGE: [&str; 3] = ["max_steps", "timeouts", "shared_prefixes"];

/// What must stay the same when a run resumes: the core's whole config except [`MAY_CHANGE`], how rollouts are sampled,
/// and the model's shape, tokenizer and template. Its weights are the trainer's: their hash is that of version 0.
pub(crate) fn identity(config: &Config, core: &primerl_core::Config) -> Identity {
    let mut identity = Identity::new();
    let mut values = serde_json::json!(core);
    if let Some(fields) = values.as_object_mut() {
        fields.retain(|field, _| !MAY_CHANGE.contains(&field.as_str()));
    }
    flatten("", &values, &mut identity);
    for (index, sampling) in config.samplings().iter().enumerate() {
        add_sampling(index, sampling, &mut identity);
    }
    // Defaults are omitted: runs from before these keys can be resumed.
    if config.client_type != ClientType::Renderer {
        identity.insert("client_type".into(), config.client_type.as_str().into());
    }
    if config.control_tokens == ControlTokenPolicy::Neutralize {
        identity.insert("control_tokens".into(), "neutralize".into());
    }
    add_servers(config, &mut identity);
    add_model_files(config, &mut identity);
    identity
}

/// The sampling of environment `index`.
fn add_sampling(index: usize, sampling: &Sampling, identity: &mut Identity) {
    let Sampling {
        temperature,
        max_tokens,
        rollout_max_tokens,
        replayed,
        template_kwargs,
        // It follows from the algorithm, which is part of the core's config.
        observes: _,
    } = sampling;
    // As an earlier version with fewer settings wrote it: its runs can be resumed.
    let sampled = format!(
        "Sampling {{ temperature: {temperature:?}, max_tokens: {max_tokens:?}, rollout_max_tokens: \
         {rollout_max_tokens:?} }}"
    );
    identity.insert(format!("sampling of environment {index}"), sampled);
    if let Some(truncation) = replayed {
        let name = format!("truncated sampling of environment {index}");
        identity.insert(name, format!("{truncation:?}"));
    }
    if let Some(kwargs) = template_kwargs {
        let name = format!("chat_template_kwargs of environment {index}");
        identity.insert(name, serde_json::json!(kwargs).to_string());
    }
}

/// Servers and demonstrations that the policy learns from, and servers that are measured.
fn add_servers(config: &Config, identity: &mut Identity) {
    if let Some(teacher) = &config.teacher {
        let name = &teacher.client.model;
        // The URL may change: a server that was restarted has another port.
        identity.insert("teacher".into(), name.clone());
    }
    for (environment, shown) in config.demonstrations() {
        let name = format!("demonstrations of environment {}", environment.0);
        identity.insert(name, format!("{} in {:?}", shown.key, shown.template));
    }
    for environment in &config.train.env {
        if let Some(teacher) = &environment.teacher {
            let name = format!("teacher of environment {}", environment.name());
            identity.insert(name, teacher.client.model.clone());
        }
    }
    for environment in &config.eval.env {
        if let Some(client) = &environment.client {
            let name = format!("client of evaluation environment {}", environment.name());
            let server = format!("{} at {}", client.model, client.base_urls.join(", "));
            identity.insert(name, server);
        }
    }
}

fn add_model_files(config: &Config, identity: &mut Identity) {
    for name in [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ] {
        // Which of them a model has is checked in another place.
        if let Ok(bytes) = std::fs::read(config.model.path.join(name)) {
            let digest = format!("{:016x}", xxh3_64(&bytes));
            identity.insert(format!("the model's {name}"), digest);
        }
    }
}

pub(super) fn flatten(prefix: &str, value: &serde_json::Value, into: &mut Identity) {
    let mut nested = |key: &str, value: &serde_json::Value| match prefix {
        "" => flatten(key, value, into),
        prefix => flatten(&format!("{prefix}.{key}"), value, into),
    };
    match value {
        serde_json::Value::Object(fields) => {
            fields.iter().for_each(|(key, value)| nested(key, value));
        }
        serde_json::Value::Array(items) => {
            let numbered = items.iter().enumerate();
            numbered.for_each(|(index, value)| nested(&index.to_string(), value));
        }
        value => {
            into.insert(prefix.to_owned(), value.to_string());
        }
    }
}
