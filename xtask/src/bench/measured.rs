//! What criterion left in its folder, as rows of our own cost.
//!
//! A row is made of the samples of one benchmark. A sample is the mean of so many repetitions; `p50` is the median of the
//! samples, `p99` the 99th percentile, `total` all the time, and `n` all the repetitions.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::rows::{Row, US};

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

/// A row for each benchmark.
pub(crate) fn times(folder: &Path) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let entries = fs::read_dir(folder).with_context(|| format!("criterion left no {}", folder.display()))?;
    for entry in entries {
        // Beside them is the folder of a report.
        let run = entry?.path().join("new");
        if run.join("sample.json").try_exists()? {
            let read = |name| {
                let path = run.join(name);
                fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
            };
            let row = row(&read("benchmark.json")?, &read("sample.json")?);
            rows.push(row.with_context(|| format!("{} has no samples", run.display()))?);
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
    Ok(Row {
        case: benchmark.full_id,
        subject: "cuvmm".into(),
        unit: US.into(),
        p50: us(permille(500)),
        p99: us(permille(990)),
        total: us(times.iter().sum()),
        n: count(iters.iter().sum()),
        gpu: String::new(),
        driver: String::new(),
        gpus: 0,
        machine: Some(processors()),
        peak_bytes: None,
        error: None,
    })
}

/// Criterion writes whole numbers as others.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is the sum of counts")]
fn count(times: f64) -> u64 {
    times as u64
}

/// This machine's, as the benchmarks on a GPU tell theirs.
fn processors() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let pairs = || text.lines().filter_map(|line| line.split_once(':')).map(|(key, value)| (key.trim(), value.trim()));
    let model = pairs().find(|(key, _)| *key == "model name").map_or("processors of unknown model", |(_, model)| model);
    format!("{} x {model}", pairs().filter(|(key, _)| *key == "processor").count())
}

#[cfg(test)]
mod tests {
    use super::*;

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
