//! The worker's half of the environment leases: registers, leases rollouts, sends heartbeats and results.
//!
//! It runs on a separate thread and never calls its owner, so a busy owner (a reward function that blocks Python's
//! event loop) loses no lease: heartbeats continue, and report for how long the owner has been busy ([`pulse`]). The
//! owner gets [`Notice`]s.
//!
//! ```text
//! registered ──lease──> held ──report──> reporting ──answered──> gone
//!     │                  │ └─release──────────────────────────────┘
//!     └──410: everything held is void, register again
//! ```
//! Who waits for what, and what ends the wait:
//! - the lease loop waits for free capacity (ended by `report` or `release`), then for the long poll (the server);
//! - a report is sent until it is answered, also over a new registration;
//! - all of them end when the orchestrator has answered nothing for `give_up`: [`End::Unreachable`].

mod calls;
mod loops;
mod mailbox;
mod pulse;
mod request;

pub use calls::{Answer, Call, CallError};
pub use mailbox::Mailbox;

use super::wire::{Lease, RegisterAnswer, RegisterRequest};
use calls::Calls;
use parking_lot::Mutex;
use primerl_core::event::Outcome;
use primerl_core::{RolloutId, WorkerId};
use primerl_service::secret::Secret;
use pulse::{Held, Pulse};
use request::Contact;
use std::collections::HashSet;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

#[derive(Clone, Debug)]
pub struct Options {
    /// `http://host:port`
    pub orchestrator_url: String,
    /// The run's key, if it has one.
    pub api_key: Option<Secret>,
    pub registration: RegisterRequest,
    /// Most rollouts held at once.
    pub max_concurrent: u32,
    /// The client ends when the orchestrator has answered nothing for this long.
    pub give_up: Duration,
    /// Ends the process: called with the reason when the orchestrator has given this worker up because the owner does
    /// not move, and it still does not. There is no other way to inform the owner.
    pub end_process: fn(&str),
}

