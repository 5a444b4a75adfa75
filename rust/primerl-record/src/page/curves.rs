//! Values by step from the run's files: `metrics.jsonl` (the trainer's), `steps.jsonl` and `evals.jsonl` (the
//! orchestrator's). Each file is read from where the last read ended, and kept as columns, so a request costs what it
//! asks for, not what the files hold.

mod lines;

use super::line::Line;
use lines::Lines;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};

/// Most points of one curve in one answer, whatever is requested.
pub const MOST_POINTS: usize = 1_000;
/// Most curves in one answer.
pub const MOST_CURVES: usize = 64;
/// A curve with more points has a moving mean: the part of the curve that one mean covers, and the number of places.
const MEAN_FROM: usize = 60;
const MEAN_PARTS: usize = 30;
const MEANS: usize = 200;
/// Number of evaluations that are kept.
const MOST_EVALUATIONS: usize = 10_000;

const TRAINER: &str = "metrics.jsonl";
const ORCHESTRATOR: &str = "steps.jsonl";
const EVALUATIONS: &str = "evals.jsonl";

/// The files of one run.
#[derive(Debug)]
pub struct Curves {
    trainer: Table,
    orchestrator: Table,
    evaluations: Lines,
    evaluated: VecDeque<Value>,
    unread: Unread,
}

/// What is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// Its name.
    pub file: &'static str,
    /// Whole lines that are not as a run writes them, and are omitted; and the number of the first of them, from 1.
    pub lines: usize,
    pub first: Option<usize>,
    /// Steps between the first and the last one that have no line, and the first of them.
    pub missing: usize,
    pub first_missing: Option<u64>,
    /// It ends within a line, as while one is written.
    pub is_cut: bool,
}

/// Lines that were not read.
#[derive(Debug, Default)]
struct Unread {
    count: usize,
    first: Option<usize>,
}

impl Unread {
    fn note(&mut self, number: usize) {
        self.count += 1;
        self.first.get_or_insert(number);
    }
}

/// The requested curves.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub names: Vec<String>,
    pub from: u64,
    pub to: u64,
    pub points: usize,
}

impl Curves {
    pub fn new(output_dir: &Path) -> Curves {
        Curves {
            trainer: Table::new(output_dir.join(TRAINER)),
            orchestrator: Table::new(output_dir.join(ORCHESTRATOR)),
            evaluations: Lines::new(output_dir.join(EVALUATIONS)),
            evaluated: VecDeque::new(),
            unread: Unread::default(),
        }
    }

    /// Reads on.
    ///
    /// # Errors
    /// A file cannot be read; a missing file is not an error.
    pub fn refresh(&mut self) -> io::Result<()> {
        self.trainer.refresh()?;
        self.orchestrator.refresh()?;
        let (evaluated, unread) = (&mut self.evaluated, &mut self.unread);
        if self.evaluations.is_another()? {
            evaluated.clear();
            *unread = Unread::default();
        }
        self.evaluations.read_on(|number, line| {
            match serde_json::from_slice(line) {
                Ok(evaluation) => evaluated.push_back(evaluation),
                Err(_) if line.is_empty() => {}
                Err(_) => unread.note(number),
            }
            if evaluated.len() > MOST_EVALUATIONS {
                evaluated.pop_front();
            }
        })
    }

    /// Changes with every added line.
    pub fn rows(&self) -> usize {
        self.trainer.rows + self.orchestrator.rows + self.evaluated.len()
    }

    /// `{"steps": [first, last], "names": [...], "curves": {name: {"x": [...], "y": [...], "mean": ...}}}`; the mean is
    /// a curve too, over its `window` of points, or null for a short curve.
    pub fn answer(&self, wanted: &Wanted) -> Value {
        let mut curves = Map::new();
        for name in wanted.names.iter().take(MOST_CURVES) {
            let points = self.points(name, wanted);
            let mean = moving_mean(&points).map(|(window, mean)| {
                let mut mean = drawn(mean);
                mean["window"] = json!(window);
                mean
            });
            let mut curve = drawn(thin(points, wanted.points.clamp(3, MOST_POINTS)));
            curve["mean"] = json!(mean);
            curves.insert(name.clone(), curve);
        }
        let mut names: Vec<&String> = self
            .tables()
            .flat_map(|table| table.columns.keys())
            .collect();
        names.sort_unstable();
        names.dedup();
        let first = self.tables().filter_map(|table| table.steps.first()).min();
        let last = self.tables().filter_map(|table| table.steps.last()).max();
        json!({"steps": [first, last], "names": names, "curves": curves})
    }

