//! The column of a micro-batch's experts: only tokens whose experts are known have a row.

use super::MicroBatch;
use crate::experts::{ExpertsRun, ExpertsShape};

/// The known experts of a micro-batch of N tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertsColumn<'a> {
    pub shape: ExpertsShape,
    /// First token among the N, and the one after the last, for each of `ids`; in order, apart from each other.
    pub runs: Vec<(usize, usize)>,
    /// The rows of each run.
    pub ids: Vec<&'a [u8]>,
}

/// Engines of one run reported experts of different shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "engines reported experts of different models: {} layers with {} experts a token, and {} with {}; all engines of a \
     run have to serve one model",
    .0.layers, .0.chosen, .1.layers, .1.chosen
)]
pub struct ShapesDiffer(pub ExpertsShape, pub ExpertsShape);

impl ExpertsColumn<'_> {
    /// Size of the column, bytes.
    pub fn len(&self) -> usize {
        self.ids.iter().map(|ids| ids.len()).sum()
    }

    /// Never true of a micro-batch's.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }
}

impl MicroBatch {
    /// The experts that engines chose for the tokens; `None` where none are known.
    pub fn experts(&self) -> Result<Option<ExpertsColumn<'_>>, ShapesDiffer> {
        let mut column: Option<ExpertsColumn<'_>> = None;
        let mut start = 0;
        for weighted in self.sequences() {
            for run in weighted.sample.experts() {
                let ExpertsRun {
                    begin,
                    end,
                    shape,
                    ids,
                } = run;
                let column = column.get_or_insert_with(|| ExpertsColumn {
                    shape,
                    runs: Vec::new(),
                    ids: Vec::new(),
                });
                if column.shape != shape {
                    return Err(ShapesDiffer(column.shape, shape));
                }
                column.runs.push((start + begin, start + end));
                column.ids.push(ids);
            }
            start += weighted.sample.len();
        }
        Ok(column)
    }
}
