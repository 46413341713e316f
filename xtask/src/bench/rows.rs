//! [`Row`]: how long a subject took in a case, or how many instructions it has; what a list of them must be.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

/// In the order in which they are shown.
pub(crate) const SUBJECTS: [&str; 10] =
    ["cuvmm", "cuvmm-deferred", "cuvmm-recycling", "raw", "copy", "pool", "torch", "torch-copy", "cuda.core", "quiet"];
/// What is done at each of these sizes, in MiB.
pub(crate) const BY_SIZE: [&str; 3] = ["allocate-close", "grow-in-place", "grow-move"];
pub(crate) const SIZES: [u32; 6] = [2, 64, 256, 1024, 4096, 16384];
/// What is done to so many chunks.
pub(crate) const BY_CHUNKS: [&str; 2] = ["export", "import"];
pub(crate) const CHUNKS: [u32; 3] = [1, 8, 64];
/// From one process to another.
pub(crate) const MOVE: &str = "move/1";
pub(crate) const CURVE: &str = "grow-curve-63gib";
pub(crate) const OWN_CHURN: &str = "grow-own-churn";
pub(crate) const FOREIGN_CHURN: &str = "grow-foreign-churn";
/// What our own cost is measured of, on a driver whose calls do nothing, in the order in which it is shown; and whether
/// that is to be the same for any number of chunks, or in proportion to it.
pub(crate) const OWN: [(&str, Growth); 10] = [
    ("own/allocate", Growth::Flat),
    ("own/allocate-chunks", Growth::ByChunk),
    ("own/grow-in-place", Growth::Flat),
    ("own/grow-behind", Growth::Flat),
    ("own/grow-into", Growth::Flat),
    ("own/covered", Growth::Flat),
    ("own/grow-move", Growth::ByChunk),
    ("own/close", Growth::ByChunk),
    ("own/export", Growth::ByChunk),
    ("own/import", Growth::ByChunk),
];
pub(crate) const OWN_CHUNKS: [u32; 5] = [1, 10, 100, 1000, 10_000];

/// What the names of the simulator's devices begin with.
const SIMULATED: &str = "Simulated";
/// What can be measured, by far: a picosecond, and the instructions of some days.
const POSSIBLE: RangeInclusive<f64> = 1e-6..=1e15;
pub(crate) const US: &str = "us";
pub(crate) const INSTRUCTIONS: &str = "instructions";

/// How a cost follows the number of chunks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Growth {
    Flat,
    ByChunk,
}

/// A row of the list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Row {
    pub(crate) case: String,
    pub(crate) subject: String,
    pub(crate) unit: String,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) total: f64,
    /// How many were measured.
    pub(crate) n: u64,
    /// The name of the GPU; empty for our own cost.
    pub(crate) gpu: String,
    /// Its driver; empty for our own cost.
    pub(crate) driver: String,
    /// How many GPUs its host has; none for our own cost.
    pub(crate) gpus: u32,
    /// The processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) machine: Option<String>,
    /// The most memory of the device that was in use meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) peak_bytes: Option<u64>,
    /// Why there are no more of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
}

impl Row {
    fn key(&self) -> (u32, &str, &str, &str) {
        (self.gpus, &self.unit, &self.case, &self.subject)
    }

    /// Where it stands in the list.
    fn place(&self) -> (u32, &str, usize, u32, usize) {
        let (name, number) = self.name_and_number();
        let names = names();
        let index = |all: &[&str], one: &str| all.iter().position(|name| *name == one).unwrap_or(all.len());
        (self.gpus, &self.unit, index(&names, name), number, index(&SUBJECTS, &self.subject))
    }

    /// The case without the number behind it, and that number.
    pub(crate) fn name_and_number(&self) -> (&str, u32) {
        let split = self.case.rsplit_once('/').and_then(|(name, number)| Some((name, number.parse().ok()?)));
        split.unwrap_or((&self.case, 0))
    }
}

