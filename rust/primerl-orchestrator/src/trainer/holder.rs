//! Which trainer has the run. There is one, until it has left or is known to be gone; another that comes meanwhile is
//! refused, and one that comes back after it was replaced.
//!
//! A trainer is known by an id that all of its ranks send with every request, so whoever was replaced, for whatever reason,
//! gets no batch and publishes nothing. It is known to be gone
//! - by its own last word, or its launcher's, which starts it again;
//! - on this machine, by its process: its number and the time of its start;
//! - elsewhere, by its silence, for half of `timeouts.trainer_s` (beats come every 2 s): no proof, but if it lives it is refused
//!   from then on.
//!
//! It is kept in `run/trainer.json`, so that no other slips in while the orchestrator is started again.

use super::process::{self, Place};
use parking_lot::Mutex;
use primerl_service::files::write_whole;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

const FILE: &str = "run/trainer.json";

/// A trainer, as it says itself; of several ranks, the leading one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Of this start of it.
    pub id: String,
    pub pid: u32,
    pub host: String,
    /// What `pid` is a number of, and when that process began. Left out where the system has no word for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<Place>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<u64>,
    /// Of the launcher that has started it, and ends it with itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launcher: Option<String>,
}

impl Identity {
    /// The process that the orchestrator is part of.
    pub(crate) fn own() -> Identity {
        let pid = std::process::id();
        Identity {
            id: format!("in-process-{pid}"),
            pid,
            host: "this machine, with the orchestrator in it".to_owned(),
            place: Place::own(),
            began: process::began(pid),
            launcher: None,
        }
    }

    fn has_ended(&self) -> bool {
        match (&self.place, self.began) {
            (Some(place), Some(began)) if Some(place) == Place::own().as_ref() => {
                process::began(self.pid) != Some(began)
            }
            _ => false,
        }
    }

    fn is_here(&self) -> bool {
        self.began.is_some() && self.place.is_some() && self.place == Place::own()
    }
}

/// What a trainer that comes is told.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    Yours,
    /// Why not.
    Refused(String),
    /// Whether the one before lives is not known; by then it is.
    Unknown(Instant, String),
}

#[derive(Debug)]
pub struct Holder {
    path: PathBuf,
    /// Longest silence of a trainer on another machine.
    patience: Duration,
    /// Written by the trainer's endpoints.
    state: Mutex<State>,
    heard: Notify,
}

#[derive(Debug, Default)]
struct State {
    holder: Option<Held>,
    /// Trainers that were replaced.
    gone: BTreeSet<String>,
}

#[derive(Debug)]
struct Held {
    identity: Identity,
    heard: Instant,
    /// Part of this process, which it cannot outlive.
    is_own: bool,
}

impl Holder {
    /// The one of before a restart has to be heard of, or to be known to be gone, as any other.
    pub fn open(output_dir: &Path, patience: Duration) -> Holder {
        let path = output_dir.join(FILE);
        let known = std::fs::read(&path).ok();
        let known = known.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let heard = Instant::now();
        Holder {
            path,
            patience,
            state: Mutex::new(State {
                holder: known.map(|identity| Held {
                    identity,
                    heard,
                    is_own: false,
                }),
                gone: BTreeSet::new(),
            }),
            heard: Notify::new(),
        }
    }

    /// A trainer asks for the run; `since` when.
    pub fn begin(&self, identity: &Identity, since: Instant) -> Answer {
        let mut state = self.state.lock();
        if let Some(why) = state.replaced(identity) {
            return Answer::Refused(why);
        }
        let Some(held) = state.other_than(identity) else {
            self.take(&mut state, identity);
            return Answer::Yours;
        };
        if self.is_gone(held) {
            self.take(&mut state, identity);
            return Answer::Yours;
        }
        match held.is_seen() || held.heard > since {
            true => Answer::Refused(held.refusal()),
            false => Answer::Unknown(held.heard + self.patience, held.in_words()),
        }
    }

    /// Its process has ended; or, where nobody can look at that, it has been silent for too long.
    fn is_gone(&self, held: &Held) -> bool {
        held.has_ended() || (!held.is_seen() && held.heard + self.patience <= Instant::now())
    }

    /// A request of a trainer that has the run; one that says nothing of itself may take it where no other has.
    pub fn admit(&self, identity: Option<&Identity>) -> Result<(), String> {
        let mut state = self.state.lock();
        let Some(identity) = identity else {
            return match &state.holder {
                Some(held) if !self.is_gone(held) => Err(held.refusal()),
                _ => Ok(()),
            };
        };
        if let Some(why) = state.replaced(identity) {
            return Err(why);
        }
        match state.other_than(identity) {
            Some(held) if !self.is_gone(held) => Err(held.refusal()),
            _ => {
                self.take(&mut state, identity);
                Ok(())
            }
        }
    }

