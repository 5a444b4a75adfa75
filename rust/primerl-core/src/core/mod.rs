//! The state machine: [`Core`].

use crate::config::{Config, ConfigError};
use crate::effect::Effect;
use crate::event::Event;
use crate::status::Status;
use crate::time::Time;

/// All decisions of one run.
pub struct Core {
    config: Config,
}

impl Core {
    /// # Errors
    /// What [`Config::validate`] finds.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Core { config })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Takes in one event and says what to do. `now` never decreases from call to call.
    pub fn handle(&mut self, event: Event, now: Time) -> Vec<Effect> {
        let _ = (event, now);
        unimplemented!("under construction")
    }

    /// When [`Event::Tick`] is due at the latest.
    pub fn next_deadline(&self) -> Option<Time> {
        unimplemented!("under construction")
    }

    pub fn status(&self) -> Status {
        unimplemented!("under construction")
    }
}
