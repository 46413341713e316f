//! What criterion left in its folder, and what callgrind counted, as rows of our own cost.
//!
//! A row of times is made of the samples of one benchmark. A sample is the mean of so many repetitions; `p50` is the median
//! of the samples, `p99` the 99th percentile, `total` all the time, and `n` all the repetitions.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::rows::{INSTRUCTIONS, Row, US};
use crate::instructions::{Counts, middle};

#[derive(Deserialize)]
struct Benchmark {
    full_id: String,
}

/// How often each sample did it, and how many nanoseconds that took.
#[derive(Deserialize)]
struct Samples {
    iters: Vec<f64>,
    times: Vec<f64>,
}

/// Where the benchmark says what processors it ran on.
const MACHINE: &str = "machine";

/// A row for each benchmark.
pub(crate) fn times(folder: &Path) -> Result<Vec<Row>> {
    let machine = folder.join(MACHINE);
    let machine = fs::read_to_string(&machine).with_context(|| format!("cannot read {}", machine.display()))?;
    let mut rows = Vec::new();
    let entries = fs::read_dir(folder).with_context(|| format!("criterion left no {}", folder.display()))?;
    for entry in entries {
        // Beside them are the folder of a report and that file.
        let run = entry?.path().join("new");
        if run.join("sample.json").is_file() {
            let read = |name| {
                let path = run.join(name);
                fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
            };
            let row = row(&read("benchmark.json")?, &read("sample.json")?);
            let row = row.with_context(|| format!("{} has no samples", run.display()))?;
            rows.push(Row { machine: Some(machine.clone()), ..row });
        }
    }
    ensure!(!rows.is_empty(), "criterion left nothing in {}", folder.display());
    Ok(rows)
}

fn row(benchmark: &str, samples: &str) -> Result<Row> {
    let benchmark: Benchmark = serde_json::from_str(benchmark)?;
    let Samples { iters, times } = serde_json::from_str(samples)?;
    ensure!(iters.len() == times.len() && !iters.is_empty(), "{} samples took {} times", iters.len(), times.len());
    let mut means: Vec<f64> = times.iter().zip(&iters).map(|(time, times)| time / times).collect();
    means.sort_by(f64::total_cmp);
    let permille = |share: usize| means.get((means.len() - 1) * share / 1000).copied().unwrap_or_default();
    let us = |nanoseconds: f64| (nanoseconds * 1e2).round() / 1e5;
    let numbers = [us(permille(500)), us(permille(990)), us(times.iter().sum())];
    Ok(own(benchmark.full_id, US, numbers, count(iters.iter().sum())))
}

/// A row for each operation: `p50` is the middle count, `p99` the highest.
pub(crate) fn instructions(counts: &[Counts]) -> Vec<Row> {
    let row = |(name, counts): &Counts| {
        let highest = counts.iter().copied().max().unwrap_or_default();
        #[allow(clippy::cast_precision_loss, reason = "no count comes near 2^52")]
        let numbers = [middle(counts), highest, counts.iter().sum()].map(|count| count as f64);
        own(name.clone(), INSTRUCTIONS, numbers, counts.len() as u64)
    };
    counts.iter().map(row).collect()
}

fn own(case: String, unit: &str, [p50, p99, total]: [f64; 3], n: u64) -> Row {
    Row {
        case,
        subject: "cuvmm".into(),
        unit: unit.into(),
        p50,
        p99,
        total,
        n,
        gpu: String::new(),
        driver: String::new(),
        gpus: 0,
        machine: None,
        peak_bytes: None,
        error: None,
    }
}

/// Criterion writes whole numbers as others.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is the sum of counts")]
fn count(times: f64) -> u64 {
    times as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_read_as_the_benchmark_leaves_it() {
        let sh = xshell::Shell::new().unwrap();
        let folder = sh.create_temp_dir().unwrap();
        let write = |name: &str, text: &str| sh.write_file(folder.path().join(name), text).unwrap();
        assert!(times(folder.path()).is_err());
        write("machine", "2 x Xeon");
        assert!(times(folder.path()).is_err(), "no benchmark");
        write("report/index.html", "");
        write("own_close_10/new/benchmark.json", r#"{"full_id":"own/close/10"}"#);
        write("own_close_10/new/sample.json", r#"{"iters":[2.0],"times":[3000.0]}"#);
        let rows = times(folder.path()).unwrap();
        assert_eq!((rows.len(), rows[0].p50, rows[0].machine.as_deref()), (1, 1.5, Some("2 x Xeon")));
    }

    #[test]
    fn samples_become_a_row() {
        let benchmark = r#"{"group_id":"own/close/10","function_id":null,"full_id":"own/close/10"}"#;
        let samples = r#"{"sampling_mode":"Linear","iters":[1.0,2.0,3.0],"times":[5000.0,2000.0,6000.0]}"#;
        let row = row(benchmark, samples).unwrap();
        assert_eq!((row.case.as_str(), row.p50, row.p99, row.total, row.n), ("own/close/10", 2.0, 2.0, 13.0, 6));
        assert!(super::row(benchmark, r#"{"iters":[],"times":[]}"#).is_err());
        assert!(super::row(benchmark, r#"{"iters":[1.0],"times":[]}"#).is_err());
    }
}
