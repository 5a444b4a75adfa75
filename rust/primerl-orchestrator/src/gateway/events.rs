//! Server-sent events of an answer, as it is sampled.
//!
//! What the engine has given since the last time is read, put into text and written whenever the connection has room for
//! more: a slow reader gets larger pieces and holds no memory beyond the answer itself.

use super::answer::{Answer, Choice, Events, Tokens};
use super::body::Delivery;
use super::endpoints::{KEEP_ALIVE, Shown};
use super::live::{Following, Outcome, Partial};
use super::text::{Delta, StopCut};
use crate::http::ApiError;
use axum::body::Body;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::Stream;
use primerl_render::{RenderError, Renderer, StreamDecoder, Tokenizer};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::mpsc;

/// Everything that one stream needs.
pub(super) struct Streaming {
    pub renderer: Arc<Renderer>,
    pub following: Following,
    pub events: Box<dyn Events>,
    pub shown: Shown,
    pub delivery: Delivery,
}

pub(super) fn stream_body(streaming: Streaming) -> Body {
    // One piece waits for the connection; the next is made when it has been taken.
    let (sender, pieces) = mpsc::channel(1);
    Body::from_stream(EventStream {
        writer: Some(Box::pin(write(streaming, sender))),
        pieces,
    })
}

/// Runs the writer while it is polled: no task of its own, and nothing goes on when the connection is gone.
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
    let choices = live.look(|state| state.choices.len());
    let mut writer = Writer {
        texts: (0..choices)
            .map(|_| ChoiceText::new(renderer.tokenizer(), &streaming.shown))
            .collect(),
        events: streaming.events,
        tokenizer: renderer.tokenizer(),
        out: Vec::new(),
    };
    writer.events.begin(&live.head, &mut writer.out);
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
    // There is room again once the connection has taken the last piece.
    if sender.reserve().await.is_ok() {
        streaming.delivery.done();
    }
}

/// All events of an answer that is whole already.
pub(super) fn all_at_once(
    answer: &Answer,
    shown: &Shown,
    events: Box<dyn Events>,
    tokenizer: &Tokenizer,
) -> Vec<u8> {
    let texts = answer.choices.iter();
    let mut writer = Writer {
        texts: texts.map(|_| ChoiceText::new(tokenizer, shown)).collect(),
        events,
        tokenizer,
        out: Vec::new(),
    };
    writer.events.begin(&answer.head, &mut writer.out);
    writer.rest(answer);
    writer.out
}

struct Writer<'a> {
    texts: Vec<ChoiceText<'a>>,
    events: Box<dyn Events>,
    tokenizer: &'a Tokenizer,
    out: Vec<u8>,
}

impl Writer<'_> {
    fn progress(&mut self, choice: usize, tokens: Tokens<'_>) {
        if tokens.ids.is_empty() {
            return;
        }
        let text = &mut self.texts[choice];
        match text.push(tokens.ids) {
            Ok(deltas) => {
                let (tokenizer, out) = (self.tokenizer, &mut self.out);
                self.events
                    .progress(choice, &deltas, tokens, tokenizer, out);
            }
            // The end will say it: the whole answer cannot be decoded either.
            Err(error) => tracing::debug!(%error, "a part of an answer cannot be decoded"),
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
            let held = self.texts[choice].finish(whole);
            if !held.is_empty() {
                let (tokenizer, out) = (self.tokenizer, &mut self.out);
                self.events.progress(choice, &held, nothing, tokenizer, out);
            }
        }
        self.events.end(answer, &mut self.out);
    }
}

/// The text of one choice, as far as it is certain.
struct ChoiceText<'a> {
    decoder: Option<StreamDecoder<'a>>,
    cut: StopCut,
    /// Taken in so far.
    tokens: usize,
}

impl<'a> ChoiceText<'a> {
    fn new(tokenizer: &'a Tokenizer, shown: &Shown) -> ChoiceText<'a> {
        ChoiceText {
            decoder: Some(tokenizer.decode_stream(true)),
            cut: StopCut::new(&shown.stop),
            tokens: 0,
        }
    }

    fn push(&mut self, ids: &[u32]) -> Result<Vec<Delta>, RenderError> {
        self.tokens += ids.len();
        let mut text = String::new();
        if let Some(decoder) = &mut self.decoder {
            for &id in ids {
                text.push_str(&decoder.push(id)?);
            }
        }
        Ok(content(self.cut.push(text)))
    }

    fn finish(&mut self, _: &Choice) -> Vec<Delta> {
        let rest = self.decoder.take().map(StreamDecoder::finish);
        let mut text = match rest {
            Some(Ok(rest)) => self.cut.push(rest),
            Some(Err(_)) | None => String::new(),
        };
        text.push_str(&self.cut.finish());
        content(text)
    }
}

fn content(text: String) -> Vec<Delta> {
    match text.is_empty() {
        true => Vec::new(),
        false => vec![Delta::Content(text)],
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
    /// Resolves at the first token or the end; errors that come before are not yet part of a stream. After `patience` the
    /// stream begins all the same.
    pub(super) async fn begun(&mut self, patience: std::time::Duration) -> Result<(), ApiError> {
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
