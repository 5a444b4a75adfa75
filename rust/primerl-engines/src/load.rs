//! An engine's load as `/metrics` reports it (vLLM's names), and when a change is worth an event.

use primerl_core::event::EngineLoad;
use std::time::{Duration, Instant};

/// A busy engine whose load does not change is reported this often: its limit may still have to move.
const AT_LEAST_EVERY: Duration = Duration::from_secs(2);
/// Changes that matter: a share of the KV cache, and a share of the running requests.
const KV_CACHE_STEP: f64 = 0.05;
const REQUESTS_STEP: f64 = 0.1;

/// One reading of an engine; its data-parallel parts are added up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Reading {
    running: f64,
    waiting: f64,
    /// Usage of the fullest part.
    kv_cache_usage: f64,
    /// Since the engine started.
    preemptions: f64,
    /// Tokens since the engine started, including those of prompts.
    pub made: Option<f64>,
    /// The same without the tokens of prompts.
    pub sampled: Option<f64>,
}

impl Reading {
    /// Reads a text in the Prometheus format. `None` if it lacks the running requests or the usage of the cache.
    pub(crate) fn parse(text: &str) -> Option<Reading> {
        let sum = |name: &str, label: &str| samples(text, name, label).reduce(|a, b| a + b);
        let reason = r#"reason="capacity""#;
        let sampled = sum("vllm:generation_tokens_total", "");
        let waiting = sum("vllm:num_requests_waiting_by_reason", reason)
            .or_else(|| sum("vllm:num_requests_waiting", ""));
        Some(Reading {
            running: sum("vllm:num_requests_running", "")?,
            waiting: waiting.unwrap_or(0.0),
            kv_cache_usage: samples(text, "vllm:kv_cache_usage_perc", "").reduce(f64::max)?,
            preemptions: sum("vllm:num_preemptions_total", "").unwrap_or(0.0),
            made: sampled
                .map(|sampled| sampled + sum("vllm:prompt_tokens_total", "").unwrap_or(0.0)),
            sampled,
        })
    }
}

/// Values of a metric's samples whose labels contain `label`. Skips what is not a number of at least 0.
fn samples<'a>(text: &'a str, name: &'a str, label: &'a str) -> impl Iterator<Item = f64> + 'a {
    text.lines().filter_map(move |line| {
        let rest = line.strip_prefix(name)?;
        let (labels, value) = match rest.strip_prefix('{') {
            Some(rest) => rest.rsplit_once('}')?,
            None => ("", rest),
        };
        if !value.starts_with(' ') || !labels.contains(label) {
            return None;
        }
        let value: f64 = value.split_whitespace().next()?.parse().ok()?;
        (value.is_finite() && value >= 0.0).then_some(value)
    })
}

/// The last report, with which the next reading is compared.
#[derive(Debug, Default)]
pub(super) struct LoadWatch {
    reported: Option<(Instant, EngineLoad)>,
    /// Preemptions that have been reported, or happened before the first reading.
    preemptions: Option<f64>,
}

impl LoadWatch {
    /// The report that a reading is worth, if any.
    pub(crate) fn look(&mut self, reading: Reading, now: Instant) -> Option<EngineLoad> {
        let before = self.preemptions.unwrap_or(reading.preemptions);
        // A counter that decreased was reset: the engine was restarted.
        let preemptions = match reading.preemptions >= before {
            true => reading.preemptions - before,
            false => reading.preemptions,
        };
        let load = EngineLoad {
            running: reading.running as u32,
            waiting: reading.waiting as u32,
            kv_cache_usage: reading.kv_cache_usage,
            preemptions: preemptions as u32,
        };
        self.preemptions.get_or_insert(reading.preemptions);
        if !self.matters(&load, now) {
            return None;
        }
        self.reported = Some((now, load));
        self.preemptions = Some(reading.preemptions);
        Some(load)
    }

    fn matters(&self, load: &EngineLoad, now: Instant) -> bool {
        let Some((at, last)) = &self.reported else {
            return load.running + load.waiting > 0;
        };
        let step = (f64::from(last.running) * REQUESTS_STEP).max(1.0);
        let moved = |a: u32, b: u32| f64::from(a.abs_diff(b)) >= step;
        load.preemptions > 0
            || moved(load.running, last.running)
            || moved(load.waiting, last.waiting)
            || (load.kv_cache_usage - last.kv_cache_usage).abs() >= KV_CACHE_STEP
            || (load.running > 0 && now - *at >= AT_LEAST_EVERY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a}b"} 12.0
vllm:num_requests_running{engine="1",model_name="a}b"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 9.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:num_preemptions_total{engine="0",model_name="m"} 6.0
vllm:generation_tokens_total{engine="0",model_name="m"} 40.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 2.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.79e+09
"#;

    #[test]
    fn vllms_text_is_read() {
        let expected = Reading {
            running: 15.0,
            waiting: 4.0,
            kv_cache_usage: 0.75,
            preemptions: 6.0,
            made: Some(42.0),
            sampled: Some(40.0),
        };
        assert_eq!(Reading::parse(TEXT), Some(expected));
        let older = TEXT.replace("_by_reason", "_by_something_else");
        assert_eq!(
            Reading::parse(&older).map(|reading| reading.waiting),
            Some(9.0)
        );
        assert_eq!(Reading::parse("process_cpu_seconds_total 3\n"), None);
    }

    #[test]
    fn the_embedded_engine_exports_the_same_names() {
        let metrics =
            primerl_engine_server::metrics::Metrics::new(&primerl_engine_server::Config::default());
        let nothing = Reading {
            made: Some(0.0),
            sampled: Some(0.0),
            ..Reading::default()
        };
        assert_eq!(Reading::parse(&metrics.encode()), Some(nothing));
    }

    fn reading(running: f64, preemptions: f64) -> Reading {
        Reading {
            running,
            preemptions,
            ..Reading::default()
        }
    }

    #[test]
    fn only_what_matters_is_reported() {
        let (mut watch, start) = (LoadWatch::default(), Instant::now());
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut look = |reading, seconds| watch.look(reading, at(seconds)).is_some();
        assert!(!look(reading(0.0, 7.0), 0), "it idles");
        assert!(look(reading(100.0, 7.0), 1));
        assert!(!look(reading(105.0, 7.0), 2), "about the same");
        assert!(look(reading(110.0, 7.0), 3));
        assert!(!look(reading(110.0, 7.0), 4));
        assert!(look(reading(110.0, 7.0), 5), "it continues");
        assert!(look(reading(0.0, 7.0), 6));
        assert!(!look(reading(0.0, 7.0), 60), "it idles again");
    }

    #[test]
    fn preemptions_are_counted_from_report_to_report() {
        let (mut watch, now) = (LoadWatch::default(), Instant::now());
        let mut look = |count| {
            watch
                .look(reading(10.0, count), now)
                .map(|load| load.preemptions)
        };
        assert_eq!(
            look(7.0),
            Some(0),
            "those before the first look are not this run's"
        );
        assert_eq!(look(9.0), Some(2));
        assert_eq!(look(9.0), None);
        assert_eq!(look(3.0), Some(3), "it was restarted");
    }
}
