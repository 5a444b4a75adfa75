//! Bodies of requests, in pieces: a long conversation's prompt is mostly text that the requests before it had as well,
//! and is shared with them instead of copied.

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Its length is known, so it is sent with a content-length.
#[derive(Clone, Debug, Default)]
pub struct RequestBody {
    /// None of them empty.
    pieces: VecDeque<Bytes>,
}

impl RequestBody {
    pub(super) fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.pieces.push_back(piece);
        }
    }

    pub fn pieces(&self) -> impl Iterator<Item = &Bytes> {
        self.pieces.iter()
    }

    #[cfg(any(test, feature = "testing"))]
    pub fn concatenated(&self) -> Vec<u8> {
        self.pieces().flatten().copied().collect()
    }
}

impl From<RequestBody> for reqwest::Body {
    fn from(body: RequestBody) -> reqwest::Body {
        reqwest::Body::wrap(body)
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.pieces.pop_front().map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.pieces.iter().map(|piece| piece.len() as u64).sum())
    }
}
