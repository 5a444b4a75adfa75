//! No type has a field that the classes have no key for: no file could set it, and no page would name it.

use super::{ROOT, sample};
use crate::config::*;
use primerl_core::config::{
    Admission, Buffer, Echo, EnvironmentConfig, Evaluation, LengthPenalty, RunConfig,
};
use primerl_engines::clients::ClientConfig;
use primerl_gateway::RolloutLimits;
use serde::de::value::Error;
use serde::de::{Deserialize, Deserializer, Error as _, Visitor};
use serde::forward_to_deserialize_any;
use std::collections::BTreeSet;
use std::fmt::Debug;

/// Refuses to be read, by the names of the fields that it is asked for.
struct Asked;

impl<'de> Deserializer<'de> for Asked {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        Err(Error::custom("asked for no fields"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Error> {
        Err(Error::custom(fields.join(" ")))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct
        seq tuple tuple_struct map enum identifier ignored_any
    }
}

type Names = BTreeSet<String>;

fn fields<T: Deserialize<'static>>() -> Names {
    let asked = T::deserialize(Asked).err().expect("is never read");
    asked.to_string().split(' ').map(str::to_owned).collect()
}

/// The same of a type with a flattened field, which is asked for as a table: its own names are in what it prints.
fn around<T: Deserialize<'static>>(whole: &impl Debug, flattened: &str) -> Names {
    let printed = format!("{whole:#?}");
    let lines = printed.lines().filter_map(|line| line.strip_prefix("    "));
    let names = lines.filter_map(|line| line.split_once(':'));
    let names = names.filter(|(name, _)| !name.starts_with([' ', '}', ']', ')']));
    let mut found: Names = names.map(|(name, _)| name.to_owned()).collect();
    assert!(found.remove(flattened), "{printed}");
    found.extend(fields::<T>());
    found
}

fn keys(class: &str) -> Names {
    let node = match class {
        "" => &*ROOT,
        _ => &ROOT.definitions[class],
    };
    node.properties.keys().cloned().collect()
}

#[test]
fn no_field_is_without_a_key() {
    let config: Config = sample(&ROOT).try_into().expect("every key is known");
    let (trained, evaluated) = (&config.train.env[0], &config.eval.env[0]);
    for (class, found) in [
        ("", around::<RunConfig>(&config, "run")),
        ("Buffer", around::<Buffer>(&config.buffer, "core")),
        (
            "ServedTrainSource",
            around::<EnvironmentConfig>(trained, "own"),
        ),
        (
            "ServedEvaluationSource",
            around::<Evaluation>(evaluated, "measured"),
        ),
        ("Admission", fields::<Admission>()),
        ("Client", fields::<ClientConfig>()),
        ("Demonstration", fields::<DemonstrationConfig>()),
        ("Echo", fields::<Echo>()),
        ("EvaluationSampling", fields::<EvalSamplingConfig>()),
        ("EvaluationSources", fields::<EvalConfig>()),
        ("LengthPenalty", fields::<LengthPenalty>()),
        ("Limits", fields::<RolloutLimits>()),
        ("Log", fields::<LogConfig>()),
        ("OrchestratorTimeouts", fields::<TimeoutsConfig>()),
        ("Parsers", fields::<ParsersConfig>()),
        ("Retention", fields::<RetentionConfig>()),
        ("Sampling", fields::<SamplingConfig>()),
        ("ServedModel", fields::<ModelConfig>()),
        ("Teacher", fields::<TeacherConfig>()),
        ("TrainSources", fields::<TrainConfig>()),
    ] {
        assert_eq!(found, keys(class), "{class}");
    }
}
