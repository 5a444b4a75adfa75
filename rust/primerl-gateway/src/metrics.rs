//! Counts requests of the gateway, as Prometheus metrics.

use parking_lot::Mutex;
use primerl_core::RolloutId;
use primerl_core::turn::ForkReason;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time span over which `tokens.per_second` is measured.
const RATE_WINDOW: Duration = Duration::from_secs(10);

/// Bucket bounds of histograms of short times, in seconds.
pub const MICROSECONDS: [f64; 16] = [
    1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0,
];

/// How a turn's prompt was made: by extending an earlier turn, or why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Made(Option<ForkReason>);

/// How a chat request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    Answered,
    Replayed,
    Refused,
    Failed,
    Gone,
}

// Label values use the API's names; derived ones would use the code's names.
impl EncodeLabelValue for Made {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), std::fmt::Error> {
        let name = match self.0 {
            None => "extended",
            Some(ForkReason::FirstTurn) => "first_turn",
            Some(ForkReason::NewConversation) => "new_conversation",
            Some(ForkReason::HistoryEdited) => "history_edited",
            Some(ForkReason::AnswerEdited) => "answer_edited",
            Some(ForkReason::ToolsChanged) => "tools_changed",
            Some(ForkReason::TemplateNotExtendable) => "template_not_extendable",
            Some(ForkReason::PrefixDiffers) => "prefix_differs",
        };
        EncodeLabelValue::encode(&name, encoder)
    }
}

impl EncodeLabelValue for Outcome {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), std::fmt::Error> {
        let name = match self {
            Outcome::Answered => "answered",
            Outcome::Replayed => "replayed",
            Outcome::Refused => "refused",
            Outcome::Failed => "failed",
            Outcome::Gone => "gone",
        };
        EncodeLabelValue::encode(&name, encoder)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TurnLabels {
    prompt: Made,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    outcome: Outcome,
}

/// Each counter is updated by the code that does the work.
pub struct GatewayMetrics {
    turns: Family<TurnLabels, Counter>,
    requests: Family<RequestLabels, Counter>,
    control_tokens: Counter,
    pub prompt_tokens: Counter,
    pub sampled_tokens: Counter,
    /// Seconds an engine takes for a request, including failovers.
    pub engine_time: Histogram,
    /// Seconds from a chat request's arrival to its engine request.
    pub prepare_time: Histogram,
    rate: Mutex<VecDeque<(Instant, u64)>>,
}

impl Default for GatewayMetrics {
    fn default() -> Self {
        GatewayMetrics {
            turns: Family::default(),
            requests: Family::default(),
            control_tokens: Counter::default(),
            prompt_tokens: Counter::default(),
            sampled_tokens: Counter::default(),
            engine_time: Histogram::new(exponential_buckets(1e-3, 4.0, 10)),
            prepare_time: Histogram::new(MICROSECONDS),
            rate: Mutex::default(),
        }
    }
}

impl GatewayMetrics {
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "turns",
            "Turns recorded, by how the prompt was made",
            self.turns.clone(),
        );
        registry.register(
            "chat_requests",
            "Chat requests, by how they ended",
            self.requests.clone(),
        );
        registry.register(
            "prompts_with_control_tokens",
            "Prompts of chat requests that rendered control tokens written in the text of a user or tool",
            self.control_tokens.clone(),
        );
        registry.register(
            "prompt_tokens",
            "Prompt tokens sent to engines",
            self.prompt_tokens.clone(),
        );
        registry.register(
            "sampled_tokens",
            "Tokens sampled by engines and recorded",
            self.sampled_tokens.clone(),
        );
        registry.register(
            "engine_request_seconds",
            "Engine requests, failovers included",
            self.engine_time.clone(),
        );
        registry.register(
            "prepare_seconds",
            "From a chat request to its engine request",
            self.prepare_time.clone(),
        );
    }

    pub fn turn(&self, fork: Option<ForkReason>) {
        self.turns
            .get_or_create(&TurnLabels { prompt: Made(fork) })
            .inc();
    }

    /// Only the first is logged, with its rollout.
    pub fn control_tokens(&self, rollout: RolloutId) {
        if self.control_tokens.inc() == 0 {
            tracing::warn!(
                %rollout,
                "the text of a user or tool message holds control tokens of the model, which the template does not \
                 escape: they end turns and begin others; further ones are counted \
                 (primerl_prompts_with_control_tokens_total); orchestrator.control_tokens = \"neutralize\" makes text of \
                 them"
            );
        }
    }

    pub fn request(&self, outcome: Outcome) {
        self.requests
            .get_or_create(&RequestLabels { outcome })
            .inc();
    }

    /// Takes a sample for [`GatewayMetrics::tokens_per_second`]; to be called about once a second.
    pub fn sample_rate(&self) {
        let now = Instant::now();
        let mut rate = self.rate.lock();
        rate.push_back((now, self.sampled_tokens.get()));
        while rate.len() > 2
            && rate
                .front()
                .is_some_and(|(time, _)| now - *time > RATE_WINDOW)
        {
            rate.pop_front();
        }
    }

    /// Sampled tokens per second over the last few seconds.
    pub fn tokens_per_second(&self) -> f64 {
        let rate = self.rate.lock();
        match (rate.front(), rate.back()) {
            (Some((first, before)), Some((last, after))) if last > first => {
                (after - before) as f64 / (*last - *first).as_secs_f64()
            }
            _ => 0.0,
        }
    }
}
