//! A shared column of numbers in the journal: bytes, little-endian, in one piece. Element by element it would take a
//! quarter more room and ten times as long to read. Formats for people get a list of numbers.
//!
//! For serde's `with`.

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

/// A number of four bytes.
pub(crate) trait Number: Copy + Serialize + for<'de> Deserialize<'de> {
    fn to_bytes(self) -> [u8; 4];
    fn from_bytes(bytes: [u8; 4]) -> Self;
}

impl Number for u32 {
    fn to_bytes(self) -> [u8; 4] {
        self.to_le_bytes()
    }

    fn from_bytes(bytes: [u8; 4]) -> Self {
        u32::from_le_bytes(bytes)
    }
}

impl Number for f32 {
    fn to_bytes(self) -> [u8; 4] {
        self.to_le_bytes()
    }

    fn from_bytes(bytes: [u8; 4]) -> Self {
        f32::from_le_bytes(bytes)
    }
}

pub(crate) fn serialize<T: Number, S: Serializer>(
    column: &Arc<[T]>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    if serializer.is_human_readable() {
        return column.serialize(serializer);
    }
    let mut bytes = vec![0; 4 * column.len()];
    let (chunks, _) = bytes.as_chunks_mut::<4>();
    for (chunk, number) in chunks.iter_mut().zip(column.iter()) {
        *chunk = number.to_bytes();
    }
    serializer.serialize_bytes(&bytes)
}

pub(crate) fn deserialize<'de, T: Number, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Arc<[T]>, D::Error> {
    let reader = Reader(PhantomData);
    match deserializer.is_human_readable() {
        true => deserializer.deserialize_seq(reader),
        false => deserializer.deserialize_bytes(reader),
    }
}

struct Reader<T>(PhantomData<T>);

impl<'de, T: Number> Visitor<'de> for Reader<T> {
    type Value = Arc<[T]>;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("numbers of four bytes each")
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Arc<[T]>, E> {
        match bytes.as_chunks::<4>() {
            (chunks, []) => Ok(chunks.iter().map(|chunk| T::from_bytes(*chunk)).collect()),
            _ => Err(E::invalid_length(bytes.len(), &self)),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Arc<[T]>, A::Error> {
        let mut numbers = Vec::new();
        while let Some(number) = sequence.next_element()? {
            numbers.push(number);
        }
        Ok(numbers.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Serialize, Deserialize)]
    struct Columns {
        #[serde(with = "super")]
        ids: Arc<[u32]>,
        #[serde(with = "super")]
        logprobs: Arc<[f32]>,
    }

    /// Equal to the bit: a value that is no number is kept too.
    fn bits(column: &[f32]) -> Vec<u32> {
        column.iter().map(|value| value.to_bits()).collect()
    }

    proptest! {
        #[test]
        fn every_column_comes_back_to_the_bit(
            ids in prop::collection::vec(any::<u32>(), 0..300),
            values in prop::collection::vec(any::<u32>(), 0..300),
        ) {
            let logprobs: Arc<[f32]> = values.iter().map(|bits| f32::from_bits(*bits)).collect();
            let columns = Columns { ids: ids.clone().into(), logprobs };
            let written = rmp_serde::to_vec_named(&columns).expect("writes");
            let header = |n: usize| 2 + usize::from(4 * n > 255);
            let names = 1 + (1 + "ids".len()) + (1 + "logprobs".len());
            let expected = names + header(ids.len()) + header(values.len()) + 4 * (ids.len() + values.len());
            prop_assert_eq!(written.len(), expected, "four bytes a number");
            let read: Columns = rmp_serde::from_slice(&written).expect("reads");
            prop_assert_eq!(&read.ids[..], &ids[..]);
            prop_assert_eq!(bits(&read.logprobs), values);
            let cut = rmp_serde::from_slice::<Columns>(&written[..written.len() - 1]);
            prop_assert!(cut.is_err(), "a column that is cut short is refused");
        }
    }

    #[test]
    fn formats_for_people_get_numbers() {
        let columns = Columns {
            ids: [1, 2].into(),
            logprobs: [-0.5].into(),
        };
        let text = serde_json::to_string(&columns).expect("writes");
        assert_eq!(text, r#"{"ids":[1,2],"logprobs":[-0.5]}"#);
        let read: Columns = serde_json::from_str(&text).expect("reads");
        assert_eq!(
            (&read.ids[..], &read.logprobs[..]),
            (&[1, 2][..], &[-0.5][..])
        );
    }

    #[test]
    fn a_length_that_is_no_multiple_of_four_is_refused() {
        #[derive(Debug, Deserialize)]
        struct Ids {
            #[serde(with = "super")]
            #[allow(dead_code, reason = "it is not read")]
            ids: Arc<[u32]>,
        }
        let error = rmp_serde::from_slice::<Ids>(b"\x81\xa3ids\xc4\x03abc").expect_err("refused");
        assert!(error.to_string().contains("length 3"), "{error}");
    }
}
