use super::*;
use std::fs::{self, File};
use std::io::Write;

fn wanted(names: &[&str]) -> Wanted {
    Wanted {
        names: names.iter().map(|name| (*name).to_owned()).collect(),
        from: 0,
        to: u64::MAX,
        points: MOST_POINTS,
    }
}

#[test]
fn what_stands_out_survives_thinning() {
    let mut points: Vec<(u64, f32)> = (0..10_000)
        .map(|step| (step, (step as f32).sin()))
        .collect();
    points[4_321].1 = 50.0;
    points[7_777].1 = -50.0;
    for most in [3, 4, 10, 999, 1_000] {
        let kept = thin(points.clone(), most);
        assert!(kept.len() <= most.max(4), "{} of {most}", kept.len());
        assert_eq!((kept.first(), kept.last()), (points.first(), points.last()));
        assert!(kept.is_sorted_by(|a, b| a.0 < b.0));
        assert!(kept.contains(&(4_321, 50.0)) && kept.contains(&(7_777, -50.0)));
    }
    assert_eq!(thin(points[..500].to_vec(), 500), &points[..500]);
    assert!(thin(Vec::new(), 10).is_empty());
}

#[test]
fn a_long_curve_has_a_mean_of_all_its_points() {
    let line = |count: u64| (0..count).map(|step| (step, step as f32 / 10.0));
    assert_eq!(moving_mean(&line(60).collect::<Vec<_>>()), None);
    assert_eq!(moving_mean(&[]), None);
    for count in [61, 250, 10_000] {
        // Noise that has a mean of 0, with one point that stands out.
        let noise = |step: u64| if step.is_multiple_of(2) { 1.0 } else { -1.0 };
        let noisy = line(count).map(|(step, value)| (step, value + noise(step)));
        let mut points: Vec<(u64, f32)> = noisy.collect();
        points[30].1 += 5.0;
        let (window, mean) = moving_mean(&points).expect("is long");
        assert!(window >= 5 && window <= count as usize / 10, "{window}");
        assert_eq!(mean.len(), MEANS.min(count as usize));
        let steps = (mean.first().map(|one| one.0), mean.last().map(|one| one.0));
        assert_eq!(steps, (Some(0), Some(count - 1)));
        let most = 7.0 / (window / 2) as f32 + window as f32 / 40.0;
        for (step, value) in mean {
            let apart = (value - step as f32 / 10.0).abs();
            assert!(apart <= most, "{apart} at {step} of {count}");
        }
    }
}

#[test]
fn files_are_read_on_and_again_after_they_were_replaced() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut curves = Curves::new(folder.path());
    curves.refresh().expect("no file is no error");
    assert_eq!(curves.rows(), 0);
    let path = folder.path().join("metrics.jsonl");
    let add = |text: &str| {
        let mut file = File::options()
            .create(true)
            .append(true)
            .open(&path)
            .expect("opens");
        file.write_all(text.as_bytes()).expect("writes");
    };
    add(
        "{\"step\":1,\"a\":0.5,\"timestamp\":1.7e9}\n{\"step\":2,\"a\":null,\"b\":2}\nno json\n{\"step\":3,\"a\":1.5",
    );
    curves.refresh().expect("reads");
    let answer = curves.answer(&wanted(&["a", "b", "c"]));
    assert_eq!(answer["names"], json!(["a", "b"]));
    assert_eq!(answer["steps"], json!([1, 2]));
    let damaged = Damage {
        file: "metrics.jsonl",
        lines: 1,
        first: Some(3),
        missing: 0,
        first_missing: None,
        is_cut: true,
    };
    assert_eq!(curves.damaged(), std::slice::from_ref(&damaged));
    assert_eq!(
        answer["curves"]["a"],
        json!({"x": [1], "y": [0.5], "mean": null})
    );
    assert_eq!(
        answer["curves"]["c"],
        json!({"x": [], "y": [], "mean": null})
    );
    let rows = curves.rows();
    add("}\n");
    curves.refresh().expect("reads on");
    let whole = Damage {
        is_cut: false,
        ..damaged.clone()
    };
    assert_eq!(curves.damaged(), [whole]);
    assert_eq!(
        curves.answer(&wanted(&["a"]))["curves"]["a"]["x"],
        json!([1, 3])
    );
    assert!(curves.rows() > rows);
    let some = Wanted {
        from: 2,
        to: 2,
        ..wanted(&["b"])
    };
    assert_eq!(curves.answer(&some)["curves"]["b"]["x"], json!([2]));

    // The trainer resumes from an earlier step: it writes a new file.
    fs::remove_file(&path).expect("removes");
    add("{\"step\":1,\"a\":9}\n");
    curves.refresh().expect("reads again");
    assert_eq!(curves.damaged(), []);
    assert_eq!(
        curves.answer(&wanted(&["a"]))["curves"]["a"],
        json!({"x": [1], "y": [9.0], "mean": null})
    );
    // Without the trainer's file, the orchestrator's file gives the values that it has.
    fs::remove_file(&path).expect("removes");
    let steps = folder.path().join("steps.jsonl");
    fs::write(
        &steps,
        "{\"step\":1,\"time_s\":2.5,\"metrics\":{\"a\":7}}\n",
    )
    .expect("writes");
    curves.refresh().expect("reads");
    let answer = curves.answer(&wanted(&["a", "time_s"]));
    assert_eq!(answer["curves"]["a"]["y"], json!([7.0]));
    assert_eq!(answer["curves"]["time_s"]["y"], json!([2.5]));
}

