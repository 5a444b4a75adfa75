//! Which version each engine has, and what the trainer has published.

use crate::ids::*;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    pub manifest: String,
    pub digest: String,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Engine {
    pub url: String,
    pub proved: Option<PolicyVersion>,
    pub updating: Option<PolicyVersion>,
    /// What it was asked to load was published again since, with other weights: its proof does not count.
    #[serde(default)]
    pub loads_replaced: bool,
    /// What it serves, or has begun to load, was published again since, with other weights, and it has not proved these.
    #[serde(default)]
    pub has_replaced: bool,
    pub lost: Option<String>,
}

impl Engine {
    fn lose(&mut self, reason: String) {
        self.proved = None;
        self.updating = None;
        self.loads_replaced = false;
        self.has_replaced = false;
        self.lost = Some(reason);
    }
}

/// A request to an engine to load a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    pub engine: EngineId,
    pub version: PolicyVersion,
    pub published: Published,
}

/// Who has which version.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Ledger {
    /// From the wanted version on.
    published: BTreeMap<PolicyVersion, Published>,
    newest_published: Option<PolicyVersion>,
    /// What the trainer that runs now has published last; less than the newest after it went back to a checkpoint.
    last_published: Option<PolicyVersion>,
    /// Where it began.
    resumed_at: Option<PolicyVersion>,
    /// The digest of every version from which a trainer may resume.
    #[serde(default)]
    digests: BTreeMap<PolicyVersion, String>,
    /// What engines are brought to.
    wanted: Option<PolicyVersion>,
    newest_proved: Option<PolicyVersion>,
    engines: BTreeMap<EngineId, Engine>,
}

impl Ledger {
    /// The ledger of a run without engines: other servers answer, at version 0, and stay there.
    pub fn without_engines() -> Ledger {
        Ledger {
            wanted: Some(PolicyVersion(0)),
            newest_proved: Some(PolicyVersion(0)),
            ..Ledger::default()
        }
    }

    pub fn newest_published(&self) -> Option<PolicyVersion> {
        self.newest_published
    }

    /// Newest version that at least one engine has proved.
    pub fn newest_proved(&self) -> Option<PolicyVersion> {
        self.newest_proved
    }

    pub fn wanted(&self) -> Option<PolicyVersion> {
        self.wanted
    }

    /// The wanted version, once an engine has proved it, and while no engine has other weights of that name.
    pub fn measurable(&self) -> Option<PolicyVersion> {
        let replaced = self.engines.values().any(|engine| engine.has_replaced);
        let proved = self.newest_proved.filter(|_| !replaced);
        proved.filter(|proved| self.wanted == Some(*proved))
    }

    /// Whether the trainer that runs now resumed from there, or has reached it. Later versions are of trainers before it,
    /// and it may come to other weights.
    pub fn is_of_this_trainer(&self, version: PolicyVersion) -> bool {
        version.0 <= self.newest_trained().0
    }

    pub fn engines(&self) -> &BTreeMap<EngineId, Engine> {
        &self.engines
    }

    /// Whether some engine is in rotation or on its way there.
    pub fn has_live_engine(&self) -> bool {
        self.engines.values().any(|engine| engine.lost.is_none())
    }

    /// Why a version cannot follow those published so far. Repeating the last is harmless: its answer may be lost.
    pub fn refuses(&self, version: PolicyVersion, digest: &str) -> Option<String> {
        if let Some(resumed_at) = self.resumed_at.filter(|at| version < *at) {
            return Some(format!(
                "version {version} was published, but the trainer resumed from version {resumed_at}"
            ));
        }
        let Some(last) = self.last_published else {
            return self.refuses_start(version, digest);
        };
        if version < last {
            return Some(format!(
                "version {version} was published, but version {last} is out already: versions only go up"
            ));
        }
        if version > last.next() {
            return Some(format!(
                "version {version} was published, but version {} is due: the weights after each step are published, \
                 and version {last} was the last",
                last.next()
            ));
        }
        // What was overtaken is not kept, but the newest always is.
        let known = self.published.get(&version)?;
        (version == last && known.digest != digest).then(|| {
            format!("version {version} was published before, with other weights: a version is published once")
        })
    }

    /// A trainer that resumes has to begin with the very weights that it had at that version: what was sampled
    /// and cut since came from them.
    fn refuses_start(&self, version: PolicyVersion, digest: &str) -> Option<String> {
        let due = self.resumed_at.unwrap_or(PolicyVersion(0));
        if version > due {
            return Some(format!(
                "version {version} was published, but version {due} is due: a trainer first publishes the weights it \
                 begins with, and reports before that (/trainer/resume) if it resumes from a checkpoint"
            ));
        }
        let known = self.digests.get(&version)?;
        (self.resumed_at == Some(version) && known != digest).then(|| {
            format!(
                "version {version} was published before, with other weights: the model or the checkpoint the run began \
                 with has changed since (model.path, trainer.model.lora); put it back, or begin a new run in another \
                 output_dir"
            )
        })
    }

