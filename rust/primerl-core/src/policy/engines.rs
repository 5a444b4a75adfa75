//! Engines and the weights they load: published, loaded, proved.

use super::Published;
use crate::Core;
use crate::effect::Effect;
use crate::event::EngineLoad;
use crate::ids::*;

impl Core {
    /// Why weights that are published now would not be used.
    pub fn refuses_weights(&self, version: PolicyVersion, digest: &str) -> Option<String> {
        if version.0 >= self.next_step.0 {
            let last = self.next_step.0 - 1;
            return Some(format!(
                "version {version} was published, but only {last} steps were cut"
            ));
        }
        self.ledger.refuses(version, digest).or_else(|| {
            let fetched = self.batches.newest_trainable().map_or(0, |step| step.0);
            (version.0 > fetched).then(|| {
                format!(
                    "version {version} was published, but its trainer has not fetched the batch of step {version}: it \
                     cannot have trained that step"
                )
            })
        })
    }

    pub(crate) fn update_engines(&mut self) {
        if self.evaluations.round.is_none() {
            let (config, evaluations) = (&self.config, &self.evaluations);
            self.ledger
                .advance(|version| evaluations.is_due(config, version));
        }
        for update in self.ledger.updates() {
            self.effects.push(Effect::UpdateEngine {
                engine: update.engine,
                version: update.version,
                manifest: update.published.manifest,
                digest: update.published.digest,
            });
        }
    }

    pub(crate) fn weights_published(&mut self, version: PolicyVersion, published: Published) {
        self.trainer.last_seen = Some(self.now);
        match self.refuses_weights(version, &published.digest) {
            Some(why) => self.warn(format!("{why}; the weights are not used")),
            None => {
                if self.ledger.publish(version, published) {
                    self.warn(format!(
                        "the trainer computed version {version} again and came to other weights; engines load these"
                    ));
                    self.evaluate_anew(version);
                }
            }
        }
    }

    pub(crate) fn engine_joined(&mut self, engine: EngineId, url: String) {
        self.ledger.join(engine, url);
        let limit = self.limits.join(engine, &self.config.run.admission);
        self.limits.add_up(&self.ledger);
        self.effects.push(Effect::LimitEngine { engine, limit });
    }

    pub(crate) fn engine_reported(&mut self, engine: EngineId, load: EngineLoad) {
        if self.limits.get(engine).is_none() {
            return self.ignore("load of an unknown engine");
        }
        let (in_flight, admission) = (self.rollouts.in_flight.len(), &self.config.run.admission);
        if let Some(limit) = self.limits.report(engine, load, in_flight, admission) {
            self.limits.add_up(&self.ledger);
            self.effects.push(Effect::LimitEngine { engine, limit });
        }
    }

    pub(crate) fn engine_proved(&mut self, engine: EngineId, version: PolicyVersion) {
        if !self.ledger.prove(engine, version) {
            self.warn(format!(
                "engine {engine} proved version {version}, but the engine never joined or the version was never \
                 published: it is not used"
            ));
        }
        self.limits.add_up(&self.ledger);
    }

    pub(crate) fn engine_lost(&mut self, engine: EngineId, reason: String) {
        if self.ledger.lose(engine, reason.clone()) {
            self.warn(format!("engine {engine} is out of rotation: {reason}"));
        } else {
            self.ignore("engine_lost of an unknown engine");
        }
        self.limits.add_up(&self.ledger);
    }
}
