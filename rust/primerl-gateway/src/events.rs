//! Sends an answer as server-sent events while it is sampled.
//!
//! Whenever the connection has room, the writer reads what the engine has sampled since the last time, decodes it and
//! writes it: a slow reader gets larger pieces, and needs no memory beyond the answer itself.

use super::answer::{Answer, Choice, Events, Head, Tokens};
use super::body::Delivery;
use super::live::{Following, Outcome, Partial};
use super::text::{ChoiceText, Reading};
use axum::body::Body;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::Stream;
use primerl_render::Renderer;
use primerl_service::http::ApiError;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::mpsc;

/// A stream's headers wait this long for the first token, so that early failures keep their HTTP status. After that, a
/// comment is sent at this interval.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// The data that one stream needs.
pub(super) struct Streaming {
    pub renderer: Arc<Renderer>,
    pub following: Following,
    pub events: Box<dyn Events>,
    pub delivery: Delivery,
}

pub(super) fn stream_body(streaming: Streaming) -> Body {
    // One piece waits for the connection; the next is made once it has been taken.
    let (sender, pieces) = mpsc::channel(1);
    Body::from_stream(EventStream {
        writer: Some(Box::pin(write(streaming, sender))),
        pieces,
    })
}

/// Runs the writer while it is polled: it has no task of its own, and stops when the connection is gone.
struct EventStream {
    writer: Option<BoxFuture<'static, ()>>,
    pieces: mpsc::Receiver<Vec<u8>>,
}

impl Stream for EventStream {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(writer) = &mut self.writer
            && writer.as_mut().poll(context).is_ready()
        {
            self.writer = None;
        }
        let piece = self.pieces.poll_recv(context);
        piece.map(|piece| piece.map(|bytes| Ok(bytes.into())))
    }
}

async fn write(mut streaming: Streaming, sender: mpsc::Sender<Vec<u8>>) {
    let renderer = Arc::clone(&streaming.renderer);
    let live = Arc::clone(&streaming.following.live);
    let mut writer = Writer::begin(&renderer, &live.reading, streaming.events, &live.head);
    loop {
        let Ok(room) = sender.reserve().await else {
            return;
        };
        streaming.following.seen();
        let (parts, outcome) = live.look(|state| {
            let parts = state.choices.iter().zip(&writer.texts);
            let parts: Vec<Partial> = parts
                .map(|(partial, text)| partial.since(text.tokens))
                .collect();
            (parts, state.outcome.clone())
        });
        if let Some(outcome) = outcome {
            room.send(writer.end(outcome));
            break;
        }
        for (choice, part) in parts.iter().enumerate() {
            writer.progress(choice, part.tokens());
        }
        if !writer.out.is_empty() {
            room.send(std::mem::take(&mut writer.out));
            continue;
        }
        drop(room);
        tokio::select! {
            () = streaming.following.changed() => {}
            () = tokio::time::sleep(KEEP_ALIVE) => writer.out.extend(b": keep-alive\n\n"),
        }
    }
    // The connection has taken the last piece, so there is room again.
    if sender.reserve().await.is_ok() {
        streaming.delivery.done();
    }
}

/// All events of an answer that is already complete.
pub(super) fn all_at_once(
    answer: &Answer,
    reading: &Arc<Reading>,
    events: Box<dyn Events>,
    renderer: &Renderer,
) -> Vec<u8> {
    let mut writer = Writer::begin(renderer, reading, events, &answer.head);
    writer.rest(answer);
    writer.out
}

struct Writer<'a> {
    texts: Vec<ChoiceText>,
    events: Box<dyn Events>,
    renderer: &'a Renderer,
    out: Vec<u8>,
}

impl Writer<'_> {
    fn begin<'a>(
        renderer: &'a Renderer,
        reading: &Arc<Reading>,
        mut events: Box<dyn Events>,
        head: &Head,
    ) -> Writer<'a> {
        let mut out = Vec::new();
        events.begin(head, &mut out);
        let choices = 0..head.choices as usize;
        Writer {
            texts: choices
                .map(|choice| ChoiceText::new(renderer, reading, choice))
                .collect(),
            events,
            renderer,
            out,
        }
    }

    fn progress(&mut self, choice: usize, tokens: Tokens<'_>) {
        if tokens.ids.is_empty() {
            return;
        }
        match self.texts[choice].push(self.renderer, tokens.ids) {
            Ok(deltas) => {
                let (tokenizer, out) = (self.renderer.tokenizer(), &mut self.out);
                self.events
                    .progress(choice, &deltas, tokens, tokenizer, out);
            }
            // The end of the stream reports it: the complete answer cannot be decoded either.
            Err(error) => tracing::debug!(%error, "part of an answer cannot be decoded"),
        }
    }

    fn end(&mut self, outcome: Outcome) -> Vec<u8> {
        match outcome {
            Ok(answer) => self.rest(&answer),
            Err(error) => self.events.error(&error, &mut self.out),
        }
        std::mem::take(&mut self.out)
    }

    fn rest(&mut self, answer: &Answer) {
        for (choice, whole) in answer.choices.iter().enumerate() {
            self.progress(choice, whole.since(self.texts[choice].tokens));
            let nothing = Tokens {
                ids: &[],
                logprobs: &[],
                top: &[],
            };
            let held = self.texts[choice].finish(self.renderer).unwrap_or_default();
            let held = [whole.text_deltas(), held].concat();
            if !held.is_empty() {
                let (tokenizer, out) = (self.renderer.tokenizer(), &mut self.out);
                self.events.progress(choice, &held, nothing, tokenizer, out);
            }
        }
        self.events.end(answer, &mut self.out);
    }
}

impl Partial {
    fn since(&self, tokens: usize) -> Partial {
        Partial {
            ids: self.ids[tokens.min(self.ids.len())..].to_vec(),
            logprobs: self.logprobs[tokens.min(self.logprobs.len())..].to_vec(),
            top: self.top[tokens.min(self.top.len())..].to_vec(),
        }
    }

    fn tokens(&self) -> Tokens<'_> {
        Tokens {
            ids: &self.ids,
            logprobs: &self.logprobs,
            top: &self.top,
        }
    }
}

impl Choice {
    fn since(&self, tokens: usize) -> Tokens<'_> {
        Tokens {
            ids: &self.sampled[tokens..],
            logprobs: &self.logprobs[tokens..],
            top: &self.top[tokens.min(self.top.len())..],
        }
    }
}

impl Following {
    /// Resolves at the first token or at the end; errors that come before are not part of a stream. After `patience`
    /// the stream begins in any case.
    pub(super) async fn begun(&mut self, patience: Duration) -> Result<(), ApiError> {
        let begun = async {
            loop {
                self.seen();
                let now = self.live.look(|state| match &state.outcome {
                    Some(outcome) => Some(outcome.clone().map(drop)),
                    None => {
                        let any = state.choices.iter().any(|choice| !choice.ids.is_empty());
                        any.then_some(Ok(()))
                    }
                });
                if let Some(now) = now {
                    return now;
                }
                self.changed().await;
            }
        };
        tokio::time::timeout(patience, begun)
            .await
            .unwrap_or(Ok(()))
    }
}
