//! The plots: lines over sizes, and bars by subject, both on scales of powers of ten, since what is compared differs by
//! thousands.

use std::ops::Range;

use anyhow::{Context, Result};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::rows::{
    BY_SIZE, CURVE, FOREIGN_CHURN, OWN, OWN_CHUNKS, OWN_CHURN, Row, SIZES, SUBJECTS, find_whole, numbers_of_gpus,
};

const SIZE: (u32, u32) = (880, 420);
/// Where the names of lines begin, right of them.
const LEGEND: i32 = 660;
const COLOURS: [RGBColor; 9] = [
    RGBColor(0x1f, 0x77, 0xb4),
    RGBColor(0xd6, 0x27, 0x28),
    RGBColor(0x2c, 0xa0, 0x2c),
    RGBColor(0xff, 0x7f, 0x0e),
    RGBColor(0x94, 0x67, 0xbd),
    RGBColor(0x8c, 0x56, 0x4b),
    RGBColor(0xe3, 0x77, 0xc2),
    RGBColor(0x7f, 0x7f, 0x7f),
    RGBColor(0x17, 0xbe, 0xcf),
];

/// One for each line or bar, however many there are.
fn colours() -> impl Iterator<Item = RGBColor> {
    COLOURS.into_iter().cycle()
}

/// A name, and its points.
type Series = (String, Vec<(f64, f64)>);

/// The name of each plot that there are rows for, and its drawing.
pub(crate) fn all(rows: &[Row]) -> Result<Vec<(String, String)>> {
    let mut plots = Vec::new();
    for gpus in numbers_of_gpus(rows) {
        plots.push((format!("operations-{gpus}"), lines("p50 of an operation, us", "MiB", operations(rows, gpus))?));
        plots.push((format!("curve-{gpus}"), bars("all steps to 63 GiB, ms", totals(rows, gpus))?));
        for case in [OWN_CHURN, FOREIGN_CHURN] {
            plots.push((format!("{case}-{gpus}"), bars("a step, us", halves(rows, gpus, case))?));
        }
    }
    plots.push(("own".into(), lines("p50 of our own cost, us", "chunks", own(rows))?));
    let drawn = plots.into_iter().filter_map(|(name, plot)| plot.map(|plot| (name, plot)));
    Ok(drawn.collect())
}

fn operations(rows: &[Row], gpus: u32) -> Vec<Series> {
    let of = |name: &str, subject: &str| {
        let point = |mib: u32| Some((f64::from(mib), find_whole(rows, gpus, &format!("{name}/{mib}"), subject)?.p50));
        (format!("{name}, {subject}"), SIZES.into_iter().filter_map(point).collect::<Vec<_>>())
    };
    let subjects = ["cuvmm", "cuvmm-recycling", "raw"];
    let series = BY_SIZE.iter().flat_map(|name| subjects.map(|subject| of(name, subject)));
    series.filter(|(_, points)| !points.is_empty()).collect()
}

fn own(rows: &[Row]) -> Vec<Series> {
    let of = |(name, _): &(&str, _)| {
        let point =
            |chunks: u32| Some((f64::from(chunks), find_whole(rows, 0, &format!("{name}/{chunks}"), "cuvmm")?.p50));
        ((*name).to_owned(), OWN_CHUNKS.into_iter().filter_map(point).collect())
    };
    OWN.iter().map(of).collect()
}

fn totals(rows: &[Row], gpus: u32) -> Vec<(String, f64)> {
    let of = |subject: &&str| find_whole(rows, gpus, CURVE, subject);
    SUBJECTS.iter().filter_map(|subject| Some(((*subject).to_owned(), of(subject)?.total / 1e3))).collect()
}

fn halves(rows: &[Row], gpus: u32, case: &str) -> Vec<(String, f64)> {
    let of = |subject: &&str| find_whole(rows, gpus, case, subject);
    let both = |row: &Row| [(format!("{} p50", row.subject), row.p50), (format!("{} p99", row.subject), row.p99)];
    SUBJECTS.iter().filter_map(of).flat_map(both).collect()
}

/// From the power of ten below all of these to that above.
fn decades(values: impl Iterator<Item = f64>) -> Option<Range<f64>> {
    let (least, most) = values.fold((f64::MAX, 0.0_f64), |(least, most), value| (least.min(value), most.max(value)));
    (most > 0.0).then(|| 10_f64.powf(least.log10().floor())..10_f64.powf((most * 1.01).log10().ceil()))
}

/// A drawing of what `draw` does to the whole area.
fn drawing(draw: impl FnOnce(&DrawingArea<SVGBackend<'_>, Shift>) -> Result<()>) -> Result<String> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        draw(&area)?;
        area.present()?;
    }
    Ok(text)
}

