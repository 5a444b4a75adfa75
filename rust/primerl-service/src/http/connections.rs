//! Connections, and how much each of them may take: time, memory, and a place among the others.
//!
//! | what a peer may do | what ends it |
//! |---|---|
//! | connect and say nothing, or send headers byte by byte | `headers`: the connection is cut |
//! | keep a connection that it does not use | `idle`: it is closed |
//! | send headers without end | 431 once they outgrow their buffer, or are more than 100 |
//! | send a body without end, or byte by byte | [`Bodies`]: 413, 408 |
//! | take no part of an answer | `stalled`: the connection is cut |
//! | open connection after connection | `connections`: more wait until others end |
//!
//! A connection holds at most [`BUFFER`] of what came in and of what goes out, and the piece of an answer that is on its
//! way. None of it reaches a route, so none of it can wait for one.

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

/// Of a connection, each way. Headers have to fit; what comes with one read past it is still looked at.
const BUFFER: usize = 64 << 10;
/// What is not the peer's fault (no more file descriptors, as a rule) does not get better by trying at once.
const AFTER_FAILED_ACCEPT: Duration = Duration::from_secs(1);

/// Generous to every client that works, finite for the others.
#[derive(Clone, Debug)]
pub struct Limits {
    /// At a time. One for each rollout in flight is usual.
    pub connections: usize,
    /// From the first byte of a request, or the beginning of the connection, to the end of the headers.
    pub headers: Duration,
    /// Without a request. Longer than clients keep a connection (90 s at most), so that none is closed just as it is used.
    pub idle: Duration,
    /// Without a client's taking anything of what is there for it.
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

/// Until `stop` fires; then requests that are being answered are answered, and the rest is closed. Dropped, it cuts all.
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
            tracing::warn!(limit = limits.connections, "no more connections for now");
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

/// One connection, to its end.
async fn attend(
    stream: TcpStream,
    peer: SocketAddr,
    router: Router,
    limits: Arc<Limits>,
    stop: CancellationToken,
) {
    // Events of a stream are small, and wanted now.
    let _ = stream.set_nodelay(true);
    let pulse = Arc::new(Pulse::new());
    let io = TokioIo::new(Watched::new(stream, Arc::clone(&pulse)));
    let service = service_fn(|request| answer(router.clone(), Arc::clone(&pulse), request));
    let mut connection = pin!(
        http1::Builder::new()
            // Its own limit would also end connections that rest between two requests.
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
            // Its peer was told what there was to tell.
            _ = connection.as_mut() => return,
            () = stopped.as_mut(), if !stopping => {
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
            () = next_look.as_mut() => {
                if let Some(why) = pulse.overdue(&limits) {
                    tracing::debug!(%peer, why, "a connection is cut");
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
