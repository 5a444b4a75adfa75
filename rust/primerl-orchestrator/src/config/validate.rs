//! Reading and checking.

use super::{
    ClientType, Config, ConfigError, EvalEnvironment, SamplingConfig, TruncatedSampling, field,
};
use primerl_core::config::FlopsModel;
use primerl_render::ControlTokenPolicy;
use primerl_service::tls;
use std::path::Path;

impl Config {
    /// Read, parse and check a TOML file.
    pub fn from_file(path: &Path) -> Result<Config, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        Config::from_toml(&text, &path.display().to_string())
    }

    /// `origin` names the text in errors.
    pub fn from_toml(text: &str, origin: &str) -> Result<Config, ConfigError> {
        let parse = |error: toml::de::Error| ConfigError::Parse {
            origin: origin.into(),
            message: error.to_string().trim_end().into(),
        };
        let mut config: Config = toml::from_str(text).map_err(parse)?;
        if config.train.env.iter().any(|own| own.sampling.is_some()) {
            let mut table: toml::Table = toml::from_str(text).map_err(parse)?;
            inherit_sampling(&mut table);
            config = table.try_into().map_err(parse)?;
        }
        config.validate()?;
        Ok(config)
    }

    /// Everything that can be said without reading the model.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.validate_sampling("sampling", &self.sampling)?;
        for environment in &self.train.env {
            if let Some(sampling) = &environment.sampling {
                let place = format!("train.env.{}.sampling", environment.name());
                self.validate_sampling(&place, sampling)?;
            }
        }
        self.validate_evaluation_sampling()?;
        self.validate_algorithms()?;
        self.validate_timeouts()?;
        self.validate_limits()?;
        self.validate_engines()?;
        self.validate_clients()?;
        self.validate_teacher()?;
        self.validate_ratios()?;
        if self
            .log
            .level
            .parse::<tracing_subscriber::EnvFilter>()
            .is_err()
        {
            return Err(field(
                "log.level",
                format!("`{}` is no log level", self.log.level),
                "use error, warn, info, debug or trace",
            ));
        }
        // The model's shape only balances micro-batches, so any will do for a check.
        let shape = FlopsModel {
            linear: 1.0,
            quadratic: 0.0,
        };
        Ok(self.to_core(shape).validate()?)
    }

    /// `place`: what its keys begin with.
    fn validate_sampling(&self, place: &str, sampling: &SamplingConfig) -> Result<(), ConfigError> {
        let key = |name: &str| format!("{place}.{name}");
        let temperature = sampling.temperature;
        if !(0.001..=10.0).contains(&temperature) {
            let remedy = "give 0.001 to 10: training divides by it";
            return Err(field(
                &key("temperature"),
                format!("is {temperature}"),
                remedy,
            ));
        }
        sampling.validate_truncation(&key)?;
        if sampling.max_tokens == 0 {
            return Err(field(
                &key("max_tokens"),
                "is 0",
                "give at least 1, or leave it out",
            ));
        }
        if sampling.rollout_max_tokens == Some(0) {
            let remedy = "give at least 1, or leave it out";
            return Err(field(&key("rollout_max_tokens"), "is 0", remedy));
        }
        if sampling.max_tokens >= self.seq_len {
            let problem = format!(
                "leaves no room for a prompt within seq_len = {}",
                self.seq_len
            );
            return Err(field(
                &key("max_tokens"),
                problem,
                "lower it or raise seq_len",
            ));
        }
        Ok(())
    }

    fn validate_evaluation_sampling(&self) -> Result<(), ConfigError> {
        for environment in &self.eval.env {
            let name = |key: &str| format!("eval.env.{}.sampling.{key}", environment.name());
            let sampling = &environment.sampling;
            if sampling.rollout_max_tokens == Some(0) {
                return Err(field(
                    &name("rollout_max_tokens"),
                    "is 0",
                    "give at least 1, or leave it out",
                ));
            }
            if sampling.max_tokens == Some(0) {
                return Err(field(
                    &name("max_tokens"),
                    "is 0",
                    "give at least 1, or leave it out",
                ));
            }
            if let Some(temperature) = sampling.temperature
                && !(temperature.is_finite() && temperature >= 0.0)
            {
                let problem = format!("is {temperature}");
                return Err(field(
                    &name("temperature"),
                    problem,
                    "give 0 (greedy) or more",
                ));
            }
        }
        Ok(())
    }

    fn validate_timeouts(&self) -> Result<(), ConfigError> {
        let timeouts = &self.timeouts;
        let unusual = [
            ("evaluation_s", timeouts.evaluation_s),
            ("evaluation_progress_s", timeouts.evaluation_progress_s),
        ];
        let unusual = unusual
            .into_iter()
            .filter_map(|(name, seconds)| Some((name, seconds?)));
        let all = [
            ("rollout_s", timeouts.rollout_s),
            ("worker_s", timeouts.worker_s),
            ("long_poll_s", timeouts.long_poll_s),
            ("engine_request_s", timeouts.engine_request_s),
            ("engine_update_s", timeouts.engine_update_s),
            ("no_engine_s", timeouts.no_engine_s),
            ("weights_s", timeouts.weights_s),
            ("trainer_s", timeouts.trainer_s),
        ];
        for (name, seconds) in all.into_iter().chain(unusual) {
            // Who is silent between two heartbeats is not lost.
            let least = match name {
                "worker_s" | "trainer_s" => 1.0,
                _ => 0.001,
            };
            // A year: larger numbers overflow the clock's arithmetic.
            if !(least..=366.0 * 86_400.0).contains(&seconds) {
                return Err(field(
                    &format!("timeouts.{name}"),
                    format!("is {seconds}"),
                    format!("give seconds, {least} to a year"),
                ));
            }
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
                let name = format!("eval.env.{}.client", environment.name());
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
                &format!("eval.env.{}.validates", environment.name()),
                format!("is {name:?}, which is no training environment"),
                "give the name of one in train.env, or leave it out",
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
        if !(self.probe_tolerance > 0.0 && self.probe_tolerance.is_finite()) {
            return Err(field(
                "probe_tolerance",
                format!("is {}", self.probe_tolerance),
                "give nats, above 0",
            ));
        }
        if self.router_replay && self.client_type != ClientType::Renderer {
            return Err(field(
                "router_replay",
                "is true, but engines that render the messages are not asked for their experts",
                "leave out client_type, or router_replay",
            ));
        }
        Ok(())
    }
}

