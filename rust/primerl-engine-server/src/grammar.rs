//! Structured outputs of running answers: which tokens may come next.
//!
//! ```text
//! engine thread   sampled t ──job──> step t+1: plan, forward ─────────> wait, sample t+1
//! mask threads                └─push t, next mask─> Allowed is set ──────┘
//! ```
//! A mask is computed on a thread of its own while the model computes the logits it is applied to. Its work is limited
//! ([`primerl_grammar`]), so the wait is bounded, too. An answer's masks are only touched by its one job in flight.

use primerl_grammar::{GrammarError, Mask, Masks};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The tokens that may come next in one answer, once they are known.
#[derive(Clone, Debug, Default)]
pub struct Allowed(Arc<OnceLock<Result<Mask, GrammarError>>>);

impl Allowed {
    /// Blocks until they are known.
    ///
    /// # Errors
    /// There are none, and the answer has to end here. Whatever is sampled in this place is discarded.
    pub fn wait(&self) -> Result<&Mask, &GrammarError> {
        self.0.wait().as_ref()
    }

    fn set(&self, mask: Result<Mask, GrammarError>) {
        // The first counts: a job sets it once, and again only when it is dropped.
        let _ = self.0.set(mask);
    }
}

impl PartialEq for Allowed {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// The masks of one answer in the engine.
#[derive(Clone, Debug)]
pub struct Grammar {
    masks: Arc<Mutex<Masks>>,
    next: Allowed,
    workers: Workers,
}

impl Grammar {
    /// The mask of the token after the last one that was pushed.
    pub fn next(&self) -> &Allowed {
        &self.next
    }

    /// Whether the next token may be this one. Waits for its mask.
    ///
    /// # Errors
    /// As [`Allowed::wait`].
    pub fn allows(&self, token: u32) -> Result<bool, &GrammarError> {
        let mask = self.next.wait()?;
        let word = mask.get((token / 32) as usize);
        Ok(word.is_some_and(|word| word & (1 << (token % 32)) != 0))
    }

    /// Goes on behind a token that was sampled.
    pub fn push(&mut self, token: u32) {
        self.next = Allowed::default();
        self.workers.send(Job {
            masks: Arc::clone(&self.masks),
            token: Some(token),
            next: self.next.clone(),
        });
    }
}

struct Job {
    masks: Arc<Mutex<Masks>>,
    token: Option<u32>,
    next: Allowed,
}

impl Job {
    fn run(self) {
        let mut masks = self.masks.lock().unwrap_or_else(PoisonError::into_inner);
        let pushed = self.token.map_or(Ok(()), |token| masks.push(token));
        self.next.set(pushed.and_then(|()| masks.mask()));
    }
}

impl Drop for Job {
    /// Nobody waits for a job that panicked, or that no thread took.
    fn drop(&mut self) {
        let problem = "its mask was not computed".to_owned();
        self.next
            .set(Err(GrammarError::Step { tokens: 0, problem }));
    }
}

/// The threads that compute masks. They end when the last one of these is gone.
#[derive(Clone, Debug)]
pub struct Workers {
    jobs: Sender<Job>,
}

impl Workers {
    /// Starts them.
    ///
    /// # Errors
    /// The system starts no thread.
    pub fn start(threads: usize) -> std::io::Result<Self> {
        let (jobs, receiver) = channel();
        let receiver = Arc::new(Mutex::new(receiver));
        for _ in 0..threads.max(1) {
            let receiver = Arc::clone(&receiver);
            std::thread::Builder::new()
                .name("masks".into())
                .spawn(move || {
                    while let Some(job) = next_job(&receiver) {
                        job.run()
                    }
                })?;
        }
        Ok(Workers { jobs })
    }

    /// Begins an answer: its first mask is computed at once.
    pub fn begin(&self, masks: Masks) -> Grammar {
        let grammar = Grammar {
            masks: Arc::new(Mutex::new(masks)),
            next: Allowed::default(),
            workers: self.clone(),
        };
        self.send(Job {
            masks: Arc::clone(&grammar.masks),
            token: None,
            next: grammar.next.clone(),
        });
        grammar
    }

    fn send(&self, job: Job) {
        // Where the threads are gone, the job comes back, is dropped, and says so.
        let _ = self.jobs.send(job);
    }
}

/// Waits under the lock, which is held by one waiting thread, never by a working one.
fn next_job(jobs: &Mutex<Receiver<Job>>) -> Option<Job> {
    let jobs = jobs.lock().unwrap_or_else(PoisonError::into_inner);
    jobs.recv().ok()
}
