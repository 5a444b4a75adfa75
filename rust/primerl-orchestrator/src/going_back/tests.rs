use super::*;
use crate::resumed_run::ResumedRun;
use primerl_core::testing::config;
use primerl_core::{Core, Event};
use primerl_record::journal::{Entry, Journal, read_from};

const STEP: Step = Step(2);

fn journal_in(output_dir: &Path) -> PathBuf {
    output_dir.join("journal")
}

fn say(resumed_run: &mut ResumedRun, reason: &str) {
    let event = Event::ShutdownRequested {
        reason: reason.into(),
    };
    resumed_run
        .journal
        .append(resumed_run.core.now(), &event)
        .expect("is written");
}

fn said(folder: &Path) -> Vec<String> {
    let mut said = Vec::new();
    let note = |_, Entry(_, event)| {
        if let Event::ShutdownRequested { reason } = event {
            said.push(reason);
        }
    };
    read_from(folder, 0, note).expect("is whole");
    said
}

/// A run of five events with a state after the third.
fn begun() -> tempfile::TempDir {
    let place = tempfile::tempdir().expect("a temporary folder");
    let output_dir = place.path();
    let core = Core::new(config()).expect("a valid config");
    let mut resumed_run =
        ResumedRun::open(&journal_in(output_dir), core.clone(), &Identity::new()).expect("begins");
    for reason in ["one", "two", "three"] {
        say(&mut resumed_run, reason);
    }
    resumed_run.journal.end_segment().expect("is written");
    let state = State::new(output_dir, STEP);
    std::fs::create_dir_all(state.folder()).expect("is made");
    let spool = Spool::new(output_dir, 1);
    state
        .keep(&spool, 3, &Identity::new(), &core)
        .expect("is kept");
    for reason in ["four", "five"] {
        say(&mut resumed_run, reason);
    }
    drop(resumed_run);
    for step in 1..=4 {
        spool
            .write(Step(step), &[vec![step as u8].into()])
            .expect("is written");
    }
    let lines = |name: &str, key: &str| {
        let text: String = (0..=3)
            .map(|number| format!("{{\"{key}\": {number}}}\n"))
            .collect();
        std::fs::write(output_dir.join(name), text).expect("is written");
    };
    lines("steps.jsonl", "step");
    lines("evals.jsonl", "version");
    for name in [
        "checkpoints/step_3",
        "checkpoints/replaced_step_3/old",
        "weights/step_2",
        "weights/step_3",
    ] {
        std::fs::create_dir_all(output_dir.join(name)).expect("is made");
    }
    place
}

fn lines_of(output_dir: &Path, name: &str) -> usize {
    whole_lines(&output_dir.join(name)).expect("reads").len()
}

fn has_gone_back(output_dir: &Path) {
    assert_eq!(said(&journal_in(output_dir)), ["one", "two", "three"]);
    let all = ["one", "two", "three", "four", "five"];
    assert_eq!(said(&output_dir.join("replaced_journal")), all);
    // No step was cut by then; the files of version 2 belong to the checkpoint itself.
    assert_eq!(
        ["steps.jsonl", "evals.jsonl"].map(|name| lines_of(output_dir, name)),
        [1, 3]
    );
    let replaced = ["replaced_steps.jsonl", "replaced_evals.jsonl"];
    assert_eq!(replaced.map(|name| lines_of(output_dir, name)), [3, 1]);
    let spool = Spool::new(output_dir, 1);
    assert!((1..=4).all(|step| !spool.has(Step(step))));
    assert!(!journal_in(output_dir).join(GONE_BACK).exists());
    let is_there = |name: &str| output_dir.join(name).exists();
    assert!(is_there("checkpoints/step_2") && is_there("weights/step_2"));
    assert!(!is_there("checkpoints/step_3") && !is_there("weights/step_3"));
    assert!(is_there("checkpoints/replaced_step_3") && is_there("weights/replaced_step_3"));
    assert!(!is_there("checkpoints/replaced_step_3/old"));
    assert!(!output_dir.join("journal.going_back").exists());
    // New events are not in the journal that was set aside.
    let core = Core::new(config()).expect("a valid config");
    let mut resumed_run =
        ResumedRun::open(&journal_in(output_dir), core, &Identity::new()).expect("resumes");
    say(&mut resumed_run, "another");
    drop(resumed_run);
    assert_eq!(
        said(&journal_in(output_dir)),
        ["one", "two", "three", "another"]
    );
    assert_eq!(said(&output_dir.join("replaced_journal")), all);
}

