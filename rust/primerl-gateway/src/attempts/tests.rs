//! Every interleaving of requests, answers, failures, lost connections and restarts.

use super::*;
use proptest::prelude::*;

const REQUEST: u128 = 9;

impl Running for u32 {
    fn is_abandoned(&self) -> bool {
        false
    }
}

/// A constant digest.
fn now() -> Instant {
    static NOW: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    *NOW
}

/// In these tests, the handle of a running attempt is its number.
type Table = Attempts<u32>;

fn begin(table: &mut Table, number: u32) {
    table.begin(REQUEST, number, number, false);
}

fn answer(table: &mut Table, number: u32) {
    table.recorded(REQUEST, number, 0, TurnIndex(number));
    table.ended(REQUEST, number, 1);
}

fn fail(table: &mut Table, number: u32) {
    table.ended(REQUEST, number, 1);
    table.left(REQUEST, number, false, now());
}

fn again(number: u32) -> Claim<u32> {
    Claim::Again {
        number,
        turns: [TurnIndex(number)].into_iter().collect(),
    }
}

fn join(number: u32) -> Claim<u32> {
    Claim::Join {
        number,
        running: number,
    }
}

fn ask(table: &Table, is_marked: bool) -> Claim<u32> {
    table.ask(REQUEST, 1, is_marked, now())
}

const NEW: Claim<u32> = Claim::New { repeats: true };
const FIRST: Claim<u32> = Claim::New { repeats: false };

/// An attempt that was answered, and whose client took the answer.
fn delivered() -> Table {
    let mut table = Table::default();
    begin(&mut table, 1);
    answer(&mut table, 1);
    table.left(REQUEST, 1, true, now());
    table
}

#[test]
fn an_honest_repeat_is_new_and_its_retry_gets_its_own_answer() {
    let mut table = delivered();
    assert_eq!(ask(&table, true), again(1));
    assert_eq!(ask(&table, false), NEW);
    begin(&mut table, 2);
    assert_eq!(ask(&table, true), join(2), "it runs");
    assert_eq!(ask(&table, false), NEW);
    answer(&mut table, 2);
    assert_eq!(ask(&table, true), again(2), "it is on its way");
    table.left(REQUEST, 2, true, now());
    assert_eq!(ask(&table, true), again(2));
    assert_eq!(ask(&table, false), NEW);
}

/// For clients that do not mark retries: a lost answer must not turn a later conversation that begins with the same
/// words into its retry.
#[test]
fn a_lost_answer_is_given_to_an_unmarked_request_for_a_while_only() {
    let mut table = Table::default();
    begin(&mut table, 1);
    answer(&mut table, 1);
    table.left(REQUEST, 1, false, now());
    let asked = |after: Duration, is_marked: bool| table.ask(REQUEST, 1, is_marked, now() + after);
    assert_eq!(asked(Duration::from_secs(8), false), again(1), "a retry");
    assert_eq!(asked(RETRIED_WITHIN, false), again(1));
    let later = RETRIED_WITHIN + Duration::from_millis(1);
    assert_eq!(asked(later, false), NEW, "another conversation");
    assert_eq!(asked(later, true), again(1), "it says that it is a retry");

    // If two answers were lost, the one that may still be requested.
    begin(&mut table, 2);
    answer(&mut table, 2);
    table.left(REQUEST, 2, false, now() + later);
    let asked = |after: Duration| table.ask(REQUEST, 1, false, now() + after);
    assert_eq!(asked(later), again(2));
    assert_eq!(asked(later + later), NEW);
}

#[test]
fn a_repeat_that_failed_is_not_answered_by_the_previous_attempt() {
    let mut table = delivered();
    begin(&mut table, 2);
    fail(&mut table, 2);
    assert_eq!(ask(&table, true), NEW);
    begin(&mut table, 3);
    answer(&mut table, 3);
    table.left(REQUEST, 3, true, now());
    assert_eq!(ask(&table, true), again(3), "what failed is forgotten");
}

#[test]
fn each_of_two_failed_attempts_is_made_again() {
    let mut table = delivered();
    begin(&mut table, 2);
    begin(&mut table, 3);
    fail(&mut table, 2);
    fail(&mut table, 3);
    for number in [4, 5] {
        assert_eq!(ask(&table, true), NEW);
        table.begin(REQUEST, number, number, true);
    }
    assert_eq!(ask(&table, true), join(5));
}

#[test]
fn an_answer_that_no_client_took_is_given_again_once() {
    let mut table = delivered();
    begin(&mut table, 2);
    answer(&mut table, 2);
    table.left(REQUEST, 2, false, now());
    assert_eq!(ask(&table, false), again(2));
    table.joined(REQUEST, 2);
    assert_eq!(ask(&table, false), NEW, "it is on its way to another");
    table.left(REQUEST, 2, true, now());
    assert_eq!(ask(&table, false), NEW);
}

#[test]
fn an_answer_that_one_of_two_clients_took_is_not_lost() {
    for first in [false, true] {
        let mut table = Table::default();
        begin(&mut table, 1);
        table.joined(REQUEST, 1);
        answer(&mut table, 1);
        table.left(REQUEST, 1, first, now());
        table.left(REQUEST, 1, !first, now());
        assert_eq!(ask(&table, false), NEW);
    }
}

