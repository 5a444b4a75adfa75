//! Parses the body of a chat request.

use crate::fields::Fields;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Map;
use serde_json::value::RawValue;
use std::fmt;

/// The body; its largest parts are left as unparsed text.
pub(super) struct Body<'a> {
    pub messages: Option<Vec<&'a RawValue>>,
    pub tools: Option<&'a RawValue>,
    pub template_kwargs: Option<&'a RawValue>,
    pub documents: Option<&'a RawValue>,
    pub others: Fields,
}

impl<'de: 'a, 'a> Deserialize<'de> for Body<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(BodyVisitor)
    }
}

struct BodyVisitor;

impl<'de> Visitor<'de> for BodyVisitor {
    type Value = Body<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Body<'de>, A::Error> {
        let mut body = Body {
            messages: None,
            tools: None,
            template_kwargs: None,
            documents: None,
            others: Fields(Map::new()),
        };
        while let Some(name) = map.next_key::<String>()? {
            match name.as_str() {
                "messages" => once(&mut body.messages, "messages", &mut map)?,
                "tools" => once(&mut body.tools, "tools", &mut map)?,
                "chat_template_kwargs" => {
                    once(&mut body.template_kwargs, "chat_template_kwargs", &mut map)?;
                }
                "documents" => once(&mut body.documents, "documents", &mut map)?,
                _ => {
                    let value = map.next_value()?;
                    let added = body.others.add(name, value);
                    added.map_err(serde::de::Error::custom)?;
                }
            }
        }
        Ok(body)
    }
}

/// If there are two lists, the conversation could continue from only one of them.
fn once<'de, T: Deserialize<'de>, A: MapAccess<'de>>(
    field: &mut Option<T>,
    name: &'static str,
    map: &mut A,
) -> Result<(), A::Error> {
    if field.is_some() {
        return Err(serde::de::Error::duplicate_field(name));
    }
    *field = map.next_value()?;
    Ok(())
}
