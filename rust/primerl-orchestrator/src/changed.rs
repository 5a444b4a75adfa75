//! Whether a run is resumed with the config that it was begun with, and else which key has another value.

use crate::failure::RunError;
use primerl_record::journal::Identity;
use std::path::Path;

/// Whether the identity's entry of this name may change, too. Journals of earlier versions could hold it.
fn may_change(name: &str, run: &Identity) -> bool {
    let is_interval =
        name.starts_with("environments.") && name.ends_with(".role.evaluate.interval");
    // Training environments come first.
    let only_evaluates = !run.contains_key("environments.0.role");
    is_interval || (name == "batch_size" && only_evaluates)
}

pub(crate) fn same_run(folder: &Path, was: &Identity, is: &Identity) -> Result<(), RunError> {
    let names = was.keys().chain(is.keys());
    let Some(name) = names
        .into_iter()
        .find(|name| was.get(*name) != is.get(*name) && !may_change(name, was))
    else {
        return Ok(());
    };
    let value = |identity: &Identity| {
        identity
            .get(name)
            .map_or_else(|| UNSET.to_owned(), String::clone)
    };
    let (name, was, is) = keyed(name, value(was), value(is));
    Err(RunError::Changed {
        path: folder.parent().unwrap_or(folder).to_owned(),
        name,
        was,
        is,
    })
}

const UNSET: &str = "not set";

/// A name of the identity as a key of the environment, which is its number in core's list, with both values.
fn keyed(name: &str, was: String, is: String) -> (String, String, String) {
    let Some((what, number)) = name.split_once(" of environment ") else {
        return (name.to_owned(), was, is);
    };
    let of_environment = |key: &str| format!("environments.{number}.{key}");
    match what {
        "sampling" => {
            let (before, now) = (sampled(&was), sampled(&is));
            let mut pairs = before.into_iter().zip(now);
            let (before, now) = pairs
                .find(|(before, now)| before != now)
                .unwrap_or((("temperature", &was), ("temperature", &is)));
            let key = of_environment(&format!("sampling.{}", now.0));
            (key, plain(before.1), plain(now.1))
        }
        "truncated sampling" => (of_environment("sampling.truncated"), was, is),
        "chat_template_kwargs" => (of_environment("sampling.chat_template_kwargs"), was, is),
        "demonstrations" => (of_environment("demonstration"), was, is),
        // Its environment is given by name.
        _ => (name.to_owned(), was, is),
    }
}

/// The fields of `Sampling { temperature: 1.0, max_tokens: 12, rollout_max_tokens: None }`, as `identity` writes it.
fn sampled(text: &str) -> Vec<(&str, &str)> {
    let inner = text.strip_prefix("Sampling { ");
    let inner = inner.and_then(|text| text.strip_suffix(" }"));
    let fields = inner.unwrap_or_default().split(", ");
    fields.filter_map(|one| one.split_once(": ")).collect()
}

fn plain(value: &str) -> String {
    let given = value.strip_prefix("Some(");
    match given.and_then(|text| text.strip_suffix(')')) {
        Some(given) => given.to_owned(),
        None if value == "None" => UNSET.to_owned(),
        None => value.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_of_an_environments_sampling_is_named_by_its_key() {
        let of = |max_tokens: u32, most: Option<u32>| {
            format!(
                "Sampling {{ temperature: 1.0, max_tokens: {max_tokens}, rollout_max_tokens: {most:?} }}"
            )
        };
        let name = "sampling of environment 2";
        let (key, was, is) = keyed(name, of(12, None), of(20, None));
        assert_eq!(key, "environments.2.sampling.max_tokens");
        assert_eq!((&*was, &*is), ("12", "20"));
        let (key, was, is) = keyed(name, of(12, None), of(12, Some(90)));
        assert_eq!(key, "environments.2.sampling.rollout_max_tokens");
        assert_eq!((&*was, &*is), ("not set", "90"));
        // One environment more.
        let (key, was, is) = keyed(name, UNSET.to_owned(), of(12, None));
        assert_eq!(key, "environments.2.sampling.temperature");
        assert_eq!((&*was, &*is), ("not set", &*of(12, None)));
        for (name, key) in [
            (
                "demonstrations of environment 0",
                "environments.0.demonstration",
            ),
            ("teacher of environment a", "teacher of environment a"),
            ("seed", "seed"),
        ] {
            assert_eq!(keyed(name, "1".into(), "2".into()).0, key);
        }
    }
}
