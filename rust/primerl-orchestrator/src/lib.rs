//! The tokio shell around primerl-core: gateway, engines, environment leases, trainer endpoints, journal.

pub mod envs;
pub mod files;
pub mod journal;
