//! Which label the weights have, and the update protocol: start, update, finish.
//!
//! Tokens are tagged with an *epoch*, a counter that moves when weights or label change; labels belong to epochs.
//! So the label that `finish` brings holds from the moment the weights were loaded, even if steps ran in between.

use std::sync::Arc;

/// Index of one state of the weights, counted from the start of the engine.
pub type Epoch = u32;

/// `[start, end)` of output tokens sampled under one label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionSpan {
    pub version: Arc<str>,
    pub start: u32,
    pub end: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Update {
    None,
    Started,
    Loaded,
}

/// A call of the protocol that came out of order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    #[error(
        "start_weight_update called while a weight update is already active. Call finish_weight_update first."
    )]
    AlreadyStarted,
    #[error("start_weight_update must be called before update_weights.")]
    NotStarted,
    #[error("finish_weight_update called without a matching start_weight_update.")]
    NothingToFinish,
}

#[derive(Clone, Debug)]
pub struct Versions {
    labels: Vec<Arc<str>>,
    update: Update,
}

impl Default for Versions {
    fn default() -> Self {
        Versions {
            labels: vec!["default".into()],
            update: Update::None,
        }
    }
}

impl Versions {
    pub fn epoch(&self) -> Epoch {
        (self.labels.len() - 1) as Epoch
    }

    pub fn label(&self) -> Arc<str> {
        self.labels[self.labels.len() - 1].clone()
    }

    pub fn start(&mut self) -> Result<(), OrderError> {
        if self.update != Update::None {
            return Err(OrderError::AlreadyStarted);
        }
        self.update = Update::Started;
        Ok(())
    }

    pub fn check_started(&self) -> Result<(), OrderError> {
        if self.update == Update::None {
            Err(OrderError::NotStarted)
        } else {
            Ok(())
        }
    }

    /// New weights are in the model. Until `finish` brings a label they go by the old one.
    pub fn loaded(&mut self) {
        self.labels.push(self.label());
        self.update = Update::Loaded;
    }

    /// The update failed and is over; the label stays.
    pub fn failed(&mut self) {
        self.update = Update::None;
    }

    pub fn finish(&mut self, label: Option<String>) -> Result<(), OrderError> {
        let was_loaded = match self.update {
            Update::None => return Err(OrderError::NothingToFinish),
            Update::Started => false,
            Update::Loaded => true,
        };
        self.update = Update::None;
        match (label, was_loaded) {
            (None, _) => {}
            (Some(label), true) => {
                let last = self.labels.len() - 1;
                self.labels[last] = label.into();
            }
            (Some(label), false) => self.labels.push(label.into()),
        }
        Ok(())
    }

    /// Moves the label only.
    pub fn set_label(&mut self, label: String) {
        self.labels.push(label.into());
    }

    /// Spans of `runs` (epoch, number of tokens), with runs of equal label joined.
    pub fn spans(&self, runs: &[(Epoch, u32)]) -> Vec<VersionSpan> {
        let mut spans: Vec<VersionSpan> = Vec::with_capacity(runs.len());
        let mut start = 0;
        for &(epoch, count) in runs {
            let label = &self.labels[epoch as usize];
            let end = start + count;
            match spans.last_mut() {
                Some(last) if last.version == *label => last.end = end,
                _ => spans.push(VersionSpan {
                    version: label.clone(),
                    start,
                    end,
                }),
            }
            start = end;
        }
        spans
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(version: &str, start: u32, end: u32) -> VersionSpan {
        VersionSpan {
            version: version.into(),
            start,
            end,
        }
    }

    #[test]
    fn label_of_finish_holds_from_the_load() {
        let mut versions = Versions::default();
        versions.start().unwrap();
        let before = versions.epoch();
        versions.loaded();
        let between = versions.epoch();
        versions.finish(Some("1".into())).unwrap();
        let after = versions.epoch();
        assert_eq!(
            versions.spans(&[(before, 3), (between, 2), (after, 4)]),
            [span("default", 0, 3), span("1", 3, 9)]
        );
    }

    #[test]
    fn order_errors_and_failed_update() {
        let mut versions = Versions::default();
        assert_eq!(versions.check_started(), Err(OrderError::NotStarted));
        assert_eq!(
            versions.finish(Some("1".into())),
            Err(OrderError::NothingToFinish)
        );
        versions.start().unwrap();
        assert_eq!(versions.start(), Err(OrderError::AlreadyStarted));
        versions.failed();
        assert_eq!(
            versions.finish(Some("1".into())),
            Err(OrderError::NothingToFinish)
        );
        assert_eq!(&*versions.label(), "default");
        versions.start().unwrap();
    }

    #[test]
    fn equal_labels_join_and_no_tokens_give_no_span() {
        let mut versions = Versions::default();
        versions.set_label("default".into());
        assert_eq!(versions.spans(&[(0, 2), (1, 3)]), [span("default", 0, 5)]);
        assert_eq!(versions.spans(&[]), []);
    }
}
