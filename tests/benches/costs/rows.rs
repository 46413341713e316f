//! [`Rows`]: what was measured.

use std::time::Duration;

use cuvmm::Device;
use cuvmm_tests::{Times, driver_of, processors};
use serde_json::{Value, json};

/// What was measured, each row printed as it is added.
pub(crate) struct Rows {
    gpu: String,
    driver: String,
    gpus: i32,
    machine: String,
    rows: Vec<Value>,
}

impl Rows {
    pub(crate) fn on(device: &Device) -> Self {
        let driver = device.driver();
        let (gpu, gpus, machine) = (device.name().unwrap(), driver.device_count(), processors());
        let driver = driver_of(driver);
        println!("{gpu}, 1 of {gpus}, driver {driver}, {machine}; times in us");
        println!(
            "{:<22} {:<16} {:>11} {:>11} {:>13} {:>6} {:>9}",
            "case", "subject", "p50", "p99", "total", "n", "peak MiB"
        );
        Self { gpu, driver, gpus, machine, rows: Vec::new() }
    }

    /// Adds how long a subject took in a case.
    pub(crate) fn add(&mut self, case: &str, subject: &str, times: &Times) {
        self.push(case, subject, times, None);
    }

    /// Adds it with the most memory of the device that was in use meanwhile, in bytes.
    pub(crate) fn add_with_peak(&mut self, case: &str, subject: &str, times: &Times, peak: usize) {
        self.push(case, subject, times, Some(peak));
    }

    fn push(&mut self, case: &str, subject: &str, times: &Times, peak: Option<usize>) {
        let us = |time: Duration| (time.as_secs_f64() * 1e9).round() / 1e3;
        let [p50, p99, total] = [times.median(), times.p99(), times.total()].map(us);
        let n = times.len();
        let mib = peak.map_or(String::new(), |bytes| (bytes >> 20).to_string());
        println!("{case:<22} {subject:<16} {p50:>11.2} {p99:>11.2} {total:>13.1} {n:>6} {mib:>9}");
        let mut row = json!({
            "case": case, "subject": subject, "unit": "us", "p50": p50, "p99": p99, "total": total, "n": n,
            "gpu": self.gpu, "driver": self.driver, "gpus": self.gpus, "machine": self.machine,
        });
        if let Some(peak) = peak {
            row["peak_bytes"] = json!(peak);
        }
        self.rows.push(row);
    }

    /// Whether there is a row of a case whose name begins so.
    pub(crate) fn has_any(&self, wanted: &str) -> bool {
        self.rows.iter().any(|row| row["case"].as_str().is_some_and(|case| case.starts_with(wanted)))
    }

    /// All rows, as a list, a row a line.
    pub(crate) fn json(&self) -> String {
        let rows: Vec<String> = self.rows.iter().map(Value::to_string).collect();
        format!("[\n{}\n]\n", rows.join(",\n"))
    }
}
