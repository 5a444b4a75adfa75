//! Engines in the run: requests go to the least loaded of those that serve the newest version, as the gateway does it.

use super::{Action, World};
use crate::engine::{Ended, Engine, Phase};
use crate::tracks::Doing;
use primerl_core::*;
use primerl_engine_server::request::RequestKey;

impl World {
    /// The conversation's own engine if it may be used, else the least loaded.
    pub(super) fn pick_engine(&self, own: Option<usize>) -> Option<usize> {
        let served = self.served?;
        let usable =
            |engine: &Engine| engine.phase == Phase::Serving && engine.proved == Some(served);
        if let Some(own) = own.filter(|own| usable(&self.engines[*own])) {
            return Some(own);
        }
        let engines = self.engines.iter().enumerate();
        engines
            .filter(|(_, engine)| usable(engine))
            .min_by_key(|(index, engine)| (engine.requests, *index))
            .map(|(index, _)| index)
    }

    pub(super) fn submit(&mut self, engine: usize, rollout: RolloutId, tokens: (u64, u64, u64)) {
        let (prompt, answer, cached) = tokens;
        let now = self.now;
        self.with_engine(engine, |engine| {
            engine.submit(RequestKey(rollout.0), prompt, answer, cached, now);
        });
    }

    pub(super) fn abort(&mut self, engine: usize, rollout: RolloutId) {
        let now = self.now;
        self.with_engine(engine, |engine| engine.abort(RequestKey(rollout.0), now));
    }

    pub(super) fn stride_ends(&mut self, engine: usize) {
        let ended = self.with_engine(engine, |engine| engine.finish_stride());
        if self.engines[engine].phase == Phase::Updating {
            self.engine_stands(engine);
        }
        for Ended { key, versions } in ended {
            self.turn_ended(RolloutId(key.0), versions);
        }
    }

    pub(super) fn engine_told(&mut self, engine: usize, version: PolicyVersion) {
        let now = self.now;
        self.engines[engine].told = Some(version);
        let stands = self.with_engine(engine, |engine| engine.pause(now));
        self.note_served();
        if stands {
            self.engine_stands(engine);
        }
    }

    fn note_served(&mut self) {
        let serving = self.engines.iter();
        let serving = serving.filter(|engine| engine.phase == Phase::Serving);
        self.served = serving.filter_map(|engine| engine.proved).max();
    }

    fn engine_stands(&mut self, engine: usize) {
        if let Some(version) = self.engines[engine].told.take() {
            self.plan_after(
                self.plan.inference.update_s,
                Action::Updated(engine, version),
            );
        }
    }

    pub(super) fn engine_updated(&mut self, engine: usize, version: PolicyVersion) {
        self.with_engine(engine, |engine| engine.load(version));
        self.note_served();
        self.proved = self.proved.max(Some(version));
        self.send(Event::EngineProved {
            engine: EngineId(engine as u32),
            version,
        });
        for rollout in std::mem::take(&mut self.held_back) {
            self.add_slots(Doing::WeightUpdate, -1);
            self.turn_asked(rollout);
        }
    }

    /// Changes an engine, lets it continue, and records what it and its requests do.
    fn with_engine<R>(&mut self, index: usize, change: impl FnOnce(&mut Engine) -> R) -> R {
        let engine = &mut self.engines[index];
        let before = engine.requests_by_doing();
        let result = change(engine);
        if engine.phase == Phase::Serving {
            engine.begin(self.now);
        }
        let after = engine.requests_by_doing();
        let end = engine.stride_end();
        if self.strides.at(index) != end {
            self.planned += 1;
            self.strides.set(index, end.map(|at| (at, self.planned)));
        }
        for ((doing, before), (_, after)) in before.into_iter().zip(after) {
            self.add_slots(doing, after as i64 - before as i64);
        }
        self.note_engine_doing(index);
        result
    }

    pub(super) fn note_engine_doing(&mut self, index: usize) {
        let engine = &self.engines[index];
        let doing = match engine.phase {
            _ if engine.stride_end().is_some() => Doing::Working,
            Phase::Serving => self.reason,
            Phase::Updating if engine.proved.is_none() => Doing::Start,
            Phase::Updating => Doing::WeightUpdate,
        };
        let before = std::mem::replace(&mut self.engine_doing[index], doing);
        self.measured.engines[index].change(before, doing, self.now);
    }
}
