use super::*;
use primerl_record::testing::Run;
use primerl_service::inbox;
use std::fs;

const RANKS: u32 = 2;

fn open(run: &Run, core: &Core) -> Batches {
    Batches::new(run.path(), core, inbox::channel().0)
}

fn file(run: &Run, step: Step, rank: u32) -> PathBuf {
    Spool::new(run.path(), RANKS).file(step, rank)
}

/// The run as its journal shows it once every batch of the spool was noted.
fn noted(run: &Run) -> Core {
    let mut core = run.simulator.core.clone();
    for step in kept(run) {
        let checksums = (0..RANKS).map(|rank| {
            let body = fs::read(file(run, step, rank)).expect("is in the spool");
            checksum(&body).expect("is whole")
        });
        let event = Event::BatchWritten {
            step,
            checksums: checksums.collect(),
        };
        core.handle(event, core.now());
    }
    assert_eq!(core.batch_checksums().len(), kept(run).len());
    core
}

fn kept(run: &Run) -> Vec<Step> {
    let core = &run.simulator.core;
    let steps = core.batches_kept_from().0..core.next_step().0;
    steps.map(Step).collect()
}

/// Where the non-empty columns begin in a body, and how many tokens the first micro-batch has.
fn columns_of(body: &[u8]) -> (usize, usize) {
    #[derive(serde::Deserialize)]
    struct Frame {
        header: serde_bytes::ByteBuf,
        columns: serde_bytes::ByteBuf,
    }
    #[derive(serde::Deserialize)]
    struct Header {
        micro_batches: Vec<MicroBatch>,
    }
    #[derive(serde::Deserialize)]
    struct MicroBatch {
        tokens: usize,
    }
    let frame: Frame = rmp_serde::from_slice(body).expect("is a map");
    let header: Header = rmp_serde::from_slice(&frame.header).expect("is a map");
    let end = body.len() - 8 - b"\xa4xxh3\xc4\x08".len();
    (end - frame.columns.len(), header.micro_batches[0].tokens)
}

/// A body written by someone who knows the format.
fn with_its_checksum(mut body: Vec<u8>) -> Vec<u8> {
    let end = body.len() - 8;
    let content = end - b"\xa4xxh3\xc4\x08".len();
    let own = xxhash_rust::xxh3::xxh3_64(&body[..content]);
    body[end..].copy_from_slice(&own.to_le_bytes());
    body
}

#[test]
fn a_token_an_advantage_or_a_logprob_that_changed_is_given_to_no_trainer() {
    let run = Run::new(3);
    let core = noted(&run);
    let step = kept(&run)[0];
    let path = file(&run, step, 1);
    let whole = fs::read(&path).expect("is in the spool");
    let (begin, tokens) = columns_of(&whole);
    // The last token's id, log-probability and advantage; and the checksum itself.
    let places = [1, 2, 3].map(|column| begin + 4 * (column * tokens - 1));
    for place in places.into_iter().chain([whole.len() - 1]) {
        for is_consistent in [false, true] {
            let mut damaged = whole.clone();
            damaged[place] ^= 1;
            if is_consistent && place < whole.len() - 8 {
                damaged = with_its_checksum(damaged);
            }
            fs::write(&path, &damaged).expect("is written");
            let given = open(&run, &core).body(step, 1).expect("is cut again");
            assert_eq!(given, whole, "byte {place}");
            assert_eq!(fs::read(&path).expect("is there"), whole);
            let replaced = run.path().join("replaced_spool");
            let moved = replaced.join(format!("step_{step}/rank_1.msgpack"));
            assert_eq!(fs::read(moved).expect("is kept"), damaged);
            fs::remove_dir_all(replaced).expect("is removed");
        }
    }
}

