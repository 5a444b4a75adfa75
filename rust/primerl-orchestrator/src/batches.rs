//! The batches of a run: written when they are cut, checked whenever they are read from the spool. The journal knows
//! the checksum of each ([`Event::BatchWritten`]); one that is missing, damaged or of another run is cut again from the
//! journal, or refused if the journal does not reach back so far.

use crate::failure::RunError;
use bytes::Bytes;
use primerl_core::pack::PackedBatch;
use primerl_core::{Core, Event, Step};
use primerl_record::batch::{checksum, encode, is_of, is_unchecked};
use primerl_record::journal;
use primerl_record::spool::Spool;
use primerl_service::inbox::DriverHandle;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Encoded steps that are kept for ranks that lag behind or ask again; older ones are read from the spool.
const CACHED_STEPS: usize = 3;

pub(crate) struct Batches {
    spool: Spool,
    journal: PathBuf,
    driver: DriverHandle,
    /// What the journal knows of each rank's part.
    known: BTreeMap<Step, Vec<u64>>,
    /// The encoded bodies of all ranks, by step.
    encoded: BTreeMap<Step, Vec<Bytes>>,
}

/// Why the spool's files cannot be used as they are.
enum Problem {
    /// The journal has no checksum of it: the run was killed before the checksum was recorded, or an earlier version
    /// wrote the batch.
    Unknown(Bytes),
    Wrong(String),
}

impl Batches {
    /// `core`: the state at the journal's end.
    pub fn new(output_dir: &Path, core: &Core, driver: DriverHandle) -> Batches {
        Batches {
            spool: Spool::new(output_dir, core.config().run.data_ranks),
            journal: output_dir.join("journal"),
            driver,
            known: core.batch_checksums().clone(),
            encoded: BTreeMap::new(),
        }
    }

    pub fn spool(&self) -> &Spool {
        &self.spool
    }

    /// Ensures that the batch is in the spool. After a restart it may be there already.
    pub fn add(&mut self, batch: &PackedBatch) -> Result<(), RunError> {
        if self.is_as_known(batch) {
            return Ok(());
        }
        let bodies = self.write(batch)?;
        self.encoded.insert(batch.step, bodies);
        while self.encoded.len() > CACHED_STEPS {
            self.encoded.pop_first();
        }
        Ok(())
    }

    /// The body for one rank, whose checksum matches the journal's.
    pub fn body(&mut self, step: Step, rank: u32) -> Result<Bytes, RunError> {
        let cached = self.encoded.get(&step);
        if let Some(body) = cached.and_then(|ranks| ranks.get(rank as usize)) {
            return Ok(body.clone());
        }
        match self.read(step, rank) {
            Ok(body) => Ok(body),
            Err(problem) => self.restored(step, rank, problem),
        }
    }

    /// The body of a batch whose file cannot be trusted.
    fn restored(&mut self, step: Step, rank: u32, problem: Problem) -> Result<Bytes, RunError> {
        let path = self.spool.file(step, rank);
        let why = match self.cut_again(step, rank, &problem)? {
            Ok(body) => return Ok(body),
            Err(why) => why,
        };
        match problem {
            Problem::Unknown(body) => {
                let path = path.display();
                tracing::warn!(
                    "{path}: the journal has no checksum for this batch ({why}); it is sent to the trainer unchecked"
                );
                Ok(body)
            }
            Problem::Wrong(problem) => Err(RunError::DamagedBatch {
                step: step.0,
                path,
                problem,
                why,
            }),
        }
    }

    /// Writes the batch again, cut from the journal's events; or says why it cannot be.
    fn cut_again(
        &mut self,
        step: Step,
        rank: u32,
        problem: &Problem,
    ) -> Result<Result<Bytes, String>, RunError> {
        let batch = match journal::cut_again(&self.journal, step) {
            Ok(Some(batch)) => batch,
            Ok(None) => {
                let why = "the events by which it was cut are not kept any more";
                return Ok(Err(why.to_owned()));
            }
            Err(error) => return Ok(Err(error.to_string())),
        };
        if let Problem::Wrong(problem) = problem {
            let path = self.spool.file(step, rank);
            let path = path.display();
            tracing::warn!("{path}: {problem}; the batch is written again from the journal");
        }
        let bodies = self.write(&batch)?;
        let body = bodies.get(rank as usize).cloned();
        Ok(body.ok_or_else(|| format!("it was cut for {} ranks", bodies.len())))
    }

    /// Batches of steps before this one are no longer needed. `keep`: their files stay anyway.
    pub fn forget(&mut self, before: Step, keep: bool) -> Result<(), RunError> {
        self.known = self.known.split_off(&before);
        match keep {
            true => Ok(()),
            false => Ok(self.spool.forget(before)?),
        }
    }

    fn read(&self, step: Step, rank: u32) -> Result<Bytes, Problem> {
        let body = self.spool.read(step, rank);
        let body = body.map_err(|error| Problem::Wrong(format!("it cannot be read: {error}")))?;
        let known = self.known.get(&step);
        let known = known.and_then(|ranks| ranks.get(rank as usize)).copied();
        match (checksum(&body), known) {
            (Some(own), Some(known)) if own == known => Ok(body),
            (Some(_), None) => Err(Problem::Unknown(body)),
            (None, None) if is_unchecked(&body) => Err(Problem::Unknown(body)),
            (None, _) => Err(Problem::Wrong("its bytes do not match the checksum".into())),
            (Some(own), Some(known)) => Err(Problem::Wrong(format!(
                "its checksum is {own:016x}, the journal knows {known:016x}"
            ))),
        }
    }

    fn is_as_known(&self, batch: &PackedBatch) -> bool {
        let mut ranks = 0..batch.ranks.len() as u32;
        self.known.contains_key(&batch.step)
            && ranks.all(|rank| self.read(batch.step, rank).is_ok())
    }

    /// Moves another batch's files in the spool under this step to `replaced_spool` first.
    fn write(&mut self, batch: &PackedBatch) -> Result<Vec<Bytes>, RunError> {
        let step = batch.step;
        let ranks = 0..batch.ranks.len() as u32;
        let bodies: Vec<Bytes> = ranks
            .map(|rank| encode(batch, rank))
            .collect::<Result<_, _>>()?;
        let numbered = (0..).zip(&bodies);
        let there: Vec<(u32, &Bytes, Bytes)> = numbered
            .filter_map(|(rank, body)| Some((rank, body, self.spool.read(step, rank).ok()?)))
            .collect();
        let mut others = false;
        for (rank, body, read) in &there {
            others |= read != *body && !is_of(read, batch, *rank)?;
        }
        if others {
            self.set_aside(step)?;
        }
        if there.len() < bodies.len() || there.iter().any(|(_, body, read)| read != *body) {
            self.spool.write(step, &bodies)?;
        }
        self.note_checksums(step, &bodies);
        Ok(bodies)
    }

    fn set_aside(&self, step: Step) -> Result<(), RunError> {
        let place = self.spool.set_aside(step)?;
        tracing::warn!(
            "spool/step_{step} is not the batch that the journal describes: it was moved to {} and is written again",
            place.display()
        );
        Ok(())
    }

    /// They go into the journal if it does not have them.
    fn note_checksums(&mut self, step: Step, bodies: &[Bytes]) {
        let checksums: Vec<u64> = bodies.iter().filter_map(|body| checksum(body)).collect();
        if self.known.get(&step) != Some(&checksums) {
            self.known.insert(step, checksums.clone());
            self.driver.send(Event::BatchWritten { step, checksums });
        }
    }
}

#[cfg(test)]
mod tests;
