//! Limits the tokens that a rollout may sample in total (`sampling.rollout_max_tokens`, `limits.tokens`), over all its
//! requests and answers.
//!
//! A request reserves what it may need before its engines begin, and returns what they did not sample, however it ends,
//! so concurrent requests cannot exceed the total. If less than it may need is left, a request waits as long as others
//! hold a reservation that they may return: the budget truncates its answer only once the rest has really been spent.

use super::rollout_limits::Limit;
use parking_lot::Mutex;
use primerl_service::http::ApiError;
use tokio::sync::Notify;

#[derive(Debug)]
pub(crate) struct Budget {
    spent: Mutex<Spent>,
    /// Notified when a reservation is returned.
    changed: Notify,
}

/// Locked for look-ups and additions only.
#[derive(Debug, Default)]
struct Spent {
    /// `None`: unlimited.
    limit: Option<u64>,
    sampled: u64,
    /// Reserved by requests that are running.
    held: u64,
}

/// The tokens that a request may sample.
#[derive(Debug)]
pub(crate) struct Grant<'a> {
    budget: &'a Budget,
    held: u64,
    /// Tokens for each of its answers.
    pub each: u32,
}

impl Budget {
    pub(crate) fn new(limit: Option<u32>) -> Budget {
        let spent = Spent {
            limit: limit.map(u64::from),
            ..Spent::default()
        };
        Budget {
            spent: Mutex::new(spent),
            changed: Notify::new(),
        }
    }

    /// Applies an additional limit.
    pub(crate) fn lower(&self, limit: Option<u32>) {
        let mut spent = self.spent.lock();
        spent.limit = spent.limit.into_iter().chain(limit.map(u64::from)).min();
    }

    /// Counts recorded tokens.
    pub(crate) fn sampled(&self, tokens: usize) {
        self.spent.lock().sampled += tokens as u64;
    }

    /// The error if the rollout may sample nothing more, even if all reservations are returned.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        let spent = self.spent.lock();
        match spent.limit {
            Some(limit) if spent.sampled >= limit => Err(used_up(spent.sampled, limit)),
            _ => Ok(()),
        }
    }

    /// Reserves `each` tokens for each of this many answers, or what is left. The caller limits the time.
    pub(crate) async fn take(&self, choices: u32, each: u32) -> Result<Grant<'_>, ApiError> {
        let choices = u64::from(choices);
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // No notification after this line is missed.
            changed.as_mut().enable();
            {
                let mut spent = self.spent.lock();
                let Some(limit) = spent.limit else {
                    return Ok(self.grant(0, each));
                };
                let left = limit.saturating_sub(spent.sampled + spent.held);
                if spent.held == 0 || choices * u64::from(each) <= left {
                    let each = u64::from(each).min(left / choices);
                    if each == 0 {
                        return Err(used_up(spent.sampled, limit));
                    }
                    spent.held += choices * each;
                    return Ok(self.grant(choices * each, each as u32));
                }
            }
            changed.await;
        }
    }

    fn grant(&self, held: u64, each: u32) -> Grant<'_> {
        Grant {
            budget: self,
            held,
            each,
        }
    }
}

impl Drop for Grant<'_> {
    /// The tokens that were sampled have been counted before this.
    fn drop(&mut self) {
        self.budget.spent.lock().held -= self.held;
        self.budget.changed.notify_waiters();
    }
}

fn used_up(sampled: u64, limit: u64) -> ApiError {
    Limit::Tokens.refusal(&format!(
        "has sampled {sampled} tokens, and may sample {limit} in all (sampling.rollout_max_tokens or limits)"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use proptest::prelude::*;

    #[tokio::test]
    async fn a_request_waits_for_what_may_come_back_and_gets_what_is_left() {
        let budget = Budget::new(Some(20));
        let first = budget.take(1, 12).await.expect("there is enough");
        let mut second = Box::pin(budget.take(1, 12));
        assert!(
            second.as_mut().now_or_never().is_none(),
            "8 are left, 12 may be"
        );
        budget.sampled(3);
        drop(first);
        assert_eq!(second.await.expect("17 are left").each, 12);
        budget.sampled(12);
        assert_eq!(budget.take(2, 12).await.expect("5 are left").each, 2);
        let error = budget.take(6, 12).await.expect_err("5 are left for 6");
        assert_eq!(error.code, Some("context_length_exceeded"));
        budget.sampled(5);
        assert!(budget.check().is_err());
    }

    #[tokio::test]
    async fn what_failed_is_given_back() {
        let budget = Budget::new(Some(20));
        drop(budget.take(1, 12).await.expect("is enough"));
        assert_eq!(budget.take(1, 20).await.expect("is whole").each, 20);
        assert_eq!(Budget::new(None).take(9, 7).await.expect("no end").each, 7);
    }

    proptest! {
        /// However requests overlap, all of them together sample no more than the budget.
        #[test]
        fn it_is_kept(limit in 1..60_u32, steps in prop::collection::vec((1..4_u32, 1..20_u32, 0..100_u64, 0..6_usize), 0..40)) {
            let budget = Budget::new(Some(limit));
            let (mut sampled, mut running) = (0, Vec::new());
            for (choices, each, share, ends) in steps {
                if let Some(Ok(grant)) = budget.take(choices, each).now_or_never() {
                    let tokens = u64::from(grant.each * choices) * share / 99;
                    running.push((grant, tokens.min(u64::from(choices * each))));
                }
                if ends < running.len() {
                    let (grant, tokens) = running.swap_remove(ends);
                    budget.sampled(tokens as usize);
                    sampled += tokens;
                    drop(grant);
                }
            }
            for (grant, tokens) in running {
                budget.sampled(tokens as usize);
                sampled += tokens;
                drop(grant);
            }
            prop_assert!(sampled <= u64::from(limit), "{sampled} of {limit}");
        }
    }
}
