//! What is remembered of an example, in a form that millions of examples can have.

use super::deck::Pool;
use super::report::Seen;
use crate::ids::Step;
use serde::{Deserialize, Serialize};

/// Groups that are kept.
const RECENT: usize = 4;

/// An example of which a group was completed.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Record {
    pub groups: u32,
    /// How often it changed its pool by its rewards.
    pub moves: u32,
    recent: Recent,
}

/// One complete group. Steps beyond 2^32 are not distinguished.
#[derive(Clone, Copy, Debug)]
struct Visit {
    /// 0 for none.
    step: u32,
    mean_reward: f32,
    pool: Pool,
}

/// The last groups of an example, newest last; before them, there may be empty entries.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "Vec<Written>", into = "Vec<Written>")]
struct Recent([Visit; RECENT]);

/// Step, mean reward and number of the pool.
type Written = (u32, f32, u8);

impl Record {
    pub fn add(&mut self, step: Step, mean_reward: f64, pool: Pool, moved: bool) {
        self.groups = self.groups.saturating_add(1);
        self.moves = self.moves.saturating_add(u32::from(moved));
        self.recent.push(Visit {
            step: u32::try_from(step.0).unwrap_or(u32::MAX),
            mean_reward: mean_reward as f32,
            pool,
        });
    }

    /// Where it was filed last.
    pub fn pool(&self) -> Pool {
        self.recent.0[RECENT - 1].pool
    }

    /// The last groups, oldest first.
    pub fn seen(&self) -> Vec<Seen> {
        let seen = self.recent.visits().map(|visit| Seen {
            step: Step(u64::from(visit.step)),
            mean_reward: visit.mean_reward,
            pool: visit.pool,
        });
        seen.collect()
    }
}

impl Recent {
    fn push(&mut self, visit: Visit) {
        self.0.rotate_left(1);
        self.0[RECENT - 1] = visit;
    }

    fn visits(&self) -> impl Iterator<Item = Visit> {
        self.0.into_iter().filter(|visit| visit.step > 0)
    }
}

impl Default for Recent {
    fn default() -> Self {
        let none = Visit {
            step: 0,
            mean_reward: 0.0,
            pool: Pool::Normal,
        };
        Recent([none; RECENT])
    }
}

impl From<Recent> for Vec<Written> {
    fn from(recent: Recent) -> Self {
        let written = |visit: Visit| (visit.step, visit.mean_reward, visit.pool as u8);
        recent.visits().map(written).collect()
    }
}

impl TryFrom<Vec<Written>> for Recent {
    type Error = String;

    fn try_from(written: Vec<Written>) -> Result<Self, String> {
        let mut recent = Recent::default();
        for (step, mean_reward, number) in written {
            let pool = *Pool::ALL
                .get(usize::from(number))
                .ok_or_else(|| format!("there is no pool {number}"))?;
            recent.push(Visit {
                step,
                mean_reward,
                pool,
            });
        }
        Ok(recent)
    }
}
