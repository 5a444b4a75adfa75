//! Connections, and limits on what each of them may use: time, memory, and one of the available places.
//!
//! | a peer that | limit |
//! |---|---|
//! | connects and sends nothing, or sends headers byte by byte | `headers`: the connection is cut |
//! | keeps an idle connection | `idle`: it is closed |
//! | sends endless headers | 431 once they exceed their buffer, or are more than 100 |
//! | sends an endless body, or sends it byte by byte | [`Bodies`]: 413, 408 |
//! | reads nothing of an answer | `stalled`: the connection is cut |
//! | opens too many connections | `connections`: further ones wait until others end |
//!
//! A connection holds at most [`BUFFER`] of input and of output, and the piece of an answer that is being sent. None of
//! this reaches a route, so no route waits for a slow peer.

use super::BodyLimits;
use super::pulse::{Pulse, Serving, Tracked, Watched};
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tower_service::Service;

/// Buffer of a connection, for each direction. Headers have to fit; those that only exceed it within one read are still
/// accepted.
const BUFFER: usize = 64 << 10;
/// Errors that are not the peer's fault (usually no free file descriptors) do not go away if accepting is retried at
/// once.
const AFTER_FAILED_ACCEPT: Duration = Duration::from_secs(1);

/// Generous for every client that works normally, finite for the others.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections at the same time. One for each rollout in flight is usual.
    pub connections: usize,
    /// From the first byte of a request, or the beginning of the connection, to the end of the headers.
    pub headers: Duration,
    /// Longest time without a request. Longer than clients keep a connection (at most 90 s), so that no connection is
    /// closed just as it is used.
    pub idle: Duration,
    /// Longest time in which a client takes nothing of the data that is ready for it.
    pub stalled: Duration,
    pub bodies: BodyLimits,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            connections: 1 << 16,
            headers: Duration::from_secs(30),
            idle: Duration::from_secs(300),
            stalled: Duration::from_secs(60),
            bodies: BodyLimits::default(),
        }
    }
}

/// Serves until `stop` fires; then finishes the requests that are being answered, and closes the other connections.
/// Dropping the future cuts all connections.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    stop: CancellationToken,
) -> io::Result<()> {
    let limits = Arc::new(limits);
    let places = Arc::new(Semaphore::new(limits.connections));
    let mut connections = JoinSet::new();
    loop {
        if places.available_permits() == 0 {
            tracing::warn!(
                limit = limits.connections,
                "connection limit reached; new connections wait"
            );
        }
        let accepted = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = connections.join_next() => continue,
            accepted = accepted => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                let attended = attend(
                    stream,
                    peer,
                    router.clone(),
                    Arc::clone(&limits),
                    stop.clone(),
                );
                connections.spawn(async move {
                    attended.await;
                    drop(place);
                });
            }
            Err(error) if is_the_peers(&error) => {}
            Err(error) => {
                tracing::error!(%error, "cannot accept connections");
                tokio::time::sleep(AFTER_FAILED_ACCEPT).await;
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
    Ok(())
}

fn is_the_peers(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
    )
}

/// Serves one connection until it ends.
async fn attend(
    stream: TcpStream,
    peer: SocketAddr,
    router: Router,
    limits: Arc<Limits>,
    stop: CancellationToken,
) {
    // Events of a stream are small, and clients want them at once.
    let _ = stream.set_nodelay(true);
    let pulse = Arc::new(Pulse::new());
    let io = TokioIo::new(Watched::new(stream, Arc::clone(&pulse)));
    let service = service_fn(|request| answer(router.clone(), Arc::clone(&pulse), request));
    let mut connection = pin!(
        http1::Builder::new()
            // hyper's own limit would also close connections that are idle between two requests.
            .header_read_timeout(None)
            .max_buf_size(BUFFER)
            .timer(TokioTimer::new())
            .serve_connection(io, service)
    );
    let mut stopped = pin!(stop.cancelled());
    let mut stopping = false;
    let look = limits.headers.min(limits.idle).min(limits.stalled) / 2;
    let mut next_look = pin!(tokio::time::sleep(look));
    loop {
        tokio::select! {
            // The peer has received everything that was ready for it.
            _ = connection.as_mut() => return,
            () = stopped.as_mut(), if !stopping => {
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
            () = next_look.as_mut() => {
                if let Some(why) = pulse.overdue(&limits) {
                    tracing::debug!(%peer, why, "connection closed");
                    return;
                }
                next_look.as_mut().reset(tokio::time::Instant::now() + look);
            }
        }
    }
}

async fn answer(
    mut router: Router,
    pulse: Arc<Pulse>,
    request: Request<Incoming>,
) -> Result<Response<Tracked>, Infallible> {
    let serving = Serving::begin(pulse);
    let response = router.call(request.map(Body::new)).await?;
    Ok(response.map(|body| Tracked::new(body, serving)))
}