    /// What is wrong with each file; of sound ones nothing.
    pub fn damaged(&self) -> Vec<Damage> {
        let evaluations = Damage {
            file: EVALUATIONS,
            lines: self.unread.count,
            first: self.unread.first,
            missing: 0,
            first_missing: None,
            is_cut: self.evaluations.is_cut,
        };
        let all = [
            self.trainer.damage(TRAINER),
            self.orchestrator.damage(ORCHESTRATOR),
            evaluations,
        ];
        let is_sound = |one: &Damage| one.lines == 0 && one.missing == 0 && !one.is_cut;
        all.into_iter().filter(|one| !is_sound(one)).collect()
    }

    /// The last step of each file of metrics that has any.
    pub fn last_steps(&self) -> BTreeMap<&'static str, u64> {
        let tables = [(TRAINER, &self.trainer), (ORCHESTRATOR, &self.orchestrator)];
        let last = |(name, table): (_, &Table)| Some((name, *table.steps.last()?));
        tables.into_iter().filter_map(last).collect()
    }

    /// Evaluations, the newest last: `limit` of them before number `cursor`.
    pub fn evaluations(&self, cursor: Option<usize>, limit: usize) -> Value {
        let end = cursor.unwrap_or(usize::MAX).min(self.evaluated.len());
        let begin = end.saturating_sub(limit);
        let found: Vec<&Value> = self.evaluated.range(begin..end).collect();
        json!({"evaluations": found, "next": (begin > 0).then_some(begin)})
    }

    /// Every value of a curve, by step.
    pub fn values(&self, name: &str) -> Vec<f32> {
        let whole = Wanted {
            names: Vec::new(),
            from: 0,
            to: u64::MAX,
            points: MOST_POINTS,
        };
        let points = self.points(name, &whole).into_iter();
        points.map(|(_, value)| value).collect()
    }

    /// The sum of a curve's values in the last `steps` steps, of which some may have none.
    pub fn sum_of_last(&self, name: &str, steps: usize) -> f64 {
        let mut tables = self.tables();
        let Some(table) = tables.find(|table| table.columns.contains_key(name)) else {
            return 0.0;
        };
        let from = table.steps.len().saturating_sub(steps);
        let last = table.columns[name].iter().skip(from);
        let there = last.filter(|value| value.is_finite());
        there.map(|value| f64::from(*value)).sum()
    }

    /// Number of steps of the longer file.
    pub fn steps(&self) -> usize {
        self.tables()
            .map(|table| table.steps.len())
            .max()
            .unwrap_or(0)
    }

    /// Names of curves that begin so.
    pub fn names<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a str> {
        let names = self.tables().flat_map(|table| table.columns.keys());
        let names: std::collections::BTreeSet<&str> = names
            .map(String::as_str)
            .filter(|name| name.starts_with(prefix))
            .collect();
        names.into_iter()
    }

    fn tables(&self) -> impl Iterator<Item = &Table> {
        [&self.trainer, &self.orchestrator].into_iter()
    }

    /// The trainer's line holds the batch's metrics too; a custom training loop may write none.
    fn points(&self, name: &str, wanted: &Wanted) -> Vec<(u64, f32)> {
        let mut tables = self.tables();
        let table = tables.find(|table| table.columns.contains_key(name));
        table.map_or_else(Vec::new, |table| table.points(name, wanted))
    }
}

fn drawn(points: Vec<(u64, f32)>) -> Value {
    let points = points.into_iter();
    let (x, y): (Vec<u64>, Vec<Value>) = points.map(|(step, value)| (step, short(value))).unzip();
    json!({"x": x, "y": y})
}

/// Six digits are enough for a number that is drawn.
fn short(value: f32) -> Value {
    let text = format!("{value:.5e}");
    text.parse::<f64>()
        .map_or(Value::Null, |value| json!(value))
}

/// At most `most` of the points, including the first and the last, and the lowest and the highest of every stretch:
/// extremes stay visible.
pub fn thin(points: Vec<(u64, f32)>, most: usize) -> Vec<(u64, f32)> {
    if points.len() <= most {
        return points;
    }
    let [first, inner @ .., last] = &points[..] else {
        return points;
    };
    let stretches = ((most - 2) / 2).max(1);
    let mut kept = vec![*first];
    for stretch in 0..stretches {
        let bound = |stretch: usize| stretch * inner.len() / stretches;
        let part = &inner[bound(stretch)..bound(stretch + 1)];
        let by_value = |a: &&(u64, f32), b: &&(u64, f32)| a.1.total_cmp(&b.1);
        let (lowest, highest) = (part.iter().min_by(by_value), part.iter().max_by(by_value));
        if let (Some(lowest), Some(highest)) = (lowest, highest) {
            kept.push(*lowest);
            if lowest.0 != highest.0 {
                let at = kept.len() - usize::from(highest.0 < lowest.0);
                kept.insert(at, *highest);
            }
        }
    }
    kept.push(*last);
    kept
}

