//! Prometheus metrics under vLLM's names, and two of our own for the idle share.

use crate::config::Config;
use crate::request::FinishReason;
use crate::scheduler::Scheduler;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry};
use std::sync::atomic::AtomicU64;

type Seconds = Counter<f64, AtomicU64>;
type Ratio = Gauge<f64, AtomicU64>;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FinishedReason {
    finished_reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WaitReason {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UpdateOperation {
    operation: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CacheConfig {
    block_size: u32,
    num_gpu_blocks: u64,
    kv_cache_size_tokens: u64,
    kv_cache_max_concurrency: u64,
}

/// Written by the engine thread, read by `/metrics`; every value is an atomic of its own.
pub struct Metrics {
    registry: Registry,
    kv_cache_usage: Ratio,
    running: Gauge,
    waiting: Gauge,
    waiting_by_reason: Family<WaitReason, Gauge>,
    preemptions: Counter,
    pub prompt_tokens: Counter,
    pub generation_tokens: Counter,
    finished: Family<FinishedReason, Counter>,
    pub time_to_first_token: Histogram,
    pub request_latency: Histogram,
    pub queue_time: Histogram,
    pub step_time: Histogram,
    updates: Family<UpdateOperation, Histogram>,
    /// Seconds the backend was computing or loading weights.
    pub busy_seconds: Seconds,
    process_cpu_seconds: Seconds,
}

fn latency_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 16))
}

/// Registers metrics and returns handles to them. The registry appends `_total` to counters.
struct Registrar(Registry);

impl Registrar {
    fn add<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        self.0.register(name, help, metric.clone());
        metric
    }

    fn plain<M: Metric + Clone + Default>(&mut self, name: &str, help: &str) -> M {
        self.add(name, help, M::default())
    }

    fn latency(&mut self, name: &str, help: &str) -> Histogram {
        self.add(name, help, latency_histogram())
    }

    fn cache_config(&mut self, config: &Config) {
        let (name, help) = (
            "vllm:cache_config_info",
            "KV capacity; a block is one token",
        );
        let labels = CacheConfig {
            block_size: 1,
            num_gpu_blocks: config.kv_cache_tokens,
            kv_cache_size_tokens: config.kv_cache_tokens,
            kv_cache_max_concurrency: config.kv_cache_tokens
                / u64::from(config.max_model_len.max(1)),
        };
        let cache: Family<CacheConfig, Gauge> = self.plain(name, help);
        cache.get_or_create(&labels).set(1);
    }
}

impl Metrics {
    pub fn new(config: &Config) -> Self {
        let model = config.served_model_name.clone();
        let labels = [
            ("engine".into(), "0".into()),
            ("model_name".into(), model.into()),
        ];
        let mut r = Registrar(Registry::with_labels(labels.into_iter()));
        r.cache_config(config);
        Metrics {
            kv_cache_usage: r.plain(
                "vllm:kv_cache_usage_perc",
                "Share of KV capacity in use, 0 to 1",
            ),
            running: r.plain("vllm:num_requests_running", "Sequences that hold a KV slot"),
            waiting: r.plain("vllm:num_requests_waiting", "Sequences in the queue"),
            waiting_by_reason: r.plain(
                "vllm:num_requests_waiting_by_reason",
                "Sequences in the queue: for capacity, or deferred by a pause",
            ),
            preemptions: r.plain("vllm:num_preemptions", "Sequences that lost their KV"),
            prompt_tokens: r.plain("vllm:prompt_tokens", "Prompt tokens of accepted requests"),
            generation_tokens: r.plain("vllm:generation_tokens", "Sampled tokens"),
            finished: r.plain("vllm:request_success", "Sequences that ended, by reason"),
            time_to_first_token: r.latency(
                "vllm:time_to_first_token_seconds",
                "From arrival to the first token",
            ),
            request_latency: r.latency(
                "vllm:e2e_request_latency_seconds",
                "From arrival to the last token",
            ),
            queue_time: r.latency(
                "vllm:request_queue_time_seconds",
                "From arrival to the first step",
            ),
            step_time: r.latency(
                "vllm:inter_token_latency_seconds",
                "Duration of a step: the time between two tokens of a sequence",
            ),
            updates: r.add(
                "vllm:rl_weight_update_operation_duration_seconds",
                "Duration of the calls of a weight update",
                Family::new_with_constructor(latency_histogram as fn() -> Histogram),
            ),
            busy_seconds: r.plain(
                "primerl:engine_busy_seconds",
                "Seconds in which the model was computing or loading weights",
            ),
            process_cpu_seconds: r.plain("process_cpu_seconds", "CPU seconds of this process"),
            registry: r.0,
        }
    }

    pub fn finished(&self, reason: FinishReason) {
        self.finished
            .get_or_create(&FinishedReason {
                finished_reason: reason.as_str(),
            })
            .inc();
    }

    pub fn update_took(&self, operation: &'static str, seconds: f64) {
        self.updates
            .get_or_create(&UpdateOperation { operation })
            .observe(seconds);
    }

    /// Copies the scheduler's state into the gauges.
    pub fn observe(&self, scheduler: &Scheduler, config: &Config) {
        self.kv_cache_usage
            .set(scheduler.kv_tokens_held() as f64 / config.kv_cache_tokens as f64);
        self.running.set(scheduler.num_running() as i64);
        let waiting = scheduler.num_waiting() as i64;
        self.waiting.set(waiting);
        let (capacity, deferred) = if scheduler.is_paused() {
            (0, waiting)
        } else {
            (waiting, 0)
        };
        self.waiting_by_reason
            .get_or_create(&WaitReason { reason: "capacity" })
            .set(capacity);
        self.waiting_by_reason
            .get_or_create(&WaitReason { reason: "deferred" })
            .set(deferred);
        self.preemptions
            .inc_by(scheduler.preemptions() - self.preemptions.get());
    }

    /// The Prometheus text format.
    pub fn encode(&self) -> String {
        let cpu = process_cpu_seconds().unwrap_or(0.0);
        self.process_cpu_seconds
            .inc_by((cpu - self.process_cpu_seconds.get()).max(0.0));
        let mut text = String::new();
        // Writing into a String cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }
}

/// User and system time of this process. Linux counts it in ticks of 1/100 s for every architecture it tells programs of.
fn process_cpu_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The command in parentheses may hold spaces; the numbers come after it.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: f64 = fields.next()?.parse().ok()?;
    let system: f64 = fields.next()?.parse().ok()?;
    Some((user + system) / 100.0)
}