    /// It has said goodbye.
    pub fn left(&self, identity: Option<&Identity>) {
        let mut state = self.state.lock();
        let is_own = |held: &&mut Held| Some(&held.identity.id) == identity.map(|own| &own.id);
        if state.holder.as_mut().filter(is_own).is_some() {
            self.release(&mut state);
        }
    }

    /// A launcher, which alone has the run's folder, starts its trainer: whatever a launcher had started before is gone.
    pub fn is_started_again(&self) {
        let mut state = self.state.lock();
        let was_launched = |held: &&Held| held.identity.launcher.is_some();
        if state.holder.as_ref().filter(was_launched).is_some() {
            self.release(&mut state);
        }
    }

    /// Resolves when the trainer that has the run is heard of, or leaves it, from this call on: who calls it before looking
    /// misses nothing.
    pub fn changed(&self) -> Notified<'_> {
        self.heard.notified()
    }

    /// The trainer is in this process, and calls no endpoint.
    pub(crate) fn hold(&self, identity: Identity) {
        self.state.lock().holder = Some(Held {
            identity,
            heard: Instant::now(),
            is_own: true,
        });
    }

    /// For the status.
    pub fn known(&self) -> Option<(u32, String)> {
        let state = self.state.lock();
        let held = state.holder.as_ref()?;
        Some((held.identity.pid, held.identity.host.clone()))
    }

    fn take(&self, state: &mut State, identity: &Identity) {
        let heard = Instant::now();
        match &mut state.holder {
            Some(held) if held.identity.id == identity.id => held.heard = heard,
            _ => {
                if let Some(before) = &state.holder {
                    tracing::warn!(
                        pid = before.identity.pid,
                        host = before.identity.host,
                        "the trainer is gone"
                    );
                }
                self.release(state);
                tracing::info!(
                    pid = identity.pid,
                    host = identity.host,
                    "this trainer has the run"
                );
                let identity = identity.clone();
                self.keep(Some(&identity));
                state.holder = Some(Held {
                    identity,
                    heard,
                    is_own: false,
                });
            }
        }
        self.heard.notify_waiters();
    }

    fn release(&self, state: &mut State) {
        if let Some(before) = state.holder.take() {
            state.gone.insert(before.identity.id);
            self.keep(None);
            self.heard.notify_waiters();
        }
    }

    /// What cannot be kept is lost with this process, and only then of any use.
    fn keep(&self, identity: Option<&Identity>) {
        let kept = match identity {
            Some(identity) => serde_json::to_vec(identity)
                .map_err(std::io::Error::other)
                .and_then(|bytes| write_whole(&self.path, &bytes).map_err(|error| error.source)),
            None => match std::fs::remove_file(&self.path) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
                removed => removed,
            },
        };
        if let Err(error) = kept {
            tracing::warn!(path = %self.path.display(), %error, "which trainer has the run cannot be kept");
        }
    }
}

impl State {
    fn other_than(&self, identity: &Identity) -> Option<&Held> {
        let held = self.holder.as_ref();
        held.filter(|held| held.identity.id != identity.id)
    }

    fn replaced(&self, identity: &Identity) -> Option<String> {
        let Identity { id, pid, host, .. } = identity;
        let by = match &self.holder {
            Some(held) => format!(" by {}", held.in_words()),
            None => String::new(),
        };
        self.gone.contains(id).then(|| {
            format!(
                "the trainer of process {pid} on {host} was taken for gone and replaced{by}: it trains this run no more"
            )
        })
    }
}

impl Held {
    /// Whether its process can be looked at.
    fn is_seen(&self) -> bool {
        self.is_own || self.identity.is_here()
    }

    fn has_ended(&self) -> bool {
        !self.is_own && self.identity.has_ended()
    }

    fn in_words(&self) -> String {
        let Identity { pid, host, .. } = &self.identity;
        let seconds = self.heard.elapsed().as_secs_f64();
        format!("process {pid} on {host}, heard of {seconds:.1} s ago")
    }

    fn refusal(&self) -> String {
        format!(
            "this run has a trainer: {}. It keeps the run; stop it first to train with another, or give this one a run \
             of its own",
            self.in_words()
        )
    }
}

#[cfg(test)]
mod tests;
