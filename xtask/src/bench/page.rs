//! The page: what was measured and whether it is what must hold, as tables, for people.

use std::fmt::Write as _;

use super::judged::{self, Judged};
use super::rows::{
    BY_CHUNKS, BY_SIZE, CHUNKS, CURVE, FOREIGN_CHURN, INSTRUCTIONS, MOVE, OWN, OWN_CHUNKS, OWN_CHURN, Row, SIZES, find,
    numbers_of_gpus,
};

/// Written by hand.
const NOTES: &str = include_str!("notes.md");
const HEAD: &str = "\
# Benchmarks

What buffers cost beside the driver's calls alone, and beside other ways to the same end; and what our own code costs where
the driver's calls cost nothing. `cargo xtask bench` writes this page and its plots from
[benchmarks.json](benchmarks.json); how to run it stands in [CONTRIBUTING.md](../CONTRIBUTING.md). Times are in
microseconds, p50 is the median.
";

/// The page, with the plots of those names.
pub(crate) fn write(rows: &[Row], plots: &[&str]) -> String {
    let mut page = Page { text: HEAD.to_owned(), plots };
    page.summary(rows);
    for gpus in numbers_of_gpus(rows) {
        page.host(rows, gpus);
    }
    page.own(rows);
    page.text.push('\n');
    page.text.push_str(NOTES);
    page.text
}

struct Page<'p> {
    text: String,
    plots: &'p [&'p str],
}