#[test]
fn a_batch_that_is_gone_or_cut_short_is_written_again() {
    let run = Run::new(3);
    let core = noted(&run);
    let step = kept(&run)[0];
    let path = file(&run, step, 0);
    let whole = fs::read(&path).expect("is in the spool");
    for length in [0, 1, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..length]).expect("is written");
        let given = open(&run, &core).body(step, 0).expect("is cut again");
        assert_eq!(given, whole, "{length}");
    }
    fs::remove_dir_all(path.parent().expect("a folder")).expect("is removed");
    let mut batches = open(&run, &core);
    for rank in 0..RANKS {
        batches.body(step, rank).expect("is cut again");
    }
    assert_eq!(fs::read(&path).expect("is there"), whole);
}

#[test]
fn what_the_journal_does_not_reach_back_to_is_refused() {
    let run = Run::new(3);
    let core = noted(&run);
    run.prune(0);
    let step = kept(&run)[0];
    let path = file(&run, step, 1);
    let whole = fs::read(&path).expect("is in the spool");
    let given = open(&run, &core).body(step, 1).expect("is whole");
    assert_eq!(given, whole);
    let mut damaged = whole;
    let (begin, _) = columns_of(&damaged);
    damaged[begin] ^= 1;
    fs::write(&path, with_its_checksum(damaged.clone())).expect("is written");
    let error = open(&run, &core).body(step, 1).expect_err("is refused");
    let text = error.to_string();
    let expected = [
        &*format!("step_{step}/rank_1.msgpack is not the batch"),
        "the journal knows",
        "not kept any more",
        "--ckpt.resume-step",
    ];
    assert!(expected.iter().all(|words| text.contains(words)), "{text}");
    // Also if the journal knows nothing: a batch from before checksums were recorded shows itself that it is damaged.
    fs::write(&path, &damaged).expect("is written");
    let error = open(&run, &run.simulator.core).body(step, 1);
    let text = error.expect_err("is refused").to_string();
    assert!(text.contains("do not match the checksum"), "{text}");
}

#[test]
fn a_batch_without_a_recorded_checksum_is_compared_with_the_journal() {
    let run = Run::new(3);
    let core = &run.simulator.core;
    let step = kept(&run)[0];
    let path = file(&run, step, 0);
    let whole = fs::read(&path).expect("is in the spool");
    assert_eq!(open(&run, core).body(step, 0).expect("is whole"), whole);
    assert!(!run.path().join("replaced_spool").exists());
    // A batch of another run with the same shape.
    let mut other = whole.clone();
    let (begin, _) = columns_of(&other);
    other[begin] ^= 1;
    fs::write(&path, with_its_checksum(other)).expect("is written");
    assert_eq!(open(&run, core).body(step, 0).expect("is cut again"), whole);
    assert!(run.path().join("replaced_spool").exists());
    // An earlier version's batch: it stays, and has a checksum from now on.
    fs::remove_dir_all(run.path().join("replaced_spool")).expect("is removed");
    let mut earlier = whole[..whole.len() - 15].to_vec();
    earlier[0] = 0x82;
    fs::write(&path, &earlier).expect("is written");
    assert_eq!(open(&run, core).body(step, 0).expect("is whole"), whole);
    assert!(!run.path().join("replaced_spool").exists());
    fs::write(&path, &earlier).expect("is written");
    run.prune(0);
    assert_eq!(open(&run, core).body(step, 0).expect("is given"), earlier);
}

#[test]
fn a_new_batch_replaces_an_existing_one() {
    let run = Run::new(3);
    let core = &run.simulator.core;
    let step = kept(&run)[0];
    let path = file(&run, step, 0);
    let whole = fs::read(&path).expect("is in the spool");
    let batch = run.simulator.observer.batches[&step].clone();
    let mut batches = open(&run, core);
    batches.add(&batch).expect("is there");
    assert!(!run.path().join("replaced_spool").exists());
    fs::write(&path, b"of another run").expect("is written");
    let mut batches = open(&run, core);
    batches.add(&batch).expect("is written");
    assert_eq!(fs::read(&path).expect("is there"), whole);
    assert_eq!(batches.body(step, 0).expect("is given"), whole);
    let moved = format!("replaced_spool/step_{step}/rank_0.msgpack");
    assert_eq!(
        fs::read(run.path().join(moved)).expect("is kept"),
        b"of another run"
    );
}
