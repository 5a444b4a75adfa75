//! The thread that follows the run's journal for the page. It starts with the first request and rests when there was no
//! request for a while, so a run that no one watches pays nothing; and it only reads files, so the driver, which every
//! request of the run goes through, is never asked and never waits for it.

use super::index::Index;
use crate::inspect::{Following, IdleReport, InspectError};
use parking_lot::{Condvar, Mutex, MutexGuard};
use primerl_core::Status;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Time between two looks at the journal.
const EVERY: Duration = Duration::from_millis(300);
/// How long the thread continues after the last request.
const RESTS_AFTER: Duration = Duration::from_secs(30);
/// After this time, a journal that could not be read is read again from the beginning.
const AGAIN: Duration = Duration::from_secs(2);
/// After this many events the thread pauses, so that other threads, which may serve the run, get its CPU core.
const AT_A_TIME: u64 = 1_000;
const BREATH: Duration = Duration::from_millis(1);
/// Number of events after which the idle times are computed again, at the latest.
const TOLD_EVERY: u64 = 50_000;

/// What is known so far.
#[derive(Default)]
pub struct Known {
    pub index: Index,
    pub idle: Option<IdleReport>,
    /// The core after these events; in a run in progress, the driver is asked instead.
    pub core: Option<Arc<Status>>,
    /// Events of the run that were read.
    pub events: u64,
    /// Whether everything that was written was read.
    pub is_up_to_date: bool,
    /// Why the journal cannot be read further, for now.
    pub problem: Option<String>,
    asked: Option<Instant>,
    /// There will be no more requests.
    is_over: bool,
}

impl Known {
    fn is_asked(&self) -> bool {
        !self.is_over && self.asked.is_some_and(|at| at.elapsed() < RESTS_AFTER)
    }
}

struct Shared {
    output_dir: PathBuf,
    /// The core's status is wanted, too.
    tells_status: bool,
    known: Mutex<Known>,
    /// There is a request.
    asked: Condvar,
    /// There is news.
    news: Condvar,
}

/// The handle of the thread, which ends with it.
pub struct Reader {
    shared: Arc<Shared>,
    started: OnceLock<bool>,
}

impl Reader {
    pub fn new(output_dir: &Path, tells_status: bool) -> Reader {
        Reader {
            shared: Arc::new(Shared::new(output_dir, tells_status)),
            started: OnceLock::new(),
        }
    }

    /// The current data. The thread reads on in the background.
    pub fn known(&self) -> MutexGuard<'_, Known> {
        self.started.get_or_init(|| {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("page-reader".into());
            thread.spawn(move || follow(&shared)).is_ok()
        });
        let mut known = self.shared.known.lock();
        known.asked = Some(Instant::now());
        self.shared.asked.notify_one();
        known
    }

    /// Like [`Reader::known`], after all that was written was read, or `at_most` has passed.
    pub fn settled(&self, at_most: Duration) -> MutexGuard<'_, Known> {
        let deadline = Instant::now() + at_most;
        let mut known = self.known();
        while !known.is_up_to_date && known.problem.is_none() {
            if self
                .shared
                .news
                .wait_until(&mut known, deadline)
                .timed_out()
            {
                break;
            }
        }
        known
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.known.lock().is_over = true;
        self.shared.asked.notify_one();
    }
}

fn follow(shared: &Shared) {
    let mut following: Option<Following> = None;
    loop {
        if shared.rests() {
            return;
        }
        let advanced = match &mut following {
            Some(following) => advance(shared, following),
            None => begin(shared, &mut following),
        };
        let pause = match advanced {
            Ok(()) => EVERY,
            Err(problem) => {
                // The earlier data stays until the journal was read again.
                following = None;
                shared.known.lock().problem = Some(problem.to_string());
                shared.news.notify_all();
                AGAIN
            }
        };
        shared.pause(pause);
    }
}

fn begin(shared: &Shared, following: &mut Option<Following>) -> Result<(), InspectError> {
    let mut index = Index::default();
    *following = Some(Following::begin(&shared.output_dir, |beginning| {
        index = Index::begin(beginning);
    })?);
    let mut known = shared.known.lock();
    (known.index, known.is_up_to_date, known.problem) = (index, false, None);
    Ok(())
}

/// Reads to the end of what is written.
fn advance(shared: &Shared, following: &mut Following) -> Result<(), InspectError> {
    let mut told = following.events();
    while following.next(|moment, place| shared.known.lock().index.saw(moment, place))? {
        if following.events().is_multiple_of(AT_A_TIME) {
            std::thread::sleep(BREATH);
            if !shared.known.lock().is_asked() {
                // It reads further after the next request.
                shared.tell(following, false);
                return Ok(());
            }
        }
        if following.events() - told >= TOLD_EVERY {
            told = following.events();
            if shared.tell(following, false) {
                return Ok(());
            }
        }
    }
    shared.tell(following, true);
    Ok(())
}

impl Shared {
    fn new(output_dir: &Path, tells_status: bool) -> Shared {
        Shared {
            output_dir: output_dir.to_owned(),
            tells_status,
            known: Mutex::default(),
            asked: Condvar::new(),
            news: Condvar::new(),
        }
    }

    /// Waits while there are no requests; `true` if there will be none.
    fn rests(&self) -> bool {
        let mut known = self.known.lock();
        while !known.is_over && !known.is_asked() {
            known.is_up_to_date = false;
            self.asked.wait(&mut known);
        }
        known.is_over
    }

    /// Waits until it is time to look at the journal again. A request does not make that sooner: pages ask often.
    fn pause(&self, pause: Duration) {
        let mut known = self.known.lock();
        if !known.is_over && (known.is_up_to_date || known.problem.is_some()) {
            let deadline = Instant::now() + pause;
            while !known.is_over && !self.asked.wait_until(&mut known, deadline).timed_out() {}
        }
    }

    /// Shows how far it is; `true` if no more is wanted.
    fn tell(&self, following: &Following, is_up_to_date: bool) -> bool {
        let idle = following.idle();
        // Only at the end: intermediate counts are not counts of the run.
        let core = (self.tells_status && is_up_to_date).then(|| Arc::new(following.status()));
        let mut known = self.known.lock();
        (known.idle, known.events) = (Some(idle), following.events());
        known.core = core.or(known.core.take());
        known.is_up_to_date = is_up_to_date;
        self.news.notify_all();
        known.is_over
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Run;

    #[test]
    fn catching_up_stops_without_requests_and_continues_from_there() {
        let run = Run::new(1);
        let all = run.events.len() as u64;
        assert!(all > AT_A_TIME, "{all}");
        let shared = Shared::new(run.path(), true);
        let mut following = None;
        begin(&shared, &mut following).expect("begins");
        let mut following = following.expect("has begun");
        advance(&shared, &mut following).expect("reads");
        assert_eq!(following.events(), AT_A_TIME);
        {
            let mut known = shared.known.lock();
            assert_eq!((known.events, known.is_up_to_date), (AT_A_TIME, false));
            assert!(known.core.is_none(), "it is not at the end");
            known.asked = Some(Instant::now());
        }
        advance(&shared, &mut following).expect("reads");
        let known = shared.known.lock();
        assert_eq!((known.events, known.is_up_to_date), (all, true));
        let counters = known.core.as_ref().map(|core| core.rollouts.counters);
        assert_eq!(counters, Some(run.simulator.core.counters()));
    }
}
