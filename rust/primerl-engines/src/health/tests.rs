use super::*;
use proptest::prelude::*;

const QUICK: Duration = Duration::from_millis(5);

fn seconds(count: f64) -> Duration {
    Duration::from_secs_f64(count)
}

#[test]
fn three_failed_checks_in_a_row_lose_it_and_three_good_ones_bring_it_back() {
    let (mut health, now) = (Health::default(), Instant::now());
    for _ in 0..4 {
        health.looked_bad();
        health.looked_bad();
        assert!(!health.is_unreachable());
        health.looked_good(QUICK);
    }
    assert!(health.may_return(), "it was never out");
    (0..3).for_each(|_| health.looked_bad());
    assert!(health.is_unreachable());
    health.taken_out(now);
    for bad_in_between in [true, false] {
        health.looked_good(QUICK);
        health.looked_good(QUICK);
        assert!(!health.may_return());
        if bad_in_between {
            health.looked_bad();
        }
    }
    health.looked_good(QUICK);
    assert!(health.may_return());
}

#[test]
fn failing_requests_take_it_out_only_while_another_serves() {
    let now = Instant::now();
    // (answered, failed, their age in seconds) -> out
    for (answered, failed, age, out) in [
        (0, 4, 0.0, false),
        (0, 5, 0.0, true),
        (5, 5, 0.0, true),
        (6, 5, 0.0, false),
        (0, 20, 31.0, false),
        // Only the last ones count.
        (100, 20, 0.0, true),
    ] {
        let mut health = Health::default();
        (0..answered).for_each(|_| health.answered(now));
        (0..failed).for_each(|_| health.failed(now));
        let later = now + seconds(age);
        assert_eq!(
            health.lost(later, true).is_some(),
            out,
            "{answered} {failed} {age}"
        );
        assert_eq!(health.lost(later, false), None);
    }
}

#[test]
fn an_engine_that_makes_no_token_hangs_unless_it_has_nothing_to_do() {
    let (mut health, start) = (Health::default(), Instant::now());
    let at = |count: f64| start + seconds(count);
    health.made(at(0.0), 10.0, false);
    health.made(at(9.0), 10.0, false);
    assert_eq!(health.complaint(at(9.0)), None);
    assert!(
        health
            .complaint(at(11.0))
            .is_some_and(|said| said.contains("no token for 11 s"))
    );
    assert_eq!(health.lost(at(19.0), true), None);
    assert!(health.lost(at(20.0), true).is_some());
    assert_eq!(health.lost(at(20.0), false), None, "the only one");
    health.made(at(21.0), 11.0, false);
    assert_eq!(health.complaint(at(30.0)), None);
    health.made(at(60.0), 11.0, true);
    assert_eq!(health.complaint(at(60.0)), None, "it idles");
    health.was_paused(at(100.0));
    assert_eq!(
        health.lost(at(110.0), true),
        None,
        "new weights were loaded"
    );
}

#[test]
fn the_penalty_grows_with_each_loss_and_is_forgiven() {
    let (mut health, mut now) = (Health::default(), Instant::now());
    let wait = |health: &Health, now: Instant, others: bool| {
        (0..)
            .map(|tenths| seconds(f64::from(tenths) / 10.0))
            .find(|after| health.may_be_asked(now + *after, others))
    };
    let mut waits = Vec::new();
    for _ in 0..10 {
        health.taken_out(now);
        waits.push(wait(&health, now, true).expect("an end").as_secs_f64());
        now += seconds(100.0);
    }
    assert_eq!(waits[..4], [0.2, 0.4, 0.8, 1.6]);
    assert_eq!(waits[9], 60.0);
    assert_eq!(
        wait(&health, now - seconds(100.0), false),
        Some(seconds(10.0)),
        "it is the only one"
    );
    health.serves(now);
    health.taken_out(now + FORGIVES * 8);
    assert_eq!(wait(&health, now + FORGIVES * 8, true), Some(seconds(0.8)));
}

/// What an engine says of itself while `requests` run on it, each at this pace, second by second.
struct Serving {
    health: Health,
    now: Instant,
    tokens: f64,
    requests_s: f64,
}

impl Serving {
    fn new() -> Serving {
        let (health, now) = (Health::default(), Instant::now());
        Serving {
            health,
            now,
            tokens: 1e6,
            requests_s: 1e3,
        }
    }

    fn serve(&mut self, for_s: u32, requests: f64, pace: f64, others: Option<f64>) {
        for _ in 0..for_s {
            self.now += seconds(1.0);
            self.tokens += requests * pace;
            self.requests_s += requests;
            self.health.sampled(self.now, self.tokens, self.requests_s);
            self.health.compare(self.now, others);
        }
    }
}

#[test]
fn an_engine_far_behind_the_others_for_long_is_slow_until_it_keeps_up() {
    let mut engine = Serving::new();
    engine.serve(60, 1.0, 30.0, Some(100.0));
    assert!(!engine.health.is_slow(), "slower, but not far behind");
    engine.serve(200, 1.0, 20.0, Some(100.0));
    assert!(engine.health.is_slow());
    assert!(
        engine
            .health
            .complaint(engine.now)
            .is_some_and(|said| said.starts_with("slow: a request gets 20"))
    );
    engine.serve(200, 1.0, 40.0, Some(100.0));
    assert!(engine.health.is_slow(), "not close enough");
    engine.serve(100, 1.0, 60.0, Some(100.0));
    assert!(!engine.health.is_slow());
    engine.serve(100, 1.0, 1.0, None);
    assert!(
        !engine.health.is_slow(),
        "there is no other engine to be behind"
    );
}