    /// The newest step that the trainer that runs now can have saved: it has published the weights after it, or
    /// resumed from it.
    pub fn newest_trained(&self) -> Step {
        let newest = self.last_published.or(self.resumed_at);
        Step(newest.map_or(0, |version| version.0))
    }

    /// No trainer will resume from versions before this one.
    pub fn forget_before(&mut self, version: PolicyVersion) {
        self.digests = self.digests.split_off(&version);
    }

    /// Notes a version that is not refused. Repeating one changes nothing. A trainer that went back to a checkpoint reaches
    /// versions again; where it computed other weights than before, these replace the first ones: engines that
    /// serve or load them have to load again. Returns whether that happened.
    pub fn publish(&mut self, version: PolicyVersion, published: Published) -> bool {
        self.last_published = Some(version);
        self.digests.insert(version, published.digest.clone());
        if self.newest_published.is_none_or(|newest| version > newest) {
            self.newest_published = Some(version);
            self.published.insert(version, published);
            return false;
        }
        let Some(known) = self.published.get_mut(&version) else {
            return false;
        };
        let differs = known.digest != published.digest;
        *known = published;
        if differs {
            self.load_again(version);
        }
        differs
    }

    /// Engines that serve or load the version have weights of it that were replaced.
    fn load_again(&mut self, version: PolicyVersion) {
        for engine in self.engines.values_mut() {
            let serves = engine.proved == Some(version);
            let loads = engine.updating == Some(version);
            engine.proved = engine.proved.filter(|_| !serves);
            // It is asked again once it has ended this: one update at a time.
            engine.loads_replaced |= loads;
            engine.has_replaced |= serves || loads;
        }
    }

    /// The trainer resumes from `version`.
    pub fn resume_at(&mut self, version: PolicyVersion) {
        self.resumed_at = Some(version);
        self.last_published = None;
    }

    pub fn join(&mut self, engine: EngineId, url: String) {
        // Whatever it was before: it may have been restarted, with other weights.
        let joined = Engine {
            url,
            ..Engine::default()
        };
        self.engines.insert(engine, joined);
    }

    /// Takes all engines out of rotation, for a reason that is not theirs.
    pub fn lose_all(&mut self, reason: &str) {
        for engine in self.engines.values_mut() {
            engine.lose(reason.to_owned());
        }
    }

    /// Returns whether the proof is accepted: of an engine that joined, for a version that was published. One of weights
    /// that were replaced meanwhile only ends the update: the engine is asked to load the others.
    pub fn prove(&mut self, engine: EngineId, version: PolicyVersion) -> bool {
        let known = self
            .newest_published
            .is_some_and(|newest| version <= newest);
        let Some(engine) = self.engines.get_mut(&engine).filter(|_| known) else {
            return false;
        };
        let is_replaced = std::mem::take(&mut engine.loads_replaced);
        let updated = engine.updating.take();
        engine.lost = None;
        if is_replaced && updated == Some(version) {
            engine.proved = None;
            return true;
        }
        engine.proved = Some(version);
        engine.has_replaced = false;
        self.newest_proved = self.newest_proved.max(Some(version));
        true
    }

    /// Returns whether the engine is known.
    pub fn lose(&mut self, engine: EngineId, reason: String) -> bool {
        let Some(engine) = self.engines.get_mut(&engine) else {
            return false;
        };
        engine.lose(reason);
        true
    }

    /// Moves the wanted version on: to the first published one that must be seen (`is_due`), else to the newest.
    /// Not called while an evaluation holds the engines.
    pub fn advance(&mut self, is_due: impl Fn(PolicyVersion) -> bool) {
        if self.wanted.is_some_and(&is_due) {
            return;
        }
        let next = self
            .published
            .keys()
            .find(|version| Some(**version) > self.wanted && is_due(**version))
            .copied();
        let next = next.or(self.newest_published);
        if next == self.wanted {
            return;
        }
        self.wanted = next;
        if let Some(wanted) = self.wanted {
            self.published = self.published.split_off(&wanted);
        }
    }

    /// Engines that are idle at another version than the wanted one; they are noted as updating.
    pub fn updates(&mut self) -> Vec<Update> {
        let Some(version) = self.wanted else {
            return Vec::new();
        };
        let Some(published) = self.published.get(&version) else {
            return Vec::new();
        };
        let behind = |engine: &Engine| {
            engine.lost.is_none() && engine.updating.is_none() && engine.proved != Some(version)
        };
        let mut updates = Vec::new();
        for (id, engine) in self.engines.iter_mut().filter(|(_, engine)| behind(engine)) {
            engine.updating = Some(version);
            updates.push(Update {
                engine: *id,
                version,
                published: published.clone(),
            });
        }
        updates
    }
}
