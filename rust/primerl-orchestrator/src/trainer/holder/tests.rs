use super::*;
use std::sync::atomic::{AtomicU32, Ordering};

const PATIENCE: Duration = Duration::from_millis(50);

struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("primerl-holder-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(path.join("run")).expect("a folder can be made");
        Folder(path)
    }

    fn open(&self) -> Holder {
        Holder::open(&self.0, PATIENCE)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

fn elsewhere(id: &str) -> Identity {
    Identity {
        id: id.to_owned(),
        pid: 4711,
        host: format!("node-{id}"),
        place: Some(Place("another boot".to_owned())),
        began: Some(1),
        launcher: None,
    }
}

fn here(id: &str) -> Identity {
    Identity {
        id: id.to_owned(),
        ..Identity::own()
    }
}

fn is_refused(answer: Answer) -> bool {
    matches!(answer, Answer::Refused(_))
}

#[test]
fn the_first_keeps_the_run_and_the_second_learns_who_has_it() {
    let folder = Folder::new();
    let holder = folder.open();
    let (first, second) = (elsewhere("a"), elsewhere("b"));
    assert_eq!(holder.begin(&first, Instant::now()), Answer::Yours);
    let asked = Instant::now();
    assert!(matches!(holder.begin(&second, asked), Answer::Unknown(..)));
    holder.admit(Some(&first)).expect("it has the run");
    let Answer::Refused(why) = holder.begin(&second, asked) else {
        panic!("the first sent a heartbeat since the second asked");
    };
    assert!(why.contains("process 4711 on node-a"), "{why}");
    assert!(holder.admit(Some(&second)).is_err() && holder.admit(None).is_err());
    holder.left(Some(&second));
    holder.admit(Some(&first)).expect("it has not left");
    holder.left(Some(&first));
    assert_eq!(holder.begin(&second, asked), Answer::Yours);
    assert!(
        is_refused(holder.begin(&first, Instant::now())),
        "it has left"
    );
}

#[test]
fn a_trainer_elsewhere_that_is_silent_is_replaced_and_stays_so() {
    let folder = Folder::new();
    let holder = folder.open();
    let (first, second) = (elsewhere("a"), elsewhere("b"));
    assert_eq!(holder.begin(&first, Instant::now()), Answer::Yours);
    let Answer::Unknown(until, _) = holder.begin(&second, Instant::now()) else {
        panic!("nothing is known of the first");
    };
    while Instant::now() < until {
        std::thread::yield_now();
    }
    assert_eq!(holder.begin(&second, Instant::now()), Answer::Yours);
    let why = holder.admit(Some(&first)).expect_err("it was replaced");
    assert!(why.contains("replaced by process 4711 on node-b"), "{why}");
}

#[test]
fn a_process_of_this_machine_is_checked() {
    if Place::own().is_none() {
        return; // This system does not tell.
    }
    let folder = Folder::new();
    let holder = folder.open();
    assert_eq!(holder.begin(&here("a"), Instant::now()), Answer::Yours);
    assert!(
        is_refused(holder.begin(&here("b"), Instant::now())),
        "it lives"
    );
    let ended = Identity {
        began: Some(0),
        ..here("c")
    };
    holder.left(Some(&here("a")));
    assert_eq!(holder.begin(&ended, Instant::now()), Answer::Yours);
    holder
        .admit(Some(&here("d")))
        .expect("another process has that number by now");
}

#[test]
fn what_a_launcher_started_is_gone_when_it_starts_another() {
    let folder = Folder::new();
    let holder = folder.open();
    let launched = Identity {
        launcher: Some("mark".to_owned()),
        ..elsewhere("a")
    };
    assert_eq!(holder.begin(&launched, Instant::now()), Answer::Yours);
    holder.is_started_again();
    assert_eq!(holder.begin(&elsewhere("b"), Instant::now()), Answer::Yours);
    holder.is_started_again();
    assert!(
        !is_refused(holder.begin(&elsewhere("b"), Instant::now())),
        "no launcher has started it"
    );
}

#[test]
fn who_has_the_run_is_known_after_a_restart() {
    let folder = Folder::new();
    let first = elsewhere("a");
    assert_eq!(folder.open().begin(&first, Instant::now()), Answer::Yours);
    let holder = folder.open();
    assert!(holder.admit(Some(&elsewhere("b"))).is_err());
    holder.admit(Some(&first)).expect("it still has the run");
    std::fs::write(folder.0.join(FILE), "{").expect("it can be written");
    assert_eq!(
        folder.open().begin(&elsewhere("b"), Instant::now()),
        Answer::Yours
    );
}

#[tokio::test]
async fn waiting_for_a_change_misses_none_that_came_before_the_check() {
    let folder = Folder::new();
    let holder = folder.open();
    let (first, second) = (elsewhere("a"), elsewhere("b"));
    assert_eq!(holder.begin(&first, Instant::now()), Answer::Yours);
    let changed = holder.changed();
    let answer = holder.begin(&second, Instant::now());
    assert!(matches!(answer, Answer::Unknown(..)));
    // Between the look and the wait.
    holder.left(Some(&first));
    let waited = tokio::time::timeout(Duration::from_secs(5), changed).await;
    waited.expect("it notices the change");
}
