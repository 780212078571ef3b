//! The chart of `--plot`: one line for each row, on one logarithmic scale of time per operation.

use std::fmt::Write;

use super::{case::Compares, measure::Measurement, report::time, suite::Row};

const ROW_HEIGHT: f64 = 22.0;
const TOP: f64 = 64.0;
/// The position and width of the scale. Names are to its left, figures to its right.
const LEFT: f64 = 380.0;
const WIDTH: f64 = 460.0;
const TOTAL_WIDTH: f64 = 1000.0;
const OURS: &str = "#1769aa";
const LIMIT: &str = "#5b6b79";
const MET: &str = "#2e7d32";
const MISSED: &str = "#c62828";

/// Rows as they are measured.
#[derive(Debug, Default)]
pub(super) struct Chart {
    lines: Vec<Line>,
}

/// Times in nanoseconds per operation.
#[derive(Debug)]
struct Line {
    name: String,
    figure: String,
    ours: f64,
    limit: Option<f64>,
    goal: Option<f64>,
    met: Option<bool>,
}

impl Chart {
    /// Adds a row. A row without a time, such as that of an idle worker, is left out.
    pub(super) fn add(&mut self, row: &Row, measured: &Measurement) {
        let bytes = row.case.size;
        let (ours, limit, figure) = match measured.compares {
            Compares::Time => (measured.median_ns, measured.limit.median_ns, time(measured.median_ns)),
            Compares::Bandwidth => {
                let figure = format!("{:.1} GB/s", bytes as f64 / measured.mean_ns);
                (measured.mean_ns, measured.limit.mean_ns, figure)
            }
        };
        if !is_drawn(ours) {
            return;
        }
        let goal = row.goal.as_ref();
        self.lines.push(Line {
            name: row.to_string(),
            figure,
            ours,
            limit: Some(limit).filter(|&limit| is_drawn(limit)),
            goal: goal.and_then(|goal| goal.time_ns(bytes, measured)).filter(|&goal| is_drawn(goal)),
            met: goal.map(|goal| goal.is_met(bytes, measured)),
        });
    }

    /// The chart as a file.
    pub(super) fn svg(&self) -> String {
        let scale = Scale::over(self.lines.iter().flat_map(Line::times));
        let height = TOP + ROW_HEIGHT * self.lines.len() as f64 + 16.0;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {TOTAL_WIDTH} {height}\" width=\"{TOTAL_WIDTH}\" \
             height=\"{height}\" role=\"img\" aria-label=\"Time of an operation beside its limit and its goal\" \
             font-family=\"system-ui, sans-serif\" font-size=\"12\">\n\
             <rect width=\"{TOTAL_WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
        );
        legend(&mut svg);
        scale.draw(&mut svg, height - 12.0);
        for (index, line) in self.lines.iter().enumerate() {
            line.draw(&mut svg, &scale, TOP + ROW_HEIGHT * (index as f64 + 0.5));
        }
        svg.push_str("</svg>\n");
        svg
    }
}

fn is_drawn(ns: f64) -> bool {
    ns.is_finite() && ns > 0.0
}

/// Appends a line of text; writing to a `String` cannot fail.
macro_rules! draw {
    ($svg:expr, $($text:tt)*) => {{
        let _ = writeln!($svg, $($text)*);
    }};
}

fn legend(svg: &mut String) {
    let (x, y) = (12.0, 20.0);
    draw!(svg, "<circle cx=\"{x}\" cy=\"{}\" r=\"5\" fill=\"{OURS}\"/>", y - 4.0);
    draw!(svg, "<text x=\"{}\" y=\"{y}\">tensorwire</text>", x + 10.0);
    let x = x + 92.0;
    draw!(svg, "<rect x=\"{}\" y=\"{}\" width=\"3\" height=\"14\" fill=\"{LIMIT}\"/>", x - 1.5, y - 11.0);
    draw!(svg, "<text x=\"{}\" y=\"{y}\">the same work without it</text>", x + 8.0);
    let x = x + 172.0;
    draw!(svg, "<path d=\"{}\" fill=\"{MET}\"/>", triangle(x, y - 4.0));
    draw!(svg, "<text x=\"{}\" y=\"{y}\">goal, met</text>", x + 10.0);
    let x = x + 84.0;
    draw!(svg, "<path d=\"{}\" fill=\"{MISSED}\"/>", triangle(x, y - 4.0));
    draw!(svg, "<text x=\"{}\" y=\"{y}\">goal, missed</text>", x + 10.0);
    draw!(
        svg,
        "<text x=\"{}\" y=\"{y}\" fill=\"{LIMIT}\">time of an operation; left is faster</text>",
        x + 110.0
    );
}

