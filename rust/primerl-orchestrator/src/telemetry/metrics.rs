//! Prometheus metrics, in a separate registry.

use super::TrainerClock;
use parking_lot::Mutex;
use primerl_gateway::{GatewayMetrics, MICROSECONDS};
use primerl_service::waits::Waits;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::sync::Arc;

/// Counters, each updated by the code that does the work.
pub struct Telemetry {
    registry: Registry,
    pub gateway: Arc<GatewayMetrics>,
    /// Seconds between an event's sending and its handling.
    pub event_delay: Histogram,
    /// Seconds the core needs for an event.
    pub handle_time: Histogram,
    /// Seconds between an event's sending and the issue of its effects, without the wait of durable ones for the disk.
    pub effect_delay: Histogram,
    pub trainer: TrainerClock,
    pub waits: Waits,
    /// Reports so far, as in `evals.jsonl`.
    pub evaluations: Mutex<Vec<serde_json::Value>>,
}

impl Telemetry {
    pub fn new(gateway: Arc<GatewayMetrics>, waits: Waits) -> Telemetry {
        let microseconds = || Histogram::new(MICROSECONDS);
        let mut telemetry = Telemetry {
            registry: Registry::with_prefix("primerl"),
            gateway,
            event_delay: microseconds(),
            handle_time: microseconds(),
            effect_delay: microseconds(),
            trainer: TrainerClock::default(),
            waits,
            evaluations: Mutex::default(),
        };
        telemetry.register();
        telemetry
    }

    fn register(&mut self) {
        let registry = &mut self.registry;
        self.gateway.register(registry);
        registry.register(
            "event_delay_seconds",
            "Time an event waits for the core",
            self.event_delay.clone(),
        );
        registry.register(
            "event_handling_seconds",
            "Time the core takes for an event",
            self.handle_time.clone(),
        );
        registry.register(
            "effect_delay_seconds",
            "Time from an event to its effects",
            self.effect_delay.clone(),
        );
    }

    /// The registry's text; the caller appends gauges.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode_registry(&mut text, &self.registry)?;
        Ok(text)
    }
}