/// The names of all cases, in the order in which they are shown.
fn names() -> Vec<&'static str> {
    let on_gpu = BY_SIZE.iter().chain(&BY_CHUNKS).chain(&["move", CURVE, OWN_CHURN, FOREIGN_CHURN]);
    on_gpu.copied().chain(OWN.map(|(name, _)| name)).collect()
}

pub(crate) fn parse(text: &str) -> Result<Vec<Row>> {
    Ok(serde_json::from_str(text)?)
}

/// The list, a row a line.
pub(crate) fn to_json(rows: &[Row]) -> Result<String> {
    let lines: Vec<String> = rows.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
    Ok(format!("[\n{}\n]\n", lines.join(",\n")))
}

/// What there was, and a run. The run replaces nothing of hosts with another number of GPUs: of its own number it replaces
/// what it has measured anew, and everything where it comes from another GPU or driver. Our own cost it replaces as a whole.
pub(crate) fn merge(old: Vec<Row>, new: Vec<Row>) -> Vec<Row> {
    let is_replaced = |old: &Row| {
        new.iter().filter(|new| new.gpus == old.gpus).any(|new| {
            let is_elsewhere = (&new.gpu, &new.driver) != (&old.gpu, &old.driver);
            let is_own = new.gpus == 0 && new.unit == old.unit;
            is_elsewhere || is_own || new.key() == old.key()
        })
    };
    let mut rows: Vec<Row> = old.into_iter().filter(|old| !is_replaced(old)).collect();
    rows.extend(new);
    rows.sort_by(|one, other| one.place().cmp(&other.place()));
    rows
}

/// Refuses a list that has a row which can't be, or one twice.
pub(crate) fn check(rows: &[Row]) -> Result<()> {
    let mut keys = BTreeSet::new();
    for row in rows {
        check_one(row)
            .with_context(|| format!("the row of {} for {} with {} GPUs", row.subject, row.case, row.gpus))?;
        ensure!(keys.insert(row.key()), "{} for {} with {} GPUs is there twice", row.subject, row.case, row.gpus);
        let other = rows.iter().find(|other| other.gpus == row.gpus && other.gpus > 0);
        ensure!(
            other.is_none_or(|other| (&other.gpu, &other.driver) == (&row.gpu, &row.driver)),
            "rows of hosts with {} GPUs come from several GPUs or drivers",
            row.gpus
        );
    }
    Ok(())
}

fn check_one(row: &Row) -> Result<()> {
    let (name, number) = row.name_and_number();
    ensure!(names().contains(&name), "there is no such case");
    let is_numbered = ![CURVE, OWN_CHURN, FOREIGN_CHURN].contains(&name);
    let written = if is_numbered && number > 0 { format!("{name}/{number}") } else { name.to_owned() };
    ensure!(written == row.case && (number > 0) == is_numbered, "there is no such case");
    ensure!(SUBJECTS.contains(&row.subject.as_str()), "there is no such subject");
    ensure!([US, INSTRUCTIONS].contains(&row.unit.as_str()), "there is no unit {:?}", row.unit);
    let is_own = name.starts_with("own/");
    let is_nowhere = row.gpu.is_empty() && row.driver.is_empty() && row.gpus == 0;
    let is_somewhere = !row.gpu.is_empty() && !row.driver.is_empty() && row.gpus > 0;
    ensure!(if is_own { is_nowhere } else { is_somewhere }, "our own cost has no GPU, and any other has one");
    ensure!(!row.gpu.starts_with(SIMULATED), "a simulator's figures say nothing of a GPU");
    ensure!(is_own || row.unit == US, "only our own cost is counted in instructions");
    ensure!(row.n > 0 || row.error.is_some(), "nothing was measured, and no error says why");
    let numbers = [row.p50, row.p99, row.total];
    ensure!(numbers.iter().all(|number| *number == 0.0 || POSSIBLE.contains(number)), "{numbers:?}");
    ensure!(row.p50 <= row.p99, "more than half took longer than the 99th percentile");
    ensure!(row.n == 0 || (row.p50 > 0.0 && row.total > 0.0), "it took no time");
    let said = [Some(&row.gpu), Some(&row.driver), row.machine.as_ref(), row.error.as_ref()];
    ensure!(!said.into_iter().flatten().any(|text| text.contains(char::is_control)), "what it says is not one line");
    Ok(())
}

