//! One line of a file of metrics: its numbers by name, read directly from the text. A long run has millions of them,
//! and as JSON values they would need three times the memory.

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::fmt;

/// Fields that identify the line, and are not drawn themselves.
const NOT_DRAWN: [&str; 2] = ["step", "timestamp"];

pub(super) struct Line<'a> {
    pub step: u64,
    pub numbers: Vec<(Cow<'a, str>, f64)>,
}

impl<'a> Line<'a> {
    /// `None` if it is not an object, or has no step.
    pub(super) fn read(text: &'a [u8]) -> Option<Line<'a>> {
        let Fields(fields) = serde_json::from_slice(text).ok()?;
        let mut line = Line {
            step: u64::MAX,
            numbers: Vec::with_capacity(fields.len()),
        };
        for (name, value) in fields {
            match value {
                Field::Number(step) if name == "step" && step >= 0.0 => line.step = step as u64,
                Field::Number(_) if NOT_DRAWN.contains(&&*name) => {}
                Field::Number(number) => line.numbers.push((name, number)),
                // Metrics of the batch, in the orchestrator's own file.
                Field::Object(Fields(inner)) if name == "metrics" => {
                    for (name, value) in inner {
                        if let Field::Number(number) = value {
                            line.numbers.push((name, number));
                        }
                    }
                }
                Field::Object(_) | Field::Other => {}
            }
        }
        (line.step != u64::MAX).then_some(line)
    }
}

struct Fields<'a>(Vec<(Cow<'a, str>, Field<'a>)>);

enum Field<'a> {
    Number(f64),
    Object(Fields<'a>),
    Other,
}

struct Name<'a>(Cow<'a, str>);

struct FieldsVisitor;
struct FieldVisitor;
struct NameVisitor;

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Vec::new();
        while let Some((Name(name), value)) = map.next_entry()? {
            fields.push((name, value));
        }
        Ok(Fields(fields))
    }
}

impl<'de> Deserialize<'de> for Field<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FieldVisitor)
    }
}

impl<'de> Visitor<'de> for FieldVisitor {
    type Value = Field<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a value")
    }

    fn visit_f64<E>(self, value: f64) -> Result<Self::Value, E> {
        Ok(Field::Number(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Self::Value, E> {
        Ok(Field::Number(value as f64))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Self::Value, E> {
        Ok(Field::Number(value as f64))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
        Ok(Field::Other)
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Field::Other)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
        Ok(Field::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Self::Value, A::Error> {
        while values.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Field::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        FieldsVisitor.visit_map(map).map(Field::Object)
    }
}

impl<'de> Deserialize<'de> for Name<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(NameVisitor)
    }
}

impl<'de> Visitor<'de> for NameVisitor {
    type Value = Name<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a name")
    }

    fn visit_borrowed_str<E>(self, name: &'de str) -> Result<Self::Value, E> {
        Ok(Name(Cow::Borrowed(name)))
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        Ok(Name(Cow::Owned(name.to_owned())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_whatever_is_between_them() {
        let text = r#"{"step":3,"timestamp":1.5,"a":-1,"b":null,"c":"x","d":[1,{"e":2}],"f":true,"g\n":0.5,"h":{"i":1},
            "metrics":{"j":2.5,"k":null,"l":{"m":1}}}"#;
        let line = Line::read(text.as_bytes()).expect("is a line");
        assert_eq!(line.step, 3);
        let expected =
            [("a", -1.0), ("g\n", 0.5), ("j", 2.5)].map(|(name, value)| (Cow::from(name), value));
        assert_eq!(line.numbers, expected);
        for text in [
            "",
            "3",
            "[1]",
            "{}",
            r#"{"step":"3"}"#,
            r#"{"step":3"#,
            r#"{"step":-3}"#,
        ] {
            assert!(Line::read(text.as_bytes()).is_none(), "{text}");
        }
    }
}