#[test]
fn a_step_that_comes_late_is_put_where_it_belongs() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let lines = "{\"step\":1,\"a\":1}\n{\"step\":3,\"a\":3,\"b\":3}\n{\"step\":2,\"a\":2}\n{\"step\":3,\"a\":4}\n";
    fs::write(folder.path().join("metrics.jsonl"), lines).expect("writes");
    let mut curves = Curves::new(folder.path());
    curves.refresh().expect("reads");
    let answer = curves.answer(&wanted(&["a", "b"]));
    assert_eq!(
        answer["curves"]["a"],
        json!({"x": [1, 2, 3], "y": [1.0, 2.0, 4.0], "mean": null})
    );
    assert_eq!(
        answer["curves"]["b"],
        json!({"x": [3], "y": [3.0], "mean": null})
    );
}

#[test]
fn evaluations_come_in_pages_the_newest_first() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let lines: String = (0..5)
        .map(|version| format!("{{\"version\":{version}}}\n"))
        .collect();
    fs::write(folder.path().join("evals.jsonl"), lines).expect("writes");
    let mut curves = Curves::new(folder.path());
    curves.refresh().expect("reads");
    let page = curves.evaluations(None, 2);
    assert_eq!(
        page,
        json!({"evaluations": [{"version": 3}, {"version": 4}], "next": 3})
    );
    let page = curves.evaluations(Some(3), 9);
    assert_eq!(page["evaluations"][0]["version"], 0);
    assert_eq!(page["next"], Value::Null);
}

#[test]
fn steps_without_a_line_are_named_and_evaluations_that_cannot_be_read() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let lines = |steps: &[u64]| -> String {
        let lines = steps.iter().map(|step| format!("{{\"step\":{step}}}\n"));
        lines.collect()
    };
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).expect("writes");
    // One that was fetched from a store begins later.
    write("metrics.jsonl", &lines(&[5, 6, 9, 10, 12]));
    write("steps.jsonl", &lines(&[1, 2, 3]));
    write("evals.jsonl", "{\"environment\":\"a\"}\n\n{\"env");
    let mut curves = Curves::new(folder.path());
    curves.refresh().expect("reads");
    let found = curves.damaged();
    let [metrics, evaluations] = &found[..] else {
        panic!("{found:?}");
    };
    assert_eq!((metrics.file, metrics.lines), ("metrics.jsonl", 0));
    assert_eq!((metrics.missing, metrics.first_missing), (3, Some(7)));
    assert_eq!((evaluations.file, evaluations.lines), ("evals.jsonl", 0));
    assert!(evaluations.is_cut);
    assert_eq!(
        curves.last_steps(),
        [("metrics.jsonl", 12), ("steps.jsonl", 3)].into()
    );
}
