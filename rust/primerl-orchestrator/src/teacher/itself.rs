//! On-policy self-distillation (SDFT, arXiv:2601.19897): the policy is its own teacher, having seen a demonstration. What it
//! sampled is scored behind a system message that holds it, by engines that have proved their weights.

use crate::config::DemonstrationConfig;
use primerl_core::Event;
use primerl_core::effect::TeacherRequest;
use primerl_core::sample::{Sample, TokenLogprobs};
use primerl_engines::Engines;
use primerl_render::{Message, RenderError, RenderOptions, Renderer};
use primerl_service::inbox::DriverHandle;
use primerl_service::waits::{Overdue, Waits};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// Samples of one environment that are scored at a time: engines batch them with the rollouts.
const AT_A_TIME: usize = 256;
/// A group that waits for longer is named in the log.
const PATIENCE: Duration = Duration::from_secs(25);
const SENTINEL: &str = "zPrimerlDemonstrationSentinelz";

/// The handle. Clones share it.
#[derive(Clone)]
pub(crate) struct Itself(Arc<Inner>);

struct Inner {
    parts: Parts,
    shown: DemonstrationConfig,
    places: Semaphore,
    /// What begins each document of the template, if anything does.
    start: Option<u32>,
    /// Effects are carried out by the driver's thread, whose own runtime has no network.
    runtime: Handle,
}

pub(crate) struct Parts {
    pub renderer: Arc<Renderer>,
    pub engines: Arc<Engines>,
    pub driver: DriverHandle,
    pub waits: Waits,
    pub stop: CancellationToken,
    /// Longest time of one group.
    pub timeout: Duration,
}

impl Itself {
    /// # Errors
    /// The chat template fails on a short conversation.
    ///
    /// # Panics
    /// Called outside of a runtime.
    pub fn new(parts: Parts, shown: DemonstrationConfig) -> Result<Itself, RenderError> {
        Ok(Itself(Arc::new(Inner {
            start: document_start(&parts.renderer)?,
            parts,
            shown,
            places: Semaphore::new(AT_A_TIME),
            runtime: Handle::current(),
        })))
    }

    /// Carries out [`primerl_core::Effect::ScoreByTeacher`].
    pub fn score(&self, request: Arc<TeacherRequest>) {
        let (inner, group) = (Arc::clone(&self.0), request.group);
        let stop = inner.parts.stop.clone();
        let scoring = Arc::clone(&self.0);
        let scored = inner
            .runtime
            .spawn(async move { scoring.group(&request).await });
        let abort = scored.abort_handle();
        self.0.runtime.spawn(async move {
            tokio::select! {
                scored = scored => {
                    let result = scored.unwrap_or_else(|error| Err(format!("the scoring failed: {error}")));
                    inner.parts.driver.send(Event::TeacherScored { group, result });
                }
                () = stop.cancelled() => abort.abort(),
            }
        });
    }
}

impl Inner {
    async fn group(&self, request: &TeacherRequest) -> Result<Vec<TokenLogprobs>, String> {
        let waiting_for = "the policy's log-probabilities behind a demonstration";
        let who = format!("group {}", request.group);
        let waits = &self.parts.waits;
        let _waiting = waits.begin(who, waiting_for, PATIENCE, Overdue::IsNamed);
        let deadline = Instant::now() + self.parts.timeout;
        let samples = request.samples.iter().zip(&request.demonstrations);
        let scores = samples
            .enumerate()
            .map(|(number, (sample, demonstration))| {
                let name = format!("group-{}-{number}", request.group);
                self.scores_of(name, sample, demonstration.as_deref(), deadline)
            });
        futures_util::future::try_join_all(scores).await
    }

    /// The system message with the demonstration.
    fn demonstrated(&self, demonstration: Option<&str>) -> Result<Vec<u32>, String> {
        let demonstration = demonstration
            .ok_or_else(|| format!("the environment has reported no {}", self.shown.key))?;
        let text = self.shown.message(demonstration);
        system_message(&self.parts.renderer, &text).map_err(|error| error.to_string())
    }