#[test]
fn the_retry_of_a_lost_answer_does_not_join_an_attempt_of_another_client() {
    let mut table = Table::default();
    begin(&mut table, 1);
    begin(&mut table, 2);
    answer(&mut table, 1);
    table.left(REQUEST, 1, false, now());
    assert_eq!(ask(&table, true), again(1));
}

#[test]
fn what_was_begun_before_a_restart_is_not_answered_by_what_was_answered_before_it() {
    let mut table = Table::default();
    table.restore(REQUEST, 1, Some((0, TurnIndex(1))));
    assert_eq!(ask(&table, true), again(1));
    assert_eq!(ask(&table, false), NEW);
    table.restore(REQUEST, 2, None);
    assert_eq!(ask(&table, true), NEW);
    table.begin(REQUEST, 3, 3, true);
    answer(&mut table, 3);
    table.left(REQUEST, 3, true, now());
    assert_eq!(
        ask(&table, true),
        again(3),
        "not the attempt from before the restart"
    );
}

#[test]
fn answers_of_one_request_stay_together() {
    let mut table = Table::default();
    for (number, choice, turn) in [(1, 1, 0), (2, 0, 1), (1, 0, 2), (2, 1, 3)] {
        table.restore(REQUEST, number, Some((choice, TurnIndex(turn))));
    }
    let turns = [TurnIndex(1), TurnIndex(3)].into_iter().collect();
    assert_eq!(
        table.ask(REQUEST, 2, true, now()),
        Claim::Again { number: 2, turns }
    );
}

#[test]
fn no_client_gets_only_some_of_several_answers() {
    let mut table = Table::default();
    begin(&mut table, 1);
    table.recorded(REQUEST, 1, 0, TurnIndex(0));
    table.ended(REQUEST, 1, 2);
    table.left(REQUEST, 1, false, now());
    assert_eq!(table.ask(REQUEST, 2, true, now()), FIRST);
    assert!(table.by_digest.is_empty());
}

#[derive(Clone, Debug)]
enum Step {
    Ask { is_marked: bool },
    Answer(usize),
    Fail(usize),
    Leave { client: usize, took_all: bool },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => any::<bool>().prop_map(|is_marked| Step::Ask { is_marked }),
        2 => (0..8_usize).prop_map(Step::Answer),
        1 => (0..8_usize).prop_map(Step::Fail),
        3 => (0..8_usize, any::<bool>()).prop_map(|(client, took_all)| Step::Leave { client, took_all }),
    ];
    prop::collection::vec(step, 0..60)
}

/// The model that the attempts are compared with.
#[derive(Default)]
struct Witness {
    running: Vec<u32>,
    answered: Vec<u32>,
    taken: Vec<u32>,
    /// Which client waits for which attempt.
    clients: Vec<u32>,
}

proptest! {
    #[test]
    fn no_client_ever_gets_the_answer_of_another(steps in steps()) {
        let (mut table, mut seen, mut number) = (Table::default(), Witness::default(), 0);
        for step in steps {
            match step {
                Step::Ask { is_marked } => match ask(&table, is_marked) {
                    Claim::New { .. } => {
                        if !is_marked {
                            let lost = seen.answered.iter().find(|it| !seen.taken.contains(it) && !seen.clients.contains(it));
                            prop_assert_eq!(lost, None, "it could have been given again");
                        }
                        number += 1;
                        table.begin(REQUEST, number, number, is_marked);
                        seen.running.push(number);
                        seen.clients.push(number);
                    }
                    Claim::Join { number, running } => {
                        prop_assert_eq!(number, running);
                        prop_assert!(is_marked && seen.running.contains(&number));
                        table.joined(REQUEST, number);
                        seen.clients.push(number);
                    }
                    Claim::Again { number, turns } => {
                        prop_assert_eq!(&turns[..], [TurnIndex(number)]);
                        prop_assert!(seen.answered.contains(&number));
                        if !is_marked {
                            prop_assert!(!seen.taken.contains(&number) && !seen.clients.contains(&number));
                        } else if seen.taken.contains(&number) {
                            // Only if no other client may have lost an answer.
                            prop_assert!(seen.answered.iter().all(|it| seen.taken.contains(it)));
                            prop_assert!(seen.running.is_empty());
                            prop_assert_eq!(seen.answered.iter().max(), Some(&number));
                        }
                        table.joined(REQUEST, number);
                        seen.clients.push(number);
                    }
                },
                Step::Answer(at) if at < seen.running.len() => {
                    let number = seen.running.remove(at);
                    answer(&mut table, number);
                    seen.answered.push(number);
                }
                Step::Fail(at) if at < seen.running.len() => {
                    let number = seen.running.remove(at);
                    table.ended(REQUEST, number, 1);
                    while let Some(at) = seen.clients.iter().position(|it| *it == number) {
                        seen.clients.remove(at);
                        table.left(REQUEST, number, false, now());
                    }
                }
                Step::Leave { client, took_all } if client < seen.clients.len() => {
                    let number = seen.clients.remove(client);
                    let took_all = took_all && seen.answered.contains(&number);
                    table.left(REQUEST, number, took_all, now());
                    if took_all {
                        seen.taken.push(number);
                    }
                }
                _ => {}
            }
            prop_assert_eq!(table.running(), seen.running.len());
            let kept = table.by_digest.get(&REQUEST).map_or(0, |all| all.len());
            let open = seen.running.len() + seen.answered.iter().filter(|it| !seen.taken.contains(it)).count();
            prop_assert!(kept <= open + 1 + MOST_FAILED, "{kept} are kept, {open} are open");
        }
    }
}