/// What a training environment's `sampling` leaves out is the run's.
fn inherit_sampling(config: &mut toml::Table) {
    let run = config.get("sampling").and_then(toml::Value::as_table);
    let run = run.cloned().unwrap_or_default();
    let environments = config
        .get_mut("train")
        .and_then(|train| train.get_mut("env"));
    let environments = environments.and_then(toml::Value::as_array_mut);
    for environment in environments.into_iter().flatten() {
        let own = environment.get_mut("sampling");
        if let Some(own) = own.and_then(toml::Value::as_table_mut) {
            for (key, value) in &run {
                own.entry(key.clone()).or_insert_with(|| value.clone());
            }
        }
    }
}

impl SamplingConfig {
    fn validate_truncation(&self, key: &dyn Fn(&str) -> String) -> Result<(), ConfigError> {
        let (top_p, top_k, min_p) = (self.top_p, self.top_k, self.min_p);
        if self.truncated == TruncatedSampling::Refuse {
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
                "leave it at {neutral}, or set {} = \"replay\", with which the trainer leaves out the \
                 same tokens",
                key("truncated")
            );
            return Err(field(&key(name), problem, remedy));
        }
        // The bounds of vLLM.
        let bounds = [
            (
                "top_p",
                top_p as f32 > 0.0 && top_p <= 1.0,
                top_p,
                "more than 0 and at most 1",
            ),
            (
                "top_k",
                (-1..=i64::from(i32::MAX)).contains(&top_k),
                top_k as f64,
                "at least 0",
            ),
            ("min_p", (0.0..=1.0).contains(&min_p), min_p, "0 to 1"),
        ];
        match bounds.into_iter().find(|(_, within, ..)| !within) {
            Some((name, _, value, bound)) => Err(field(
                &key(name),
                format!("is {value}"),
                format!("give {bound}"),
            )),
            None => Ok(()),
        }
    }
}
