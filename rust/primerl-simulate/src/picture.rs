//! Draws the run as SVG: what each process did over time, and how many rollouts were in flight.

use crate::report::Report;
use crate::table::in_words;
use crate::tracks::{Doing, Track};
use crate::world::World;
use std::fmt::Write;

const LEFT: f64 = 150.0;
const WIDTH: f64 = 960.0;
/// For half of the last label of the axis.
const RIGHT: f64 = 40.0;
const ROW: f64 = 22.0;
const GAP: f64 = 6.0;
const AREA: f64 = 160.0;
const COLUMNS: usize = 480;
/// Letters that certainly fit into a line, and the height of a line.
const LINE: usize = 150;
const LINE_HEIGHT: f64 = 16.0;
/// More engines than this are drawn as one row.
const MOST_ENGINES: usize = 32;

fn color(doing: Doing) -> &'static str {
    match doing {
        Doing::Working => "#2b7a4b",
        Doing::Publishing => "#9acd7a",
        Doing::Rollouts => "#d9574a",
        Doing::Sampling => "#2f6db5",
        Doing::Queued => "#8fb4e3",
        Doing::Environment => "#e6a23c",
        Doing::WorkerCpu => "#b8862b",
        Doing::WeightUpdate => "#8e5bb5",
        Doing::AsyncLevel => "#e8b4ae",
        Doing::InFlightLimit => "#c9c9c9",
        Doing::WorkerSlots => "#a3a3a3",
        Doing::RunEnd | Doing::Start => "#eeeeee",
    }
}

/// One row of a picture: its label, and shares of a whole in each column.
struct Row {
    label: String,
    who: &'static str,
    columns: Vec<[f64; Doing::ALL.len()]>,
    height: f64,
}

/// The picture of a run that was played to its end.
pub fn picture(world: &World, report: &Report) -> String {
    let mut rows = vec![row(
        world,
        "trainer".to_owned(),
        "trainer",
        &[&world.measured.trainer],
    )];
    let engines: Vec<&Track> = world.measured.engines.iter().collect();
    if engines.len() > MOST_ENGINES {
        rows.push(row(
            world,
            format!("{} engines", engines.len()),
            "engines",
            &engines,
        ));
    } else {
        let each = engines.iter().enumerate();
        rows.extend(
            each.map(|(index, track)| row(world, format!("engine {index}"), "engines", &[track])),
        );
    }
    rows.push(in_flight(world));
    draw(&rows, world, report)
}

fn columns(world: &World, tracks: &[&Track]) -> Vec<[f64; Doing::ALL.len()]> {
    let mut sum = vec![[0.0; Doing::ALL.len()]; COLUMNS];
    for track in tracks {
        let own = track.columns(world.measured.began, world.now, COLUMNS);
        for (sum, own) in sum.iter_mut().zip(own) {
            sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
        }
    }
    sum
}

fn row(world: &World, label: String, who: &'static str, tracks: &[&Track]) -> Row {
    let mut columns = columns(world, tracks);
    for column in &mut columns {
        column
            .iter_mut()
            .for_each(|share| *share /= tracks.len() as f64);
    }
    Row {
        label,
        who,
        columns,
        height: ROW,
    }
}

/// Rollouts in flight by what they do, as shares of the most there were.
fn in_flight(world: &World) -> Row {
    let mut columns = columns(world, &[&world.measured.slots]);
    let kinds = Doing::Sampling as usize..=Doing::WeightUpdate as usize;
    let mut most = 0.0_f64;
    for column in &mut columns {
        let outside = column
            .iter_mut()
            .enumerate()
            .filter(|(kind, _)| !kinds.contains(kind));
        outside.for_each(|(_, count)| *count = 0.0);
        most = most.max(column.iter().sum());
    }
    for column in &mut columns {
        column.iter_mut().for_each(|count| *count /= most.max(1e-9));
    }
    Row {
        label: format!("in flight, to {most:.0}"),
        who: "workers",
        columns,
        height: AREA,
    }
}