/// What should be there and isn't: of our own cost everything, and of hosts with these numbers of GPUs.
pub(crate) fn missing(rows: &[Row], numbers_of_gpus: impl IntoIterator<Item = u32>) -> Vec<String> {
    let has =
        |gpus, unit: &str, case: &str, subject: &str| rows.iter().any(|row| row.key() == (gpus, unit, case, subject));
    let mut missing = Vec::new();
    for (name, _) in OWN {
        let cases = OWN_CHUNKS.map(|chunks| format!("{name}/{chunks}"));
        missing.extend(cases.into_iter().filter(|case| !has(0, US, case, "cuvmm")));
    }
    for gpus in numbers_of_gpus {
        for (case, subjects) in on_gpu() {
            for subject in subjects {
                if !has(gpus, US, &case, subject) {
                    missing.push(format!("{case} by {subject} with {gpus} GPUs"));
                }
            }
        }
    }
    missing
}

/// The cases on a GPU, and who must be measured in each.
fn on_gpu() -> Vec<(String, &'static [&'static str])> {
    let mut cases: Vec<(String, &[&str])> = Vec::new();
    for name in BY_SIZE {
        // A move makes little memory.
        let subjects =
            if name == "grow-move" { ["cuvmm", "raw"].as_slice() } else { &["cuvmm", "cuvmm-recycling", "raw"] };
        cases.extend(SIZES.map(|mib| (format!("{name}/{mib}"), subjects)));
    }
    for name in BY_CHUNKS {
        cases.extend(CHUNKS.map(|chunks| (format!("{name}/{chunks}"), ["cuvmm", "raw"].as_slice())));
    }
    cases.push((MOVE.into(), &["cuvmm"]));
    cases.push((CURVE.into(), &["cuvmm", "raw", "copy", "pool"]));
    cases.push((OWN_CHURN.into(), &["quiet", "cuvmm", "cuvmm-deferred", "cuvmm-recycling", "raw"]));
    cases.push((FOREIGN_CHURN.into(), &["quiet", "cuvmm", "raw"]));
    cases
}

/// How many GPUs the hosts have that were measured on.
pub(crate) fn numbers_of_gpus(rows: &[Row]) -> BTreeSet<u32> {
    rows.iter().map(|row| row.gpus).filter(|gpus| *gpus > 0).collect()
}

/// The row of a subject in a case.
pub(crate) fn find<'r>(rows: &'r [Row], gpus: u32, case: &str, subject: &str) -> Option<&'r Row> {
    rows.iter().find(|row| row.key() == (gpus, US, case, subject))
}