fn is_as_it_was(output_dir: &Path) {
    assert_eq!(said(&journal_in(output_dir)).len(), 5);
    assert_eq!(
        ["steps.jsonl", "evals.jsonl"].map(|name| lines_of(output_dir, name)),
        [4, 4]
    );
    assert!(Spool::new(output_dir, 1).has(Step(4)));
    assert!(output_dir.join("checkpoints/step_3").exists());
}

#[test]
fn the_whole_run_returns_to_its_earlier_state() {
    let place = begun();
    complete(place.path()).expect("there is nothing to do");
    is_as_it_was(place.path());
    go_back(place.path(), STEP, &Identity::new()).expect("goes back");
    has_gone_back(place.path());
    // The same again, from the new events.
    go_back(place.path(), STEP, &Identity::new()).expect("goes back");
    assert_eq!(said(&journal_in(place.path())), ["one", "two", "three"]);
}

/// Runs the steps of `go_back` up to one of them, like a process that was killed there.
fn killed_after(output_dir: &Path, last: usize) {
    let places = Places::of(output_dir);
    let state = State::new(output_dir, STEP);
    let gone_back = GoneBack {
        step: STEP,
        cut: Step(0),
        ranks: 1,
    };
    build(&places, &state, 3, &gone_back).expect("is built");
    if last >= 1 {
        journal::begin_segment(&places.building, 3).expect("is begun");
    }
    if last >= 2 {
        rename(&places.journal, &places.replaced).expect("is renamed");
    }
    if last >= 3 {
        rename(&places.building, &places.journal).expect("is renamed");
    }
    if last >= 4 {
        Spool::new(output_dir, 1)
            .go_back(STEP, Step(0), state.folder())
            .expect("goes back");
        set_lines_aside(output_dir, "steps.jsonl", &|line| {
            line["step"].as_u64() > Some(0)
        })
        .expect("are moved");
    }
}

#[test]
fn a_process_that_is_killed_leaves_one_or_the_other_state() {
    for last in 0..=4 {
        let place = begun();
        killed_after(place.path(), last);
        complete(place.path()).expect("is completed");
        match last {
            0 | 1 => is_as_it_was(place.path()),
            _ => has_gone_back(place.path()),
        }
        assert!(!place.path().join("journal.going_back").exists(), "{last}");
    }
}

#[test]
fn what_has_no_state_or_another_config_is_refused_and_stays() {
    let place = begun();
    let told = |step, identity: &Identity| {
        let error = go_back(place.path(), step, identity).expect_err("is refused");
        assert!(error.is_input());
        is_as_it_was(place.path());
        error.to_string()
    };
    let no_folder = told(Step(3), &Identity::new());
    assert!(
        no_folder.contains("step 3") && no_folder.contains("earlier version"),
        "{no_folder}"
    );
    std::fs::create_dir_all(State::new(place.path(), Step(4)).folder()).expect("is made");
    assert!(told(Step(4), &Identity::new()).contains("did not come to write it"));
    let other = Identity::from([("seed".to_owned(), "2".to_owned())]);
    assert!(told(STEP, &other).contains("seed = not set, and now seed = 2"));
}

#[test]
fn a_state_is_not_kept_where_the_trainer_has_no_checkpoint() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let core = Core::new(config()).expect("a valid config");
    let state = State::new(place.path(), STEP);
    let spool = Spool::new(place.path(), 1);
    state
        .keep(&spool, 3, &Identity::new(), &core)
        .expect("is no error");
    assert!(!place.path().join("checkpoints").exists());
}

#[test]
fn a_segment_ends_where_a_state_was_kept() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let folder = journal_in(place.path());
    let mut journal = Journal::create(&folder).expect("begins");
    let tick = |journal: &mut Journal| {
        journal
            .append(primerl_core::Time(0), &Event::Tick)
            .expect("is written")
    };
    for _ in 0..3 {
        tick(&mut journal);
    }
    journal.end_segment().expect("is written");
    journal.end_segment().expect("there is nothing new");
    tick(&mut journal);
    drop(journal);
    let segments = ["000000000000.log", "000000000003.log"];
    assert!(segments.iter().all(|name| folder.join(name).is_file()));
    assert_eq!(std::fs::read_dir(&folder).expect("lists").count(), 2);
    assert_eq!(
        read_from(&folder, 0, |_, _| ()).expect("is whole").events,
        4
    );
}
