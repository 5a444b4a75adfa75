//! The orchestrator's process, and what can be measured of it from outside.

use super::common::{client, cpu_seconds, orchestrate};
use super::world::World;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

const BETWEEN_LOOKS: Duration = Duration::from_millis(250);

pub struct Orchestrator {
    child: Child,
    pub url: String,
}

/// One look.
struct Seen {
    at: Instant,
    finished: u64,
    steps: u64,
    cpu_s: f64,
    own_cpu_s: f64,
    /// Cumulative counts by upper bound in seconds.
    delays: Vec<(f64, f64)>,
    handling: Vec<(f64, f64)>,
}

fn resident_mb(process: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes: f64 = line
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    kilobytes / 1024.0
}

/// A histogram's cumulative counts by upper bound.
fn histogram(metrics: &str, name: &str) -> Vec<(f64, f64)> {
    let begin = format!("primerl_{name}_bucket{{le=\"");
    let buckets = metrics.lines().filter_map(|line| {
        let (bound, count) = line.strip_prefix(&begin)?.split_once("\"} ")?;
        let bound = bound.parse().unwrap_or(f64::INFINITY);
        Some((bound, count.parse().unwrap()))
    });
    buckets.collect()
}

/// The value of this quantile, in milliseconds: at most the upper bound of its bucket.
fn quantile(before: &[(f64, f64)], after: &[(f64, f64)], share: f64) -> String {
    let counts: Vec<(f64, f64)> = before
        .iter()
        .zip(after)
        .map(|((bound, before), (_, after))| (*bound, after - before))
        .collect();
    let wanted = share * counts.last().unwrap().1;
    let (bound, _) = counts.iter().find(|(_, count)| *count >= wanted).unwrap();
    format!("<= {} ms", bound * 1e3)
}

/// Share of the events above `bound` seconds.
fn above(before: &[(f64, f64)], after: &[(f64, f64)], bound: f64) -> f64 {
    let count = |at: usize| after[at].1 - before[at].1;
    let index = after
        .iter()
        .position(|(upper, _)| (upper - bound).abs() < 1e-9);
    1.0 - count(index.unwrap()) / count(after.len() - 1)
}

impl Orchestrator {
    pub fn start(config: &Path, output: &Path) -> Orchestrator {
        let child = orchestrate().arg("--config").arg(config).spawn().unwrap();
        let address = output.join("run/orchestrator.json");
        while !address.exists() {
            std::thread::sleep(Duration::from_millis(10));
        }
        let address: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&address).unwrap()).unwrap();
        let url = address["url"].as_str().unwrap().to_owned();
        Orchestrator { child, url }
    }

    async fn look(&self, world: &World) -> Seen {
        let metrics = client().get(format!("{}/metrics", self.url)).send();
        let metrics = metrics.await.unwrap().text().await.unwrap();
        Seen {
            at: Instant::now(),
            finished: world.finished.get(),
            steps: world.steps.get(),
            cpu_s: cpu_seconds(&self.child.id().to_string()),
            own_cpu_s: cpu_seconds("self"),
            delays: histogram(&metrics, "effect_delay_seconds"),
            handling: histogram(&metrics, "event_handling_seconds"),
        }
    }

    pub async fn measure(&mut self, world: &World, warm_up: u64, rollouts: u64) {
        self.wait_for(world, warm_up, &mut Vec::new()).await;
        let before = self.look(world).await;
        let mut memory = Vec::new();
        self.wait_for(world, before.finished + rollouts, &mut memory)
            .await;
        let after = self.look(world).await;
        print(&before, &after, world);
        print_memory(&memory);
    }

    /// Runs until that many have finished; meanwhile measures rollouts in flight and memory.
    async fn wait_for(&mut self, world: &World, rollouts: u64, memory: &mut Vec<f64>) {
        let mut progress = (world.finished.get(), Instant::now());
        while world.finished.get() < rollouts {
            tokio::time::sleep(BETWEEN_LOOKS).await;
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "the orchestrator ended: {ended:?}");
            memory.push(resident_mb(self.child.id()));
            if world.finished.get() > progress.0 {
                progress = (world.finished.get(), Instant::now());
            }
            assert!(
                progress.1.elapsed() < Duration::from_secs(30),
                "nothing finished for long; {} failed, last: {}",
                world.failed.get(),
                world.failure.borrow()
            );
        }
    }

    pub fn stop(mut self) {
        // Its end is not part of the measurement.
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn print(before: &Seen, after: &Seen, world: &World) {
    let wall = (after.at - before.at).as_secs_f64();
    let rollouts = (after.finished - before.finished) as f64;
    let cpu = after.cpu_s - before.cpu_s;
    println!(
        "{rollouts} rollouts in {wall:.1} s: {:.0} a second; {} in flight, {} steps, {} failed {}",
        rollouts / wall,
        world.in_flight.get(),
        after.steps - before.steps,
        world.failed.get(),
        world.failure.borrow(),
    );
    println!(
        "orchestrator: {:.3} ms CPU a rollout, {:.0} % of a core; engines, workers and trainer: {:.3} ms",
        cpu * 1e3 / rollouts,
        cpu / wall * 100.0,
        (after.own_cpu_s - before.own_cpu_s) * 1e3 / rollouts,
    );
    for (what, before, after) in [
        (
            "event ready to effects issued",
            &before.delays,
            &after.delays,
        ),
        ("of that, in the core", &before.handling, &after.handling),
    ] {
        println!(
            "{what}: median {}, p99 {}, p99.9 {}; {:.3} % above 5 ms, of {} events",
            quantile(before, after, 0.5),
            quantile(before, after, 0.99),
            quantile(before, after, 0.999),
            above(before, after, 5e-3) * 100.0,
            after.last().unwrap().1 - before.last().unwrap().1,
        );
    }
}

fn print_memory(memory: &[f64]) {
    let fifth = (memory.len() / 5).max(1);
    let median = |part: &[f64]| {
        let mut sorted = part.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
    let (first, last) = (
        median(&memory[..fifth]),
        median(&memory[memory.len() - fifth..]),
    );
    let most = memory.iter().copied().fold(0.0, f64::max);
    println!(
        "memory: {first:.1} MB in the first fifth, {last:.1} MB in the last (medians): {:+.1} %; most {most:.1} MB",
        (last / first - 1.0) * 100.0
    );
}
