//! Which keys do not go together. What each alone has to fulfil, `schema` says.

use super::{
    ClientType, Config, ConfigError, EvalEnvironment, SamplingConfig, TruncatedSampling, field,
};
use primerl_core::config::FlopsModel;
use primerl_render::ControlTokenPolicy;
use primerl_service::tls;

impl Config {
    /// Everything that can be checked without reading the model.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.validate_names()?;
        self.validate_sampling("sampling", &self.sampling)?;
        for environment in &self.train.env {
            if let Some(sampling) = &environment.sampling {
                let place = format!("{}.sampling", environment.key());
                self.validate_sampling(&place, sampling)?;
            }
        }
        self.validate_algorithms()?;
        self.validate_limits()?;
        self.validate_engines()?;
        self.validate_clients()?;
        self.validate_teacher()?;
        self.validate_demonstrations()?;
        self.validate_token_batches()?;
        self.validate_ratios()?;
        self.validate_log_level()?;
        // The model's shape only balances micro-batches, so any will do for a check.
        let shape = FlopsModel {
            linear: 1.0,
            quadratic: 0.0,
        };
        Ok(self.to_core(shape).validate()?)
    }

    fn validate_log_level(&self) -> Result<(), ConfigError> {
        let level = &self.log.level;
        match level.parse::<tracing_subscriber::EnvFilter>() {
            Ok(_) => Ok(()),
            Err(_) => Err(field(
                "log.level",
                format!("`{level}` is no log level"),
                "use error, warn, info, debug or trace",
            )),
        }
    }

    /// `place`: what its keys begin with.
    fn validate_sampling(&self, place: &str, sampling: &SamplingConfig) -> Result<(), ConfigError> {
        let key = |name: &str| format!("{place}.{name}");
        sampling.validate_truncation(&key)?;
        if sampling.max_tokens >= self.run.seq_len {
            let problem = format!(
                "leaves no room for a prompt within seq_len = {}",
                self.run.seq_len
            );
            return Err(field(
                &key("max_tokens"),
                problem,
                "lower it or raise seq_len",
            ));
        }
        Ok(())
    }

    fn validate_ratios(&self) -> Result<(), ConfigError> {
        let Some(ratios) = &self.buffer.env_ratios else {
            return Ok(());
        };
        let environments = &self.train.env;
        if ratios.len() != environments.len() {
            let (given, wanted) = (ratios.len(), environments.len());
            return Err(field(
                "buffer.env_ratios",
                format!("has {given} numbers for the {wanted} environments of train.env"),
                "give one for each, in the order of train.env",
            ));
        }
        match environments.iter().find(|own| own.ratio.is_some()) {
            Some(environment) => Err(field(
                "buffer.env_ratios",
                format!(
                    "is set, and so is the ratio of train.env {:?}",
                    environment.name()
                ),
                "leave one of the two out",
            )),
            None => Ok(()),
        }
    }

    fn validate_clients(&self) -> Result<(), ConfigError> {
        self.client_type.check_for_training()?;
        if self.client_type != ClientType::Renderer {
            self.validate_control_tokens("client_type")?;
        }
        for environment in &self.eval.env {
            if let Some(client) = &environment.client {
                let name = format!("{}.client", environment.key());
                client.validate(&name, ClientType::OpenaiChatCompletions)?;
                self.validate_control_tokens(&name)?;
            }
            self.validate_validation(environment)?;
        }
        Ok(())
    }

    /// `place` names a server that renders messages itself.
    fn validate_control_tokens(&self, place: &str) -> Result<(), ConfigError> {
        match self.control_tokens {
            ControlTokenPolicy::Keep => Ok(()),
            ControlTokenPolicy::Neutralize => Err(field(
                "control_tokens",
                format!(
                    "is \"neutralize\", but {place} is of a server that turns messages into tokens itself"
                ),
                "leave one of the two out",
            )),
        }
    }

    fn validate_validation(&self, environment: &EvalEnvironment) -> Result<(), ConfigError> {
        let trained = |name: &String| self.train.env.iter().any(|own| own.name() == *name);
        match &environment.validates {
            Some(name) if !trained(name) => Err(field(
                &format!("{}.validates", environment.key()),
                format!("is {name:?}, which is no training environment"),
                "give the name of one in train.env, or omit it",
            )),
            _ => Ok(()),
        }
    }

    fn validate_engines(&self) -> Result<(), ConfigError> {
        for (index, url) in self.engines.iter().enumerate() {
            let name = format!("engines[{index}]");
            let url = primerl_engines::client::parse_url(url)
                .map_err(|problem| field(&name, problem, "give a URL like http://host:port"))?;
            if let Err(error) = tls::client(&url) {
                let problem = format!("`{url}` {}", error.problem);
                return Err(field(&name, problem, error.hint));
            }
        }
        if self.router_replay && self.client_type != ClientType::Renderer {
            return Err(field(
                "router_replay",
                "is true, but engines that render the messages are not asked for their experts",
                "omit client_type, or router_replay",
            ));
        }
        Ok(())
    }
}

impl SamplingConfig {
    fn validate_truncation(&self, key: &dyn Fn(&str) -> String) -> Result<(), ConfigError> {
        let (top_p, top_k, min_p) = (self.top_p, self.top_k, self.min_p);
        if self.truncated == TruncatedSampling::Replay {
            return Ok(());
        }
        let altered = [
            ("top_p", top_p != 1.0, "1.0"),
            ("top_k", top_k > 0, "0"),
            ("min_p", min_p != 0.0, "0.0"),
        ];
        let Some((name, _, neutral)) = altered.into_iter().find(|(_, set, _)| *set) else {
            return Ok(());
        };
        let problem = "changes the distribution the trainer assumes";
        let remedy = format!(
            "leave it at {neutral}, or set {} = \"replay\", with which the trainer removes the same tokens",
            key("truncated")
        );
        Err(field(&key(name), problem, remedy))
    }
}