/// For a curve with so many points that single ones show little: the mean of those around each of `MEANS` places, and
/// how many they are. The means are of all points: a thinned curve keeps only the extremes.
pub fn moving_mean(points: &[(u64, f32)]) -> Option<(usize, Vec<(u64, f32)>)> {
    let last = points
        .len()
        .checked_sub(1)
        .filter(|last| *last >= MEAN_FROM)?;
    let half = (points.len() / MEAN_PARTS / 2).max(2);
    let mut sums = vec![0.0];
    sums.extend(points.iter().scan(0.0, |sum, (_, value)| {
        *sum += f64::from(*value);
        Some(*sum)
    }));
    let places = MEANS.min(points.len());
    let mean = |place: usize| {
        let at = place * last / (places - 1);
        // At the ends there are fewer.
        let (begin, end) = (at.saturating_sub(half), (at + half).min(last) + 1);
        let mean = (sums[end] - sums[begin]) / (end - begin) as f64;
        (points[at].0, mean as f32)
    };
    Some((2 * half + 1, (0..places).map(mean).collect()))
}

/// A file with one line per step, by column.
#[derive(Debug)]
struct Table {
    lines: Lines,
    /// Ascending.
    steps: Vec<u64>,
    /// NaN if a line has no value; shorter if the last lines have none.
    columns: BTreeMap<String, Vec<f32>>,
    /// Number of lines that were read.
    rows: usize,
    unread: Unread,
}

impl Table {
    fn new(path: PathBuf) -> Table {
        Table {
            lines: Lines::new(path),
            steps: Vec::new(),
            columns: BTreeMap::new(),
            rows: 0,
            unread: Unread::default(),
        }
    }

    fn refresh(&mut self) -> io::Result<()> {
        if self.lines.is_another()? {
            self.steps.clear();
            self.columns.clear();
            self.unread = Unread::default();
        }
        let (steps, columns) = (&mut self.steps, &mut self.columns);
        let (rows, unread) = (&mut self.rows, &mut self.unread);
        self.lines.read_on(|number, line| {
            let Some(Line { step, numbers }) = Line::read(line) else {
                if !line.is_empty() {
                    unread.note(number);
                }
                return;
            };
            *rows += 1;
            let at = row_of(step, steps, columns);
            for (name, value) in numbers {
                let column = match columns.get_mut(&*name) {
                    Some(column) => column,
                    None => columns.entry(name.into_owned()).or_default(),
                };
                set(column, at, value as f32);
            }
        })
    }

    fn damage(&self, file: &'static str) -> Damage {
        let pairs = self.steps.windows(2);
        let gaps = pairs.map(|pair| (pair[0] + 1, (pair[1] - pair[0] - 1) as usize));
        let mut gaps = gaps.filter(|(_, missing)| *missing > 0);
        let first = gaps.next();
        let missing = first.into_iter().chain(gaps).map(|(_, missing)| missing);
        Damage {
            file,
            lines: self.unread.count,
            first: self.unread.first,
            missing: missing.sum(),
            first_missing: first.map(|(step, _)| step),
            is_cut: self.lines.is_cut,
        }
    }

    fn points(&self, name: &str, wanted: &Wanted) -> Vec<(u64, f32)> {
        let Some(column) = self.columns.get(name) else {
            return Vec::new();
        };
        let points = self.steps.iter().copied().zip(column.iter().copied());
        points
            .filter(|(step, value)| (wanted.from..=wanted.to).contains(step) && value.is_finite())
            .collect()
    }
}

/// Where a step is among the known ones; a new one gets an empty row.
fn row_of(step: u64, steps: &mut Vec<u64>, columns: &mut BTreeMap<String, Vec<f32>>) -> usize {
    steps.binary_search(&step).unwrap_or_else(|at| {
        steps.insert(at, step);
        if at + 1 < steps.len() {
            let longer = columns.values_mut().filter(|column| column.len() > at);
            longer.for_each(|column| column.insert(at, f32::NAN));
        }
        at
    })
}

fn set(column: &mut Vec<f32>, at: usize, value: f32) {
    if column.len() <= at {
        column.resize(at + 1, f32::NAN);
    }
    column[at] = value;
}

#[cfg(test)]
mod tests;