/// A message for the owner.
#[derive(Debug)]
pub enum Notice {
    Registered(RegisterAnswer),
    Leased(Vec<Lease>),
    /// Stop these rollouts and [`EnvClient::release`] them; do not report them.
    Cancelled(Vec<RolloutId>),
    /// The orchestrator does not know this worker any more: stop all rollouts; they are already released.
    LeasesVoid,
    Answered {
        call: u64,
        answer: Result<Answer, CallError>,
    },
    /// A problem that the client repairs by itself (or cannot repair), for the log.
    Problem(String),
    /// No more leases. After [`End::Finished`] rollouts that still run may be reported.
    Ended(End),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum End {
    #[error("finished: {0}")]
    Finished(String),
    #[error("orchestrator {url} did not answer for {seconds} s: {reason}")]
    Unreachable {
        url: String,
        seconds: u64,
        reason: String,
    },
    /// The orchestrator refuses this worker: a mistake in a config, which waiting does not fix.
    #[error("orchestrator {url} refused: {reason}")]
    Refused { url: String, reason: String },
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("orchestrator_url: {0:?} is not of the form http://host:port")]
    Url(String),
    #[error("max_concurrent must be at least 1")]
    NoCapacity,
    #[error("cannot start the lease client: {0}")]
    Io(#[from] std::io::Error),
    #[error("cannot build the HTTP client: {0}")]
    Http(#[from] reqwest::Error),
}

/// The registration that the orchestrator gave this process.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Registration {
    worker: WorkerId,
    heartbeat: Duration,
    /// Rollouts that are leased only together.
    together: u32,
    /// Longest time until a lease request is answered.
    long_poll: Duration,
}

struct Shared {
    options: Options,
    http: reqwest::Client,
    mailbox: Mailbox,
    calls: Calls,
    /// Current registration; `None` while there is none. Written by `register_loop` and by any loop that gets a 410.
    registration: watch::Sender<Option<Registration>>,
    /// If both are needed, this one is taken before `registration`.
    rollouts: Mutex<Rollouts>,
    /// Notified when `rollouts` has shrunk.
    shrank: Notify,
    /// When the orchestrator answered last, and what went wrong since. Written after every request.
    contact: Mutex<Contact>,
    pulse: Pulse,
    stop: CancellationToken,
}

#[derive(Default)]
struct Rollouts {
    /// Leased, and running in the owner.
    held: HashSet<RolloutId>,
    /// Reported by the owner, not yet answered by the orchestrator.
    reporting: HashSet<RolloutId>,
    /// [`Notice::Ended`] was sent: it is sent once.
    ended: bool,
}

/// The orchestrator's, if the options are ones to start with.
fn url_of(options: &Options) -> Result<String, StartError> {
    let url = options.orchestrator_url.trim_end_matches('/');
    let valid = reqwest::Url::parse(url).is_ok_and(|url| url.scheme() == "http" && url.has_host());
    if !valid {
        return Err(StartError::Url(options.orchestrator_url.clone()));
    }
    if options.max_concurrent == 0 {
        return Err(StartError::NoCapacity);
    }
    Ok(url.to_owned())
}

impl Shared {
    /// Called within the client's runtime.
    fn new(options: Options, url: String) -> Result<Shared, StartError> {
        Ok(Shared {
            options: Options {
                orchestrator_url: url,
                registration: RegisterRequest {
                    max_concurrent: Some(options.max_concurrent),
                    ..options.registration
                },
                ..options
            },
            http: primerl_service::tls::plain().build()?,
            mailbox: Mailbox::new()?,
            calls: Calls::default(),
            registration: watch::Sender::new(None),
            rollouts: Mutex::default(),
            shrank: Notify::new(),
            contact: Mutex::new(Contact::new()),
            pulse: Pulse::new(),
            stop: CancellationToken::new(),
        })
    }
}

/// Handle of the client's thread. Dropping it stops the thread without a goodbye.
pub struct EnvClient {
    shared: Arc<Shared>,
    runtime: tokio::runtime::Handle,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

impl EnvClient {
    pub fn start(options: Options) -> Result<Self, StartError> {
        let url = url_of(&options)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let handle = runtime.handle().clone();
        let shared = {
            let _in_runtime = runtime.enter();
            Arc::new(Shared::new(options, url)?)
        };
        let for_thread = shared.clone();
        let thread = std::thread::Builder::new()
            .name("env-client".into())
            .spawn(move || runtime.block_on(for_thread.run()))?;
        Ok(Self {
            shared,
            runtime: handle,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Readable while [`Self::take_notices`] has something to give.
    pub fn descriptor(&self) -> RawFd {
        self.shared.mailbox.descriptor()
    }

    pub fn take_notices(&self) -> Vec<Notice> {
        self.shared.mailbox.take()
    }

    /// The rollout ended: send its outcome (until it is answered) and lease another in its place. A rollout that is not
    /// held (any more) is ignored: no one waits for it.
    pub fn report(&self, rollout: RolloutId, outcome: Outcome) {
        {
            let mut rollouts = self.shared.rollouts.lock();
            if !rollouts.held.remove(&rollout) {
                return;
            }
            rollouts.reporting.insert(rollout);
        }
        self.shared.shrank.notify_waiters();
        let shared = self.shared.clone();
        self.runtime.spawn(async move {
            tokio::select! {
                () = shared.send_report(rollout, outcome) => {}
                () = shared.stop.cancelled() => {}
            }
        });
    }

    /// The rollout was stopped without an outcome.
    pub fn release(&self, rollout: RolloutId) {
        self.shared.rollouts.lock().held.remove(&rollout);
        self.shared.shrank.notify_waiters();
    }

    /// The owner's event loop has turned; call this about once a second. One that does not for
    /// [`BLOCKED_AFTER`](primerl_core::event::BLOCKED_AFTER) is reported as blocked by its environment.
    pub fn turned(&self) {
        self.shared.pulse.turned();
    }

    /// Where the owner's event loop is held up, and by which rollout, while it does not turn.
    pub fn held(&self, at: Option<String>, by: Option<RolloutId>) {
        self.shared.pulse.held(Held { at, by });
    }

    pub fn call(&self, call: Call) -> u64 {
        self.shared.calls.start(&self.shared, &self.runtime, call)
    }

    pub fn abort(&self, call: u64) {
        self.shared.calls.abort(call);
    }

    /// Waits for outstanding reports, says goodbye, and stops the thread, all within `patience`.
    pub fn leave(&self, patience: Duration) {
        let Some(thread) = self.thread.lock().take() else {
            return;
        };
        let shared = self.shared.clone();
        self.runtime.spawn(async move {
            let _ = tokio::time::timeout(patience, shared.goodbye()).await;
            shared.stop.cancel();
        });
        // A panic there was printed by the thread; there is nothing left to stop.
        let _ = thread.join();
    }
}

impl Drop for EnvClient {
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}
