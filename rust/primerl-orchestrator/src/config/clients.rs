//! Who answers in place of the engines.

use super::Config;
use primerl_engines::clients::Endpoint;
use primerl_service::config_error::ConfigError;
use std::sync::Arc;

impl Config {
    /// By environment.
    pub(crate) fn endpoints(&self) -> Result<Vec<Option<Arc<Endpoint>>>, ConfigError> {
        let teacher = self.answering_teacher();
        let teacher = teacher.map(|client| Endpoint::open("teacher.client", client));
        let teacher = teacher.transpose()?.map(Arc::new);
        let training = self.train.env.iter().map(|_| Ok(teacher.clone()));
        let evaluation = self.eval.env.iter().map(|environment| {
            let Some(client) = &environment.client else {
                return Ok(None);
            };
            let name = format!("eval.env.{}.client", environment.name());
            Ok(Some(Arc::new(Endpoint::open(&name, client)?)))
        });
        training.chain(evaluation).collect()
    }
}
