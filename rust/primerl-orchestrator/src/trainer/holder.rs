//! Decides which trainer has the run. There is one, until it has left or is known to be gone; another that comes
//! meanwhile is refused, and so is one that returns after it was replaced.
//!
//! A trainer is known by an id that all of its ranks send with every request, so a trainer that was replaced, for
//! whatever reason, gets no batch and publishes nothing. It is known to be gone
//! - by its own goodbye, or by its launcher's report, which starts it again;
//! - on this machine, by its process: its number and the time of its start;
//! - on another machine, by its silence, for half of `timeouts.trainer_s` (heartbeats come every 2 s): this is no
//!   proof, but if it lives it is refused from then on.
//!
//! The holder is kept in `run/trainer.json`, so that no other trainer can take the run while the orchestrator restarts.

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

/// A trainer, as it identifies itself; with several ranks, the leading one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Id of this start of the trainer.
    pub id: String,
    pub pid: u32,
    pub host: String,
    /// The machine and the namespace that `pid` belongs to, and when that process began. Omitted if the system does not
    /// report them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<Place>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<u64>,
    /// Id of the launcher that started it, and ends it when it ends itself.
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

/// The answer to a trainer that asks for the run.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    Yours,
    /// Why not.
    Refused(String),
    /// Whether the previous trainer lives is not known; it is known at this time.
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
    /// The trainer from before a restart has to send a heartbeat, or to be known to be gone, like any other.
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

    /// Its process has ended; or, if its process cannot be checked, it has been silent for too long.
    fn is_gone(&self, held: &Held) -> bool {
        held.has_ended() || (!held.is_seen() && held.heard + self.patience <= Instant::now())
    }

    /// A request of a trainer that has the run; a trainer without an identity may take the run if no other has it.
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

    /// A launcher, which alone may use the run's folder, starts its trainer: a trainer that an earlier launcher started
    /// is gone.
    pub fn is_started_again(&self) {
        let mut state = self.state.lock();
        let was_launched = |held: &&Held| held.identity.launcher.is_some();
        if state.holder.as_ref().filter(was_launched).is_some() {
            self.release(&mut state);
        }
    }

    /// Resolves when the trainer that has the run sends a heartbeat, or leaves it, from this call on: a caller that
    /// calls this before looking misses nothing.
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

    /// For `/status`.
    pub fn known(&self) -> Option<(u32, String)> {
        let state = self.state.lock();
        let held = state.holder.as_ref()?;
        Some((held.identity.pid, held.identity.host.clone()))
    }

    fn take(&self, state: &mut State, identity: &Identity) {
        let heard = Instant::now();
        match &mut state.holder {
            Some(held) if held.identity.id == identity.id => held.heard = heard,
            _ => self.replace(state, identity, heard),
        }
        self.heard.notify_waiters();
    }

    fn replace(&self, state: &mut State, identity: &Identity, heard: Instant) {
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
        self.keep(Some(identity));
        state.holder = Some(Held {
            identity: identity.clone(),
            heard,
            is_own: false,
        });
    }

    fn release(&self, state: &mut State) {
        if let Some(before) = state.holder.take() {
            state.gone.insert(before.identity.id);
            self.keep(None);
            self.heard.notify_waiters();
        }
    }

    /// If it cannot be written, it is lost with this process, and only needed then.
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
            tracing::warn!(path = %self.path.display(), %error, "cannot save which trainer has the run");
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
                "the trainer of process {pid} on {host} was considered dead and replaced{by}; it may no longer train \
                 this run"
            )
        })
    }
}

impl Held {
    /// Whether its process can be checked.
    fn is_seen(&self) -> bool {
        self.is_own || self.identity.is_here()
    }

    fn has_ended(&self) -> bool {
        !self.is_own && self.identity.has_ended()
    }

    fn in_words(&self) -> String {
        let Identity { pid, host, .. } = &self.identity;
        let seconds = self.heard.elapsed().as_secs_f64();
        format!("process {pid} on {host}, last heartbeat {seconds:.1} s ago")
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