/// Nothing where there are no points.
fn lines(what: &str, by: &str, series: Vec<Series>) -> Result<Option<String>> {
    let points = || series.iter().flat_map(|(_, points)| points.iter().copied());
    let most = points().map(|(x, _)| x).fold(1.0, f64::max);
    let Some(y) = decades(points().map(|(_, y)| y)) else { return Ok(None) };
    drawing(|area| {
        let (left, _) = area.split_horizontally(LEGEND - 10);
        let mut chart = ChartBuilder::on(&left)
            .margin(10)
            .x_label_area_size(40)
            .y_label_area_size(70)
            .build_cartesian_2d((1.0..most).log_scale(), y.log_scale())?;
        chart
            .configure_mesh()
            .x_desc(by)
            .y_desc(what)
            .light_line_style(TRANSPARENT)
            .x_label_formatter(&|value| plain(*value))
            .y_label_formatter(&|value| plain(*value))
            .draw()?;
        let named: Vec<_> = series.iter().filter(|(_, points)| !points.is_empty()).zip(colours()).collect();
        for ((_, points), colour) in &named {
            chart.draw_series([PathElement::new(points.clone(), colour.stroke_width(2))])?;
            chart.draw_series(points.iter().map(|point| Circle::new(*point, 3, colour.filled())))?;
        }
        // Who is who stands right of it, from the top.
        for (row, ((name, _), colour)) in (0..).zip(&named) {
            let at = (LEGEND, 20 + 18 * row);
            area.draw(&Rectangle::new([at, (at.0 + 12, at.1 + 8)], colour.filled()))?;
            area.draw(&Text::new(name.clone(), (at.0 + 18, at.1 - 3), ("sans-serif", 13)))?;
        }
        Ok(())
    })
    .map(Some)
}

/// Nothing where there are no bars.
fn bars(what: &str, bars: Vec<(String, f64)>) -> Result<Option<String>> {
    let Some(y) = decades(bars.iter().map(|(_, value)| *value)) else { return Ok(None) };
    let count = i32::try_from(bars.len()).context("so many bars")?;
    drawing(|area| {
        let floor = y.start;
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .margin_top(26)
            .x_label_area_size(40)
            .y_label_area_size(70)
            .build_cartesian_2d(0.0..f64::from(count), y.log_scale())?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .disable_x_axis()
            .y_desc(what)
            .light_line_style(TRANSPARENT)
            .y_label_formatter(&|value| plain(*value))
            .draw()?;
        for ((place, (name, value)), colour) in (0..count).zip(&bars).zip(colours()) {
            let left = f64::from(place);
            let bar = Rectangle::new([(left + 0.2, floor), (left + 0.8, *value)], colour.filled());
            chart.draw_series([bar])?;
            let (x, top) = chart.backend_coord(&(left + 0.2, *value));
            area.draw(&Text::new(plain(*value), (x, top - 16), ("sans-serif", 13)))?;
            let (_, bottom) = chart.backend_coord(&(left, floor));
            for (line, word) in (0..).zip(name.split(' ')) {
                area.draw(&Text::new(word.to_owned(), (x - 8, bottom + 8 + 15 * line), ("sans-serif", 13)))?;
            }
        }
        Ok(())
    })
    .map(Some)
}

/// As short as three digits are.
fn plain(value: f64) -> String {
    match value {
        ..1.0 => format!("{}", (value * 1e4).round() / 1e4),
        ..100.0 => format!("{}", (value * 10.0).round() / 10.0),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::rows::tests::row;

    #[test]
    fn there_is_a_plot_for_what_there_are_rows_for() {
        let names = |rows: &[Row]| all(rows).unwrap().into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(&[]), [""; 0]);
        assert_eq!(names(&[row("own/close/10", "cuvmm", 1.0)]), ["own"]);
        let failed = Row { p50: 0.0, p99: 0.0, n: 0, error: Some("refused".into()), ..row(OWN_CHURN, "raw", 1.0) };
        assert_eq!(names(&[failed, row(CURVE, "raw", 1.0)]), ["curve-1"]);
        assert_eq!(names(&[row(CURVE, "raw", 1.0), row("grow-move/2", "raw", 1.0)]), ["operations-1", "curve-1"]);
    }

    #[test]
    fn a_drawing_says_who_took_how_long() {
        let drawn = bars("us", vec![("raw".into(), 80.0), ("copy".into(), 67_700.0)]).unwrap().unwrap();
        for word in ["raw", "copy", "80", "67700", "us"] {
            assert!(drawn.contains(&format!("\n{word}\n")), "{word}: {drawn}");
        }
    }
}