impl Page<'_> {
    fn heading(&mut self, level: usize, text: &str) {
        let _ = writeln!(self.text, "\n{} {text}\n", "#".repeat(level));
    }

    fn line(&mut self, text: &str) {
        self.text.push_str(text);
        self.text.push('\n');
    }

    fn table(&mut self, head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) {
        self.line(&format!("| {} |", head.join(" | ")));
        self.line(&format!("|{}", "---|".repeat(head.len())));
        for row in rows {
            self.line(&format!("| {} |", row.join(" | ")));
        }
    }

    fn plot(&mut self, name: &str, says: &str) {
        if self.plots.contains(&name) {
            let _ = writeln!(self.text, "\n![{says}](benchmarks/{name}.svg)");
        }
    }

    fn summary(&mut self, rows: &[Row]) {
        self.heading(2, "What must hold");
        let all = judged::all(rows);
        let judged = all.iter().filter(|(_, judged)| judged.is_held.is_some()).count();
        let held = all.iter().filter(|(_, judged)| judged.is_held == Some(true)).count();
        self.line(&format!(
            "Of {judged} bounds that were measured, {held} are held. Each stands with its figures below.\n"
        ));
        let missed = all.iter().filter(|(_, judged)| judged.is_held == Some(false));
        let missed: Vec<Vec<String>> = missed
            .map(|(gpus, judged)| {
                let host = if *gpus == 0 { "any".to_owned() } else { with_gpus(*gpus) };
                vec![
                    host,
                    judged.case.clone(),
                    judged.what.clone(),
                    judged.measured.clone(),
                    judged.bound.clone(),
                    judged.word().into(),
                ]
            })
            .collect();
        if !missed.is_empty() {
            self.table(&["host", "case", "what", "measured", "bound", ""], missed);
            self.line("");
        }
        for gpus in numbers_of_gpus(rows) {
            let unmeasured = all.iter().filter(|(of, judged)| *of == gpus && judged.is_held.is_none());
            let mut names: Vec<&str> = unmeasured.filter_map(|(_, judged)| judged.case.split('/').next()).collect();
            names.dedup();
            if !names.is_empty() {
                self.line(&format!("Not measured on a host with {}: {}.\n", with_gpus(gpus), names.join(", ")));
            }
        }
        if numbers_of_gpus(rows).is_empty() {
            self.line("Nothing was measured on a GPU yet.");
        }
    }

    fn host(&mut self, rows: &[Row], gpus: u32) {
        self.heading(2, &format!("On a host with {}", with_gpus(gpus)));
        let of_host: Vec<&Row> = rows.iter().filter(|row| row.gpus == gpus).collect();
        if let Some(row) = of_host.first() {
            self.line(&format!("{}, driver {}; {}.", row.gpu, row.driver, machines(&of_host)));
        }
        let judged = judged::on_gpus(rows, gpus);
        let names = BY_SIZE.map(|name| (name, SIZES.as_slice())).into_iter();
        let names = names.chain(BY_CHUNKS.map(|name| (name, CHUNKS.as_slice())));
        let cases = names.flat_map(|(name, numbers)| numbers.iter().map(move |number| format!("{name}/{number}")));
        let operations: Vec<Vec<String>> = cases
            .filter_map(|case| operation(rows, gpus, &case, judged.iter().find(|judged| judged.case == case)))
            .collect();
        if !operations.is_empty() {
            self.operations(rows, gpus, operations);
        }
        for (case, title) in [
            (CURVE, "The curve: 252 steps of 256 MiB to 63 GiB"),
            (OWN_CHURN, "The steps beside 32 GiB of the same resource that are closed and allocated every 100 ms"),
            (FOREIGN_CHURN, "The steps beside 32 GiB of somebody else's, freed and allocated every 100 ms"),
        ] {
            if of_host.iter().any(|row| row.case == case) {
                let (plot, says) = if case == CURVE {
                    ("curve", "what all steps took, by subject")
                } else {
                    (case, "p50 and p99 of a step, by subject")
                };
                self.heading(3, title);
                self.subjects(rows, gpus, case, &judged);
                self.plot(&format!("{plot}-{gpus}"), says);
            }
        }
    }

    fn operations(&mut self, rows: &[Row], gpus: u32, operations: Vec<Vec<String>>) {
        self.heading(3, "Operations");
        let head = [
            "case",
            "cuvmm p50",
            "raw p50",
            "ratio",
            "bound",
            "",
            "cuvmm p99",
            "raw p99",
            "recycling p50",
            "recycling p99",
        ];
        self.table(&head, operations);
        self.line("\nThe number behind a case is MiB, and of chunks for export and import.");
        if let Some(moved) = find(rows, gpus, MOVE, "cuvmm") {
            let (p50, p99) = (number(moved.p50), number(moved.p99));
            self.line(&format!("A descriptor of one chunk is in another process after p50 {p50}, p99 {p99}."));
        }
        self.plot(&format!("operations-{gpus}"), "the medians of the operations by size");
    }

    /// All who were measured in a case, and what must hold of it.
    fn subjects(&mut self, rows: &[Row], gpus: u32, case: &str, judged: &[Judged]) {
        let of_case: Vec<&Row> = rows.iter().filter(|row| row.gpus == gpus && row.case == case).collect();
        let lines = of_case.iter().map(|row| {
            let peak = row.peak_bytes.map_or("-".into(), |bytes| (bytes >> 20).to_string());
            vec![row.subject.clone(), number(row.p50), number(row.p99), number(row.total), row.n.to_string(), peak]
        });
        self.table(&["subject", "p50", "p99", "total", "steps", "peak MiB"], lines);
        for row in of_case {
            if let Some(error) = &row.error {
                self.line(&format!("\n`{}` ended after {} steps: {}", row.subject, row.n, error.replace('<', "&lt;")));
            }
        }
        for (index, judged) in judged.iter().filter(|judged| judged.case == case).enumerate() {
            let Judged { what, measured, bound, .. } = judged;
            let before = if index == 0 { "\n" } else { "" };
            self.line(&format!("{before}- {what}: {measured}, bound {bound}: {}", judged.word()));
        }
    }

    fn own(&mut self, rows: &[Row]) {
        self.heading(2, "Our own cost");
        self.line("On a driver whose calls do nothing, by the number of chunks that a buffer has. The median of samples, each of which");
        self.line("is a mean of many; `allocate` and the grows make one chunk, beside or behind so many. Export and import are of real");
        self.line("files, which the system makes, asks about and closes: its share is in what they take.");
        let own: Vec<&Row> = rows.iter().filter(|row| row.gpus == 0).collect();
        if !own.is_empty() {
            self.line(&format!("Measured on {}.", machines(&own)));
        }
        self.line("");
        let judged = judged::own(rows);
        let lines = OWN.iter().map(|(name, _)| {
            let times = OWN_CHUNKS.map(|chunks| find(rows, 0, &format!("{name}/{chunks}"), "cuvmm"));
            let mut line = vec![(*name).to_owned()];
            line.extend(times.map(|row| row.map_or("-".into(), |row| number(row.p50))));
            if let Some(judged) = judged.iter().find(|judged| judged.case == *name) {
                line.push(format!("{}: {}, {}: {}", judged.what, judged.measured, judged.bound, judged.word()));
            }
            line
        });
        self.table(&["case", "1", "10", "100", "1,000", "10,000", "flat"], lines);
        self.plot("own", "the medians of our own cost by number of chunks");
        let counted: Vec<Vec<String>> = rows
            .iter()
            .filter(|row| row.unit == INSTRUCTIONS)
            .map(|row| vec![row.case.clone(), format!("{:.0}", row.p50)])
            .collect();
        if !counted.is_empty() {
            self.heading(3, "Instructions");
            self.line("Counted by callgrind, so that they are the same whatever else the machine does. Their budgets stand in");
            self.line("`tests/benches/instructions/budgets.json`, and a step of `cargo xtask ci` holds them.\n");
            self.table(&["case", "instructions"], counted);
        }
    }
}

