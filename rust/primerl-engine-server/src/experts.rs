//! The experts of a mixture that the model chose for tokens, reported with an answer as vLLM reports them.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// The experts of some tokens, one row each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertRows {
    pub layers: u16,
    /// Experts a token and layer.
    pub chosen: u16,
    /// Bytes of an id: 1 or 2.
    pub bytes: u8,
    /// Ids, little-endian: `[tokens, layers, chosen]`.
    pub ids: Vec<u8>,
}

impl ExpertRows {
    fn row(&self) -> usize {
        usize::from(self.layers) * usize::from(self.chosen) * usize::from(self.bytes)
    }

    /// Whether these are the rows of so many tokens.
    pub fn are_of(&self, tokens: usize) -> bool {
        matches!(self.bytes, 1 | 2) && self.row() > 0 && self.ids.len() == tokens * self.row()
    }

    fn rows(&self) -> usize {
        self.ids.len().checked_div(self.row()).unwrap_or(0)
    }

    /// The rows `from..to` of these.
    fn part(&self, from: usize, to: usize) -> ExpertRows {
        let end = (to * self.row()).min(self.ids.len());
        let begin = (from * self.row()).min(end);
        ExpertRows {
            ids: self.ids[begin..end].to_vec(),
            ..*self
        }
    }

    /// The base64 of a NumPy file.
    pub fn base64(&self) -> String {
        let kind = if self.bytes == 1 { "|u1" } else { "<u2" };
        let shape = (self.rows(), self.layers, self.chosen);
        let mut header =
            format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape:?}, }}");
        // Magic, version, length, header and newline end at a multiple of 64.
        let padding = (header.len() + 11).next_multiple_of(64) - header.len() - 11;
        header.extend(std::iter::repeat_n(' ', padding));
        header.push('\n');
        let mut file = b"\x93NUMPY\x01\x00".to_vec();
        file.extend((header.len() as u16).to_le_bytes());
        file.extend(header.as_bytes());
        file.extend(&self.ids);
        STANDARD.encode(file)
    }
}

/// The experts of a sequence's tokens, from its first on, as far as they were computed.
#[derive(Clone, Debug, Default)]
pub(crate) struct SequenceExperts(Option<ExpertRows>);

impl SequenceExperts {
    /// `step` has the rows of a whole batch; those of this sequence's tokens from `position` on begin at `first`. What is
    /// computed again, after a preemption, keeps the experts that it was sampled with.
    pub(crate) fn record(
        &mut self,
        step: &ExpertRows,
        first: usize,
        count: usize,
        position: usize,
    ) {
        let known = self.0.as_ref().map_or(0, ExpertRows::rows);
        let again = known.saturating_sub(position).min(count);
        let new = step.part(first + again, first + count);
        match &mut self.0 {
            Some(rows) => rows.ids.extend(new.ids),
            None => self.0 = Some(new),
        }
    }

    pub(crate) fn from(self, position: usize) -> Option<ExpertRows> {
        let rows = self.0?;
        Some(rows.part(position, rows.rows()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(ids: &[u8]) -> ExpertRows {
        ExpertRows {
            layers: 2,
            chosen: 1,
            bytes: 1,
            ids: ids.to_vec(),
        }
    }

    #[test]
    fn a_sequence_keeps_what_it_was_sampled_with() {
        let mut experts = SequenceExperts::default();
        // Another sequence's token comes first in the batch.
        experts.record(&rows(&[9, 9, 1, 2, 3, 4]), 1, 2, 0);
        experts.record(&rows(&[5, 6]), 0, 1, 2);
        // Computed again after a preemption, with one new token.
        experts.record(&rows(&[7, 7, 7, 7, 7, 7, 8, 8]), 0, 4, 0);
        let all = experts.clone().from(0).expect("is known");
        assert_eq!(all.ids, [1, 2, 3, 4, 5, 6, 8, 8]);
        assert_eq!(experts.from(3).expect("is known").ids, [8, 8]);
        assert!(SequenceExperts::default().from(0).is_none());
    }

    #[test]
    fn the_file_is_as_numpy_writes_it() {
        let file = STANDARD
            .decode(rows(&[1, 2, 3, 4]).base64())
            .expect("decodes");
        assert_eq!((file.len() - 4) % 64, 0);
        let text = String::from_utf8_lossy(&file[10..file.len() - 4]).into_owned();
        let expected = "{'descr': '|u1', 'fortran_order': False, 'shape': (2, 2, 1), }";
        assert_eq!(text.trim_end(), expected);
        assert_eq!(
            usize::from(file[8]) + 256 * usize::from(file[9]),
            text.len()
        );
        assert!(rows(&[1, 2, 3, 4]).are_of(2) && !rows(&[1, 2, 3]).are_of(2));
    }
}