/// A triangle that points to the left, to shorter times: the goal is this time or less.
fn triangle(x: f64, y: f64) -> String {
    format!("M{:.1} {y:.1} l8 -5 v10 z", x - 4.0)
}

impl Line {
    fn times(&self) -> impl Iterator<Item = f64> {
        [Some(self.ours), self.limit, self.goal].into_iter().flatten()
    }

    fn draw(&self, svg: &mut String, scale: &Scale, y: f64) {
        let ours = scale.x(self.ours);
        draw!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
            LEFT - 12.0,
            y + 4.0,
            escaped(&self.name)
        );
        if let Some(limit) = self.limit.map(|limit| scale.x(limit)) {
            let (from, to) = (limit.min(ours), limit.max(ours));
            draw!(svg, "<path d=\"M{from:.1} {y:.1} H{to:.1}\" stroke=\"#b9c3cb\" stroke-width=\"2\"/>");
            draw!(
                svg,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"3\" height=\"14\" fill=\"{LIMIT}\"/>",
                limit - 1.5,
                y - 7.0
            );
        }
        let colour = if self.met == Some(false) { MISSED } else { MET };
        if let Some(goal) = self.goal {
            draw!(svg, "<path d=\"{}\" fill=\"{colour}\"/>", triangle(scale.x(goal), y));
        }
        draw!(svg, "<circle cx=\"{ours:.1}\" cy=\"{y:.1}\" r=\"5\" fill=\"{OURS}\"/>");
        let mark = match self.met {
            Some(true) => " ✓",
            Some(false) => " ✗",
            None => "",
        };
        let (x, y) = (LEFT + WIDTH + 20.0, y + 4.0);
        draw!(svg, "<text x=\"{x}\" y=\"{y}\">{}{mark}</text>", escaped(&self.figure));
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Whole powers of ten.
#[derive(Debug, PartialEq)]
struct Scale {
    first: i32,
    last: i32,
}

impl Scale {
    fn over(times: impl Iterator<Item = f64>) -> Self {
        let (mut first, mut last) = (i32::MAX, i32::MIN);
        for ns in times {
            first = first.min(ns.log10().floor() as i32);
            last = last.max(ns.log10().ceil() as i32);
        }
        if first > last { Self { first: 0, last: 1 } } else { Self { first, last: last.max(first + 1) } }
    }

    fn x(&self, ns: f64) -> f64 {
        LEFT + WIDTH * (ns.log10() - f64::from(self.first)) / f64::from(self.last - self.first)
    }

    fn draw(&self, svg: &mut String, bottom: f64) {
        for power in self.first..=self.last {
            let ns = 10_f64.powi(power);
            let x = self.x(ns);
            draw!(svg, "<path d=\"M{x:.1} {:.1} V{bottom:.1}\" stroke=\"#dde3e8\"/>", TOP - 8.0);
            draw!(
                svg,
                "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"{LIMIT}\">{}</text>",
                TOP - 14.0,
                short(ns)
            );
        }
    }
}

/// A power of ten as a label.
fn short(ns: f64) -> String {
    let (value, unit) = match ns {
        ns if ns < 1e3 => (ns, "ns"),
        ns if ns < 1e6 => (ns / 1e3, "µs"),
        ns if ns < 1e9 => (ns / 1e6, "ms"),
        ns => (ns / 1e9, "s"),
    };
    format!("{value} {unit}")
}

#[cfg(test)]
mod tests {
    use super::{Chart, LEFT, Line, Scale, WIDTH};

    fn line(name: &str, ours: f64, goal: Option<f64>, met: Option<bool>) -> Line {
        Line { name: name.to_owned(), figure: "1 µs".to_owned(), ours, limit: Some(500.0), goal, met }
    }

    #[test]
    fn the_scale_has_whole_powers_of_ten_and_everything_is_on_it() {
        let scale = Scale::over([250.0, 3_100.0, 1e6].into_iter());
        assert_eq!(scale, Scale { first: 2, last: 6 });
        assert_eq!((scale.x(100.0), scale.x(1e6)), (LEFT, LEFT + WIDTH));
        assert_eq!(Scale::over([1000.0].into_iter()), Scale { first: 3, last: 4 });
        assert_eq!(Scale::over([].into_iter()), Scale { first: 0, last: 1 });
    }

    #[test]
    fn a_chart_shows_every_row_with_its_goal_and_whether_it_is_met() {
        let lines = vec![line("a < b", 900.0, Some(250.0), Some(false)), line("c", 100.0, None, Some(true))];
        let svg = Chart { lines }.svg();
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        for part in ["a &lt; b", ">c</text>", "1 µs ✗", "1 µs ✓", ">1 µs</text>"] {
            assert!(svg.contains(part), "without {part}: {svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 3, "two rows and the legend");
    }
}