/// It answers no request in all that time.
#[test]
fn an_engine_that_makes_a_token_every_four_seconds_is_slow() {
    let mut engine = Serving::new();
    engine.serve(5, 16.0, 100.0, Some(100.0));
    for _ in 0..20 {
        engine.serve(3, 16.0, 0.0, Some(100.0));
        engine.serve(1, 16.0, 1.0, Some(100.0));
    }
    assert!(engine.health.is_slow());
    engine.serve(14, 2.0, 100.0, Some(100.0));
    assert!(
        engine.health.is_slow(),
        "seen at their pace for less than 15 s"
    );
    engine.serve(60, 2.0, 100.0, Some(100.0));
    assert!(!engine.health.is_slow());
}

#[test]
fn a_gap_between_the_requests_of_a_slow_engine_is_no_recovery() {
    let mut engine = Serving::new();
    engine.serve(1, 0.0, 0.0, None);
    // Four requests tell something for four seconds.
    for _ in 0..2 {
        assert!(!engine.health.is_slow());
        engine.serve(1, 4.0, 1.0, Some(100.0));
        engine.serve(30, 0.0, 0.0, Some(100.0));
        assert_eq!(engine.health.pace(engine.now), None);
    }
    assert!(engine.health.is_slow());
}

#[test]
fn an_engine_that_was_started_again_is_not_judged_by_its_new_counter() {
    let mut engine = Serving::new();
    engine.serve(20, 1.0, 100.0, None);
    let before = engine.health.pace(engine.now);
    engine.tokens = 0.0;
    engine.serve(1, 1.0, 100.0, None);
    assert_eq!(before, Some(100.0));
    engine.serve(20, 1.0, 100.0, None);
    let after = engine.health.pace(engine.now).expect("requests");
    assert!((after - 100.0).abs() < 1e-6, "{after}");
}

#[test]
fn an_unused_slow_engine_gets_another_chance() {
    let mut engine = Serving::new();
    engine.serve(60, 1.0, 1.0, Some(100.0));
    assert!(engine.health.is_slow());
    engine.serve(200, 0.0, 0.0, Some(100.0));
    assert!(!engine.health.is_slow());
}

#[test]
fn an_engine_that_is_never_up_to_date_is_reported_as_behind() {
    let (mut health, start) = (Health::default(), Instant::now());
    let at = |count: u32| start + seconds(f64::from(count));
    let looks = |health: &mut Health, from: u32, until: u32, is_behind: bool| {
        (from..until).for_each(|second| health.compare_weights(at(second), is_behind));
    };
    looks(&mut health, 0, 29, true);
    looks(&mut health, 29, 30, false);
    looks(&mut health, 30, 60, true);
    assert_eq!(health.complaint(at(59)), None);
    let said = health.complaint(at(60)).expect("a complaint");
    assert!(said.starts_with("behind: for 30 s"), "{said}");
    assert!(
        !health.is_slow(),
        "once it is up to date, it is as any other"
    );
    looks(&mut health, 60, 61, false);
    assert_eq!(health.complaint(at(61)), None);
}

#[test]
fn late_checks_make_it_slow_and_timely_ones_end_it() {
    let mut health = Health::default();
    let late = seconds(2.5);
    (0..2).for_each(|_| health.looked_good(late));
    assert!(!health.is_slow());
    health.looked_good(late);
    assert!(health.is_slow());
    (0..4).for_each(|_| health.looked_good(QUICK));
    assert!(health.is_slow());
    health.looked_good(QUICK);
    assert!(!health.is_slow());
}

#[derive(Clone, Debug)]
enum Seen {
    Good(u64),
    Bad,
    Answered,
    Failed,
    Made(u32, bool),
    Out,
}

fn anything() -> impl Strategy<Value = (u64, Seen)> {
    let seen = prop_oneof![
        (0..5000_u64).prop_map(Seen::Good),
        Just(Seen::Bad),
        Just(Seen::Answered),
        Just(Seen::Failed),
        (0..3_u32, any::<bool>()).prop_map(|(more, idle)| Seen::Made(more, idle)),
        Just(Seen::Out),
    ];
    (0..20_000_u64, seen)
}

proptest! {
    /// Whatever is seen: only bad health checks remove the only engine, and an engine that was removed has waited and
    /// has passed checks before it returns.
    #[test]
    fn nothing_but_silence_loses_the_only_engine(story in prop::collection::vec(anything(), 1..200)) {
        let (mut health, mut now, mut made, mut good) = (Health::default(), Instant::now(), 0.0, 0);
        let mut out_at = None;
        for (passed, seen) in story {
            now += Duration::from_millis(passed);
            good = if let Seen::Good(_) = seen { good + 1 } else if matches!(seen, Seen::Bad | Seen::Out) { 0 } else { good };
            match seen {
                Seen::Good(took) => health.looked_good(Duration::from_millis(took)),
                Seen::Bad => health.looked_bad(),
                Seen::Answered => health.answered(now),
                Seen::Failed => health.failed(now),
                Seen::Made(more, idle) => { made += f64::from(more); health.made(now, made, idle) }
                Seen::Out => { health.taken_out(now); out_at = Some(now) }
            }
            prop_assert_eq!(health.lost(now, false), None);
            if let Some(at) = out_at {
                prop_assert_eq!(health.may_return(), good >= GOOD_TO_RETURN);
                prop_assert!(!health.may_be_asked(at, true));
                prop_assert!(health.may_be_asked(at + LONGEST_ALONE, false));
                prop_assert!(health.may_be_asked(at + LONGEST_PENALTY, true));
            }
        }
    }
}