/// As [`find`], where it did not end in an error: what a part of it took compares with nothing.
pub(crate) fn find_whole<'r>(rows: &'r [Row], gpus: u32, case: &str, subject: &str) -> Option<&'r Row> {
    find(rows, gpus, case, subject).filter(|row| row.error.is_none())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A row of a host with one GPU, or of our own cost.
    pub(crate) fn row(case: &str, subject: &str, p50: f64) -> Row {
        let (gpu, gpus) = if case.starts_with("own/") { ("", 0) } else { ("H200", 1) };
        Row {
            case: case.into(),
            subject: subject.into(),
            unit: US.into(),
            p50,
            p99: 2.0 * p50,
            total: 100.0 * p50,
            n: 100,
            gpu: gpu.into(),
            driver: gpu.into(),
            gpus,
            machine: None,
            peak_bytes: None,
            error: None,
        }
    }

    #[test]
    fn a_run_replaces_what_it_measured_where_it_measured() {
        let two = |p50| Row { gpus: 2, ..row("export/8", "cuvmm", p50) };
        let old = vec![
            row("own/close/1", "cuvmm", 5.0),
            row("export/8", "cuvmm", 1.0),
            row("export/8", "raw", 1.0),
            two(1.0),
        ];
        let merged = merge(old.clone(), vec![row("export/8", "cuvmm", 3.0)]);
        let p50s = |rows: &[Row]| rows.iter().map(|row| row.p50).collect::<Vec<_>>();
        assert_eq!(p50s(&merged), [5.0, 3.0, 1.0, 1.0]);
        assert_eq!(merged.last(), Some(&two(1.0)));
        // Another driver: what the old one took is not to be compared with.
        let other = Row { driver: "later".into(), ..row("export/8", "cuvmm", 3.0) };
        assert_eq!(p50s(&merge(old.clone(), vec![other])), [5.0, 3.0, 1.0]);
        assert_eq!(p50s(&merge(old, vec![row("own/close/10", "cuvmm", 6.0)])), [6.0, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn rows_are_in_order_whatever_order_they_come_in() {
        let rows = ["import/8", "export/64", "export/8", "allocate-close/1024", "allocate-close/2"];
        let merged = merge(Vec::new(), rows.map(|case| row(case, "cuvmm", 1.0)).into());
        let cases: Vec<&str> = merged.iter().map(|row| row.case.as_str()).collect();
        assert_eq!(cases, ["allocate-close/2", "allocate-close/1024", "export/8", "export/64", "import/8"]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let sound = row("export/8", "cuvmm", 1.0);
        assert!(check(std::slice::from_ref(&sound)).is_ok());
        let refused = |row: Row| check(&[row]).is_err();
        assert!(refused(Row { case: "exports/8".into(), ..sound.clone() }));
        assert!(refused(Row { subject: "theirs".into(), ..sound.clone() }));
        assert!(refused(Row { unit: "ns".into(), ..sound.clone() }));
        assert!(refused(Row { p99: 0.5, ..sound.clone() }));
        assert!(refused(Row { p50: 0.0, ..sound.clone() }));
        assert!(refused(Row { n: 0, ..sound.clone() }));
        assert!(refused(Row { total: 0.0, ..sound.clone() }));
        // What no plot has room for.
        for impossible in [5e-324, 1e-7, 1e16, 1e308, f64::INFINITY, f64::NAN] {
            assert!(refused(Row { p50: impossible, p99: impossible, ..sound.clone() }), "{impossible}");
        }
        for case in ["export", "export/0", "export/08", "export/+8", "grow-curve-63gib/4", "own/close"] {
            assert!(refused(row(case, "cuvmm", 1.0)), "{case}");
        }
        assert!(refused(Row { gpu: "H200\n# Benchmarks".into(), ..sound.clone() }));
        assert!(refused(Row { gpus: 0, ..sound.clone() }));
        assert!(refused(Row { gpu: String::new(), ..sound.clone() }));
        assert!(refused(Row { gpu: "Simulated H200".into(), ..sound.clone() }));
        assert!(check(&[sound.clone(), sound.clone()]).is_err());
        let elsewhere = Row { gpu: "B200".into(), subject: "raw".into(), ..sound.clone() };
        assert!(check(&[sound.clone(), elsewhere]).is_err());
        assert!(check(&[Row { n: 0, p50: 0.0, p99: 0.0, error: Some("refused".into()), ..sound }]).is_ok());
    }

    #[test]
    fn what_is_missing_is_told() {
        let rows = [row("export/8", "cuvmm", 1.0)];
        let missing = missing(&rows, [1]);
        assert!(missing.contains(&"export/8 by raw with 1 GPUs".to_owned()));
        assert!(missing.contains(&"own/close/10000".to_owned()));
        assert!(!missing.contains(&"export/8 by cuvmm with 1 GPUs".to_owned()));
    }

    #[test]
    fn a_list_is_read_as_it_was_written() {
        let rows = vec![row("export/8", "cuvmm", 0.1), Row { peak_bytes: Some(1), ..row(CURVE, "raw", 1234.567) }];
        assert_eq!(parse(&to_json(&rows).unwrap()).unwrap(), rows);
        assert!(parse("[{\"case\":\"export/8\"}]").is_err());
    }
}
