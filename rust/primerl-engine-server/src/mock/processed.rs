//! Log-probabilities of what a mock samples from: after temperature and truncation, as vLLM's `processed_logprobs`.
//!
//! At temperature 1 with no token excluded they are the raw ones, which a mock does not normalise.

use super::{MockConfig, draw};
use crate::backend::{ScoredToken, TopToken};
use crate::batch::Sample;

/// A separate draw, in addition to those of [`MockConfig::sample`] and of scores.
const PURPOSE: u64 = 0;

impl Sample {
    fn narrows(&self) -> bool {
        self.top_p < 1.0 || self.top_k > 0 || self.min_p > 0.0
    }

    fn is_plain(&self) -> bool {
        matches!(self.temperature, 0.0 | 1.0) && !self.narrows()
    }
}

impl MockConfig {
    /// The kept tokens, most likely first, with their log-probabilities among each other.
    pub fn kept(&self, prefix: u64, version: u64, sample: &Sample) -> Vec<(u32, f64)> {
        let temperature = match sample.temperature {
            0.0 => 1.0,
            temperature => f64::from(temperature),
        };
        // Without a mask the token is discarded, whatever it is.
        let mask = sample
            .allowed
            .as_ref()
            .and_then(|allowed| allowed.wait().ok());
        let allowed =
            |id: &u32| mask.is_none_or(|mask| mask[(id / 32) as usize] & (1 << (id % 32)) != 0);
        let ids = (0..self.vocab_size).filter(|id| !sample.banned.contains(id) && allowed(id));
        let scaled = |id: u32| f64::from(self.logprob(prefix, id, version)) / temperature;
        let mut kept: Vec<(u32, f64)> = ids.map(|id| (id, scaled(id))).collect();
        kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let floor = kept[0].1 + f64::from(sample.min_p).ln();
        kept.retain(|(_, own)| *own >= floor);
        if sample.top_k > 0 {
            kept.truncate(sample.top_k as usize);
        }
        normalize(&mut kept);
        let mut before = 0.0;
        let most = kept.iter().take_while(|(_, own)| {
            let stays = before == 0.0 || before < f64::from(sample.top_p);
            before += own.exp();
            stays
        });
        let most = most.count();
        kept.truncate(most);
        normalize(&mut kept);
        kept
    }

    /// Another token where this one is not among the kept, and what they make of it.
    pub(super) fn processed(
        &self,
        scored: ScoredToken,
        prefix: u64,
        sample: &Sample,
        version: u64,
    ) -> ScoredToken {
        if sample.is_plain() {
            return scored;
        }
        let kept = self.kept(prefix, version, sample);
        let place = kept.iter().position(|(id, _)| *id == scored.token_id);
        let place = place.unwrap_or_else(|| {
            let chosen = prefix ^ sample.uniform.to_bits();
            (draw(chosen, version, PURPOSE) * kept.len() as f64) as usize
        });
        of_kept(&kept, place, sample.top)
    }

    /// A token that the grammar allows, `wanted` if it may be; one that may not is left to the engine to refuse.
    pub(super) fn structured(
        &self,
        prefix: u64,
        sample: &Sample,
        version: u64,
        wanted: Option<u32>,
    ) -> ScoredToken {
        let kept = self.kept(prefix, version, sample);
        let chosen = prefix ^ sample.uniform.to_bits();
        let drawn = (draw(chosen, version, PURPOSE) * kept.len() as f64) as usize;
        match wanted.map(|id| (id, kept.iter().position(|(kept, _)| *kept == id))) {
            None => of_kept(&kept, drawn, sample.top),
            Some((_, Some(place))) => of_kept(&kept, place, sample.top),
            Some((id, None)) => self.score(prefix, id, version, sample.top),
        }
    }
}

fn of_kept(kept: &[(u32, f64)], place: usize, top: u32) -> ScoredToken {
    let ranked = kept
        .iter()
        .zip(1..)
        .map(|(&(token_id, logprob), rank)| TopToken {
            token_id,
            logprob: logprob as f32,
            rank,
        });
    let (token_id, logprob) = kept[place];
    ScoredToken {
        token_id,
        logprob: logprob as f32,
        rank: place as u32 + 1,
        top: ranked.take(top as usize).collect(),
    }
}

fn normalize(kept: &mut [(u32, f64)]) {
    let sum: f64 = kept.iter().map(|(_, own)| own.exp()).sum();
    kept.iter_mut().for_each(|(_, own)| *own -= sum.ln());
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: Sample = Sample {
        temperature: 1.0,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
        uniform: 0.3,
        top: 4,
        banned: Vec::new(),
        allowed: None,
    };

    fn mock() -> MockConfig {
        MockConfig {
            processed_logprobs: true,
            ..MockConfig::default()
        }
    }

    #[test]
    fn raw_and_processed_agree_at_temperature_1() {
        let raw = MockConfig::default();
        for prefix in 0..50 {
            assert_eq!(
                mock().sample(prefix, &SAMPLE, 2),
                raw.sample(prefix, &SAMPLE, 2)
            );
        }
        let warm = Sample {
            temperature: 0.5,
            ..SAMPLE
        };
        let (processed, raw) = (mock().sample(9, &warm, 2), raw.sample(9, &warm, 2));
        assert_eq!(processed.token_id, raw.token_id);
        let difference = |scored: &ScoredToken| scored.top[0].logprob - scored.top[3].logprob;
        assert!((difference(&processed) - 2.0 * difference(&raw)).abs() < 1e-5);
    }

    #[test]
    fn only_kept_tokens_are_sampled_and_their_probabilities_add_up() {
        let narrow = [(1.0, 3, 0.0), (0.01, 0, 0.0), (1.0, 0, 0.9), (0.5, 9, 0.0)];
        for (top_p, top_k, min_p) in narrow {
            for prefix in 0..50 {
                let sample = Sample {
                    top_p,
                    top_k,
                    min_p,
                    temperature: 0.7,
                    ..SAMPLE
                };
                let kept = mock().kept(prefix, 1, &sample);
                let scored = mock().sample(prefix, &sample, 1);
                let (_, own) = kept
                    .iter()
                    .find(|(id, _)| *id == scored.token_id)
                    .expect("is kept");
                assert!((f64::from(scored.logprob) - own).abs() < 1e-6);
                let sum: f64 = kept.iter().map(|(_, own)| own.exp()).sum();
                assert!((sum - 1.0).abs() < 1e-9 && kept.len() < 264);
                assert!(top_k == 0 || kept.len() <= top_k as usize);
            }
        }
    }
}
