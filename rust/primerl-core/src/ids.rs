//! Identities. Newtypes, so that a group is never passed where a rollout is meant.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

id!(
    /// Index into [`crate::Config::environments`].
    EnvironmentId(u32)
);
id!(
    /// Index of an example within its environment, in the order the environment listed them.
    ExampleIndex(u32)
);
id!(
    /// `group_size` rollouts of one example.
    GroupId(u64)
);
id!(
    /// One attempt at an example. Never reused: a retry is a new rollout of the same group.
    RolloutId(u64)
);
id!(
    /// One environment worker process, numbered by the shell when it registers.
    WorkerId(u64)
);
id!(
    /// One inference engine, numbered by the shell when it joins.
    EngineId(u32)
);
id!(
    /// A request that waits in the shell for an answer (a lease or a batch).
    RequestId(u64)
);
id!(
    /// Step k (from 1) trains policy v(k-1) into v(k).
    Step(u64)
);
id!(
    /// Weights after step k are version k; version 0 is the initial weights.
    PolicyVersion(u64)
);
id!(
    /// Index of a turn within its rollout, in the order in which the turns finished.
    TurnIndex(u32)
);

impl PolicyVersion {
    pub fn next(self) -> PolicyVersion {
        PolicyVersion(self.0 + 1)
    }
}

impl Step {
    /// The version that this step trains: v(k-1).
    pub fn trains(self) -> PolicyVersion {
        PolicyVersion(self.0 - 1)
    }

    pub fn next(self) -> Step {
        Step(self.0 + 1)
    }
}
