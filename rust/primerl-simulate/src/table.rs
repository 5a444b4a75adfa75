//! The report for people, as text.

use crate::report::{Engines, Report, Shares, Staleness};
use crate::what_if::WhatIf;
use std::fmt::Write;

/// What a name in the shares means.
pub fn in_words(who: &str, name: &str) -> &'static str {
    match (who, name) {
        (_, "working") => "works",
        (_, "publishing") => "writes weights",
        (_, "rollouts") => "waits for rollouts",
        ("trainer", "weight_update") => "waits until engines have its weights",
        ("engines", "weight_update") => "loads weights",
        (_, "weight_update") => "waits for an engine's weight update",
        (_, "sampling") => "being sampled",
        (_, "queued") => "queued in an engine",
        (_, "environment") => "in the environment",
        (_, "worker_cpu") => "at or waiting for the worker's CPU",
        (_, "async_level") => "idle: as far ahead as max_async_level allows",
        (_, "in_flight_limit") => "idle: oversampling_factor x batch_size in flight",
        (_, "worker_slots") => "idle: every worker is full",
        (_, "run_end") => "idle: the last steps are under way",
        (_, "start") => "before the first version",
        _ => "other",
    }
}

/// Fixed-width lines; ends with a line break.
pub fn table(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_table(&mut text, report);
    text
}

/// Changes and what each would bring, the best first; empty for none.
pub fn what_if_table(cases: &[WhatIf]) -> String {
    let mut text = String::new();
    for case in cases {
        let gain = format!("{:+6.1} % steps an hour", case.gain * 100.0);
        // Writing to a string cannot fail.
        let _ = line(&mut text, &case.change, &gain);
    }
    match text.is_empty() {
        true => text,
        false => format!("what if\n{text}"),
    }
}

fn write_table(text: &mut String, report: &Report) -> std::fmt::Result {
    write_throughput(text, report)?;
    block(text, "trainer", "trainer", &report.trainer)?;
    block(text, "engines", "engines", &report.engines.shares)?;
    write_engines(text, &report.engines)?;
    block(text, "places in the workers", "workers", &report.workers)?;
    if !report.trainer_waited_for.is_empty() {
        block(
            text,
            "rollouts, while the trainer waits for them",
            "workers",
            &report.trainer_waited_for,
        )?;
    }
    write_rollouts(text, report)?;
    for (message, count) in report.warnings.iter().take(5) {
        writeln!(text, "warning ({count} times): {message}")?;
    }
    writeln!(text, "\n{}", report.limit.sentence)
}

fn write_throughput(text: &mut String, report: &Report) -> std::fmt::Result {
    let throughput = &report.throughput;
    writeln!(text, "throughput")?;
    line(
        text,
        "steps",
        &format!(
            "{} in {:.1} s of virtual time",
            throughput.steps, report.seconds
        ),
    )?;
    line(
        text,
        "steps an hour",
        &format!("{:.1}", throughput.steps_per_hour),
    )?;
    line(
        text,
        "trained rollouts a second",
        &format!("{:.3}", throughput.rollouts_per_s),
    )?;
    line(
        text,
        "sampled tokens a second",
        &format!("{:.0}", throughput.sampled_tokens_per_s),
    )
}

fn write_engines(text: &mut String, engines: &Engines) -> std::fmt::Result {
    line(
        text,
        "while they work",
        &format!(
            "{:.1} sequences ({:.0} % of the slots), {:.0} % of the KV cache (at most {:.0} %), {} preemptions",
            engines.mean_running,
            engines.slots_used * 100.0,
            engines.kv_used * 100.0,
            engines.kv_used_max * 100.0,
            engines.preemptions
        ),
    )
}

fn write_rollouts(text: &mut String, report: &Report) -> std::fmt::Result {
    let rollouts = &report.rollouts;
    writeln!(text, "rollouts")?;
    line(
        text,
        "in flight, mean",
        &format!("{:.1}", rollouts.mean_in_flight),
    )?;
    line(
        text,
        "trained of dispatched",
        &format!(
            "{} of {} ({} stale, {} failed, {} cancelled, {} filtered)",
            rollouts.trained,
            rollouts.dispatched,
            rollouts.stale,
            rollouts.failed,
            rollouts.cancelled,
            rollouts.filtered
        ),
    )?;
    write_staleness(text, &report.staleness)
}

fn write_staleness(text: &mut String, staleness: &Staleness) -> std::fmt::Result {
    let samples: u64 = staleness.histogram.values().sum();
    let histogram = staleness.histogram.iter().map(|(steps, count)| {
        let share = *count as f64 * 100.0 / samples.max(1) as f64;
        format!("{steps}: {share:.0} %")
    });
    let histogram: Vec<String> = histogram.collect();
    let words = format!("mean {:.2} ({})", staleness.mean, histogram.join(", "));
    line(text, "staleness, steps", &words)
}

fn line(text: &mut String, name: &str, value: &str) -> std::fmt::Result {
    writeln!(text, "  {name:<48} {value}")
}

fn block(text: &mut String, title: &str, who: &str, shares: &Shares) -> std::fmt::Result {
    writeln!(text, "{title}")?;
    let mut sorted: Vec<_> = shares.iter().collect();
    sorted.sort_by(|a, b| b.1.total_cmp(a.1));
    for (name, share) in sorted {
        line(
            text,
            in_words(who, name),
            &format!("{:5.1} %", share * 100.0),
        )?;
    }
    Ok(())
}