fn draw(rows: &[Row], world: &World, report: &Report) -> String {
    let heights: f64 = rows.iter().map(|row| row.height + GAP).sum();
    let legend = legend(rows);
    let headline = lines(&report.limit.sentence);
    let mut top = 24.0 + headline.len() as f64 * LINE_HEIGHT;
    let height = top + 10.0 + heights + 40.0 + legend.len() as f64 * 18.0;
    let width = LEFT + WIDTH + RIGHT;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\" shape-rendering=\"crispEdges\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    // Writing to a string cannot fail.
    let _ = write_lines(&mut svg, &headline);
    for row in rows {
        let _ = write_row(&mut svg, row, top);
        top += row.height + GAP;
    }
    let _ = write_axis(
        &mut svg,
        world.now.since(world.measured.began).as_secs_f64(),
        top,
    );
    let _ = write_legend(&mut svg, &legend, top + 40.0);
    svg.push_str("</svg>\n");
    svg
}

/// A text in lines: SVG breaks none.
fn lines(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.chars().count() + word.chars().count() < LINE => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

fn write_lines(svg: &mut String, lines: &[String]) -> std::fmt::Result {
    for (number, line) in lines.iter().enumerate() {
        let y = 20.0 + number as f64 * LINE_HEIGHT;
        let safe = line.replace('&', "&amp;").replace('<', "&lt;");
        writeln!(svg, "<text x=\"10\" y=\"{y}\">{safe}</text>")?;
    }
    Ok(())
}

/// Stacked bars; neighbours that look alike are drawn as one.
fn write_row(svg: &mut String, row: &Row, top: f64) -> std::fmt::Result {
    let middle = top + row.height / 2.0 + 4.0;
    writeln!(
        svg,
        "<text x=\"{}\" y=\"{middle}\" text-anchor=\"end\">{}</text>",
        LEFT - 8.0,
        row.label
    )?;
    let step = WIDTH / row.columns.len() as f64;
    let mut begin = 0;
    while begin < row.columns.len() {
        let same = row.columns[begin..]
            .iter()
            .take_while(|column| *column == &row.columns[begin]);
        let count = same.count();
        let (x, width) = (LEFT + begin as f64 * step, count as f64 * step);
        let mut bottom = top + row.height;
        for doing in Doing::ALL {
            let height = row.columns[begin][doing as usize] * row.height;
            if height >= 0.05 {
                bottom -= height;
                write_bar(svg, (x, bottom), (width, height), color(doing))?;
            }
        }
        begin += count;
    }
    Ok(())
}

fn write_bar(
    svg: &mut String,
    (x, y): (f64, f64),
    (width, height): (f64, f64),
    color: &str,
) -> std::fmt::Result {
    writeln!(
        svg,
        "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{color}\"/>"
    )
}

fn write_axis(svg: &mut String, seconds: f64, top: f64) -> std::fmt::Result {
    for tick in 0..=8 {
        let share = f64::from(tick) / 8.0;
        let (x, at) = (LEFT + share * WIDTH, share * seconds);
        let label = if seconds >= 36_000.0 {
            format!("{:.1} h", at / 3600.0)
        } else if seconds >= 600.0 {
            format!("{:.1} min", at / 60.0)
        } else {
            format!("{at:.1} s")
        };
        writeln!(
            svg,
            "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"#555\">{label}</text>",
            top + 12.0
        )?;
    }
    Ok(())
}

/// Colours that appear, and what they mean.
fn legend(rows: &[Row]) -> Vec<(&'static str, String)> {
    let mut legend: Vec<(&'static str, String)> = Vec::new();
    for doing in Doing::ALL {
        let appears = |row: &&Row| {
            row.columns
                .iter()
                .any(|column| column[doing as usize] > 0.0)
        };
        let mut words: Vec<String> = Vec::new();
        for row in rows.iter().filter(appears) {
            let said = meaning(row.who, doing);
            if !words.contains(&said) {
                words.push(said);
            }
        }
        if !words.is_empty() {
            legend.push((color(doing), words.join("; ")));
        }
    }
    legend
}

/// What one of them does.
fn meaning(who: &str, doing: Doing) -> String {
    let words = in_words(who, doing.name());
    match who {
        "workers" => format!("rollout {words}"),
        who => format!("{} {words}", who.trim_end_matches('s')),
    }
}

fn write_legend(svg: &mut String, legend: &[(&'static str, String)], top: f64) -> std::fmt::Result {
    for (index, (color, words)) in legend.iter().enumerate() {
        let y = top + index as f64 * 18.0;
        writeln!(
            svg,
            "<rect x=\"{LEFT}\" y=\"{}\" width=\"12\" height=\"12\" fill=\"{color}\"/>",
            y - 10.0
        )?;
        writeln!(svg, "<text x=\"{}\" y=\"{y}\">{words}</text>", LEFT + 18.0)?;
    }
    Ok(())
}
