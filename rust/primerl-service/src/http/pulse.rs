//! What a connection is doing, and since when. Updated as bytes and requests pass, and checked now and then: no request
//! needs its own timer.

use super::Limits;
use axum::body::Body;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Written and read by one task only, the connection's; shared because several parts of the connection hold it.
#[derive(Debug)]
pub(super) struct Pulse {
    origin: Instant,
    /// Requests whose answer is not complete yet.
    serving: AtomicU32,
    /// Milliseconds since the origin when the last request ended, or when the first byte of the next one arrived.
    since: AtomicU64,
    /// A part of a request's headers has arrived, or nothing ever has.
    in_headers: AtomicBool,
    /// Milliseconds since the origin, plus one, when writing became blocked; 0 if it is not blocked.
    stalled: AtomicU64,
}

impl Pulse {
    pub(super) fn new() -> Pulse {
        Pulse {
            origin: Instant::now(),
            serving: AtomicU32::new(0),
            since: AtomicU64::new(0),
            in_headers: AtomicBool::new(true),
            stalled: AtomicU64::new(0),
        }
    }

    fn now(&self) -> u64 {
        self.origin.elapsed().as_millis() as u64
    }

    /// Why the connection has to be closed, if it has to be.
    pub(super) fn overdue(&self, limits: &Limits) -> Option<&'static str> {
        let now = self.now();
        let longer =
            |since: u64, limit: Duration| Duration::from_millis(now.saturating_sub(since)) > limit;
        let stalled = self.stalled.load(Relaxed);
        if stalled > 0 && longer(stalled - 1, limits.stalled) {
            return Some("its client does not read");
        }
        if self.serving.load(Relaxed) > 0 || stalled > 0 {
            return None;
        }
        let since = self.since.load(Relaxed);
        match self.in_headers.load(Relaxed) {
            true if longer(since, limits.headers) => Some("its request does not arrive"),
            false if longer(since, limits.idle) => Some("it is idle"),
            _ => None,
        }
    }

    fn bytes_came(&self) {
        if self.serving.load(Relaxed) == 0 && !self.in_headers.swap(true, Relaxed) {
            self.since.store(self.now(), Relaxed);
        }
    }

    fn wrote(&self, outcome: &Poll<io::Result<usize>>) {
        match outcome {
            Poll::Ready(_) => self.stalled.store(0, Relaxed),
            Poll::Pending if self.stalled.load(Relaxed) == 0 => {
                self.stalled.store(self.now() + 1, Relaxed);
            }
            Poll::Pending => {}
        }
    }
}

/// A request, from its headers to the end of its answer.
#[derive(Debug)]
pub(super) struct Serving(Arc<Pulse>);

impl Serving {
    pub(super) fn begin(pulse: Arc<Pulse>) -> Serving {
        pulse.serving.fetch_add(1, Relaxed);
        Serving(pulse)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.since.store(self.0.now(), Relaxed);
        self.0.in_headers.store(false, Relaxed);
        self.0.serving.fetch_sub(1, Relaxed);
    }
}

/// An answer's body, which ends its request.
pub(super) struct Tracked {
    body: Body,
    _serving: Serving,
}

impl Tracked {
    pub(super) fn new(body: Body, serving: Serving) -> Tracked {
        Tracked {
            body,
            _serving: serving,
        }
    }
}

impl http_body::Body for Tracked {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A stream that records when bytes arrive, and when none can be sent.
pub(super) struct Watched {
    stream: TcpStream,
    pulse: Arc<Pulse>,
}

impl Watched {
    pub(super) fn new(stream: TcpStream, pulse: Arc<Pulse>) -> Watched {
        Watched { stream, pulse }
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let outcome = ready!(Pin::new(&mut self.stream).poll_read(context, buffer));
        if buffer.filled().len() > before {
            self.pulse.bytes_came();
        }
        Poll::Ready(outcome)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.pulse.wrote(&outcome);
        outcome
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.pulse.wrote(&outcome);
        outcome
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