    async fn scores_of(
        &self,
        name: String,
        sample: &Sample,
        demonstration: Option<&str>,
        deadline: Instant,
    ) -> Result<TokenLogprobs, String> {
        let shown = self.demonstrated(demonstration)?;
        let sample = sample.token_ids();
        let own = without_start(&sample, self.start);
        let ids = [&shown, own].concat();
        // Not closed: the semaphore lives as long as this.
        let place = self.places.acquire().await;
        let _place = place.map_err(|error| error.to_string())?;
        let scored = self.parts.engines.score(&name, &ids, deadline).await;
        let mut logprobs = scored.map_err(|error| error.to_string())?;
        // As of a teacher, nothing precedes a sample's first token: it has no log-probability.
        let mut found = vec![0.0; sample.len() - own.len()];
        found.append(&mut logprobs.split_off(shown.len()));
        if let Some(first) = found.first_mut() {
            *first = 0.0;
        }
        Ok(TokenLogprobs(found.into()))
    }
}

fn whole() -> RenderOptions {
    RenderOptions {
        add_generation_prompt: false,
        ..RenderOptions::default()
    }
}

/// The ids of a conversation that is a system message alone.
fn system_message(renderer: &Renderer, text: &str) -> Result<Vec<u32>, RenderError> {
    let mut message = Message::user(text);
    message.role = "system".to_owned();
    renderer.render(&[message], &whole())
}

/// The id with which every document of the template begins, and that stands nowhere within one.
fn document_start(renderer: &Renderer) -> Result<Option<u32>, RenderError> {
    let two = [Message::user("x"), Message::assistant("y")];
    let two = renderer.render(&two, &whole())?;
    let alone = system_message(renderer, "x")?;
    let once = |id: &u32| two.iter().filter(|other| *other == id).count() == 1;
    let start = two.first().copied().filter(once);
    Ok(start.filter(|id| alone.first() == Some(id)))
}

/// The sample behind another document: a document starts once.
fn without_start(sample: &[u32], start: Option<u32>) -> &[u32] {
    match (sample.split_first(), start) {
        (Some((first, rest)), Some(start)) if *first == start => rest,
        _ => sample,
    }
}

/// Whether the template writes a system message by itself, with its text.
///
/// # Errors
/// What is wrong, for people.
pub(crate) fn check(renderer: &Renderer, shown: &DemonstrationConfig) -> Result<(), String> {
    let found = system_message(renderer, &shown.message(SENTINEL));
    let found = found.map_err(|error| error.to_string())?;
    let text = renderer.tokenizer().decode(&found, false);
    match text.map_err(|error| error.to_string())?.contains(SENTINEL) {
        true => Ok(()),
        false => Err("it writes the message without its text".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use primerl_render::testing::write_tiny_model;
    use std::path::Path;

    const PLAIN: &str =
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";

    fn renderer(folder: &Path, template: &str) -> Renderer {
        write_tiny_model(folder).expect("model folder");
        std::fs::write(folder.join("chat_template.jinja"), template).expect("writes");
        Renderer::load(folder).expect("loads")
    }

    #[test]
    fn a_template_has_to_write_the_message_with_its_text() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let shown = DemonstrationConfig {
            key: "demonstration".to_owned(),
            template: "An expert: {demonstration}".to_owned(),
        };
        assert_eq!(check(&renderer(folder.path(), PLAIN), &shown), Ok(()));
        let silent =
            format!("{{% if messages[0].role != 'system' %}}{PLAIN}{{% endif %}}<|im_end|>");
        let problem = check(&renderer(folder.path(), &silent), &shown);
        assert!(
            problem
                .expect_err("is refused")
                .contains("without its text")
        );
    }

    #[test]
    fn a_document_starts_once() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let starts = |template: &str| {
            let renderer = renderer(folder.path(), template);
            let start = document_start(&renderer).expect("renders");
            let sample = renderer
                .tokenizer()
                .encode("<|endoftext|><|im_start|>u")
                .expect("encodes");
            (
                start.is_some(),
                sample.len() - without_start(&sample, start).len(),
            )
        };
        assert_eq!(starts(&format!("<|endoftext|>{PLAIN}")), (true, 1));
        // Each message begins with the same token: that is no start of a document.
        assert_eq!(starts(PLAIN), (false, 0));
    }
}