fn operation(rows: &[Row], gpus: u32, case: &str, judged: Option<&Judged>) -> Option<Vec<String>> {
    let (ours, raw) = (find(rows, gpus, case, "cuvmm")?, find(rows, gpus, case, "raw")?);
    let judged = judged?;
    let recycling = find(rows, gpus, case, "cuvmm-recycling");
    let or_none = |time: Option<f64>| time.map_or("-".into(), number);
    Some(vec![
        case.to_owned(),
        number(ours.p50),
        number(raw.p50),
        judged.measured.clone(),
        judged.bound.clone(),
        judged.word().into(),
        number(ours.p99),
        number(raw.p99),
        or_none(recycling.map(|row| row.p50)),
        or_none(recycling.map(|row| row.p99)),
    ])
}

fn with_gpus(gpus: u32) -> String {
    if gpus == 1 { "1 GPU".into() } else { format!("{gpus} GPUs") }
}

/// Whose processors the rows come from.
fn machines(rows: &[&Row]) -> String {
    let mut machines: Vec<&str> = rows.iter().filter_map(|row| row.machine.as_deref()).collect();
    machines.dedup();
    if machines.is_empty() { "a machine of unknown processors".into() } else { machines.join("; ") }
}

/// Three digits at least, and thousands apart.
fn number(number: f64) -> String {
    let decimals = match number {
        ..10.0 => 3,
        ..1000.0 => 1,
        _ => return thousands(&format!("{number:.0}")),
    };
    format!("{number:.decimals$}")
}

fn thousands(digits: &str) -> String {
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::rows::tests::row;

    #[test]
    fn numbers_are_readable() {
        let check = |value: f64, expect: &str| assert_eq!(number(value), expect);
        check(0.2714, "0.271");
        check(9.0, "9.000");
        check(80.25, "80.2");
        check(999.94, "999.9");
        check(1234.5, "1,234");
        check(32_500_000.0, "32,500,000");
    }

    #[test]
    fn verdicts_are_those_of_the_rows() {
        let missed = [row("grow-in-place/64", "cuvmm", 200.0), row("grow-in-place/64", "raw", 100.0)];
        let page = write(&missed, &[]);
        let line = "| grow-in-place/64 | 200.0 | 100.0 | 2.000 | at most 1.03 or 1 us more | **missed** | 400.0 | 200.0 | - | - |";
        assert!(page.contains(line), "{page}");
        assert!(page.contains("Of 1 bounds that were measured, 0 are held."), "{page}");
        let held = [row("grow-in-place/64", "cuvmm", 100.0), row("grow-in-place/64", "raw", 100.0)];
        assert!(write(&held, &[]).contains("Of 1 bounds that were measured, 1 are held."));
    }

    #[test]
    fn a_failure_is_told_with_its_steps() {
        let failed = Row { n: 3, error: Some("out of memory".into()), ..row(CURVE, "torch", 5.0) };
        let page = write(&[failed], &["curve-1"]);
        assert!(page.contains("`torch` ended after 3 steps: out of memory"), "{page}");
        assert!(page.contains("(benchmarks/curve-1.svg)") && !page.contains("own.svg"));
    }
}
