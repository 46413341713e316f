//! [`Machine`]: the GPUs of this machine, and what else a measurement names.

use std::{fmt, fs};

use anyhow::{Context, Result, ensure};
use cuvmm_driver::Driver;

/// What the suites run on.
pub struct Machine {
    /// The names of its GPUs: one at least.
    pub gpus: Vec<String>,
    cuda: String,
    kernel_driver: Option<String>,
}

impl Machine {
    /// This one.
    ///
    /// # Errors
    /// There is no driver, or no GPU.
    pub fn this() -> Result<Self> {
        let driver = Driver::load().context("no GPU can be used")?;
        let devices = driver.devices();
        ensure!(!devices.is_empty(), "the driver is there, but no GPU: is CUDA_VISIBLE_DEVICES empty?");
        Ok(Self {
            gpus: devices.iter().map(|device| device.name()).collect::<Result<_, _>>()?,
            cuda: driver.version().to_string(),
            kernel_driver: kernel_driver(),
        })
    }
}

/// A driver's version: that of its kernel's part, where there is one, and the CUDA version.
pub fn driver_of(driver: &Driver) -> String {
    let cuda = format!("CUDA {}", driver.version());
    kernel_driver().map_or(cuda.clone(), |kernel_driver| format!("{kernel_driver}, {cuda}"))
}

fn kernel_driver() -> Option<String> {
    let text = fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    kernel_version(&text).map(str::to_owned)
}

/// The processors of this machine: how many, and of which model.
pub fn processors() -> String {
    processors_in(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

fn processors_in(text: &str) -> String {
    let pairs = || text.lines().filter_map(|line| line.split_once(':')).map(|(key, value)| (key.trim(), value.trim()));
    let model = pairs().find(|(key, _)| *key == "model name").map_or("processors of unknown model", |(_, model)| model);
    format!("{} x {model}", pairs().filter(|(key, _)| *key == "processor").count())
}

/// One line, so that a table that is shown elsewhere says what it was made on.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, gpu) in self.gpus.iter().enumerate() {
            let first = self.gpus.iter().position(|other| other == gpu);
            if first == Some(index) {
                let number = self.gpus.iter().filter(|other| *other == gpu).count();
                write!(f, "{number} x {gpu}, ")?;
            }
        }
        let kernel_driver = self.kernel_driver.as_deref().unwrap_or("of unknown version");
        write!(f, "kernel driver {kernel_driver}, CUDA {}", self.cuda)
    }
}

/// The version in the text of `/proc/driver/nvidia/version`: the first number with a dot.
fn kernel_version(text: &str) -> Option<&str> {
    text.split_whitespace().find(|word| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_says_all() {
        let check = |gpus: &[&str], kernel_driver: Option<&str>, expect: &str| {
            let gpus = gpus.iter().map(|&gpu| gpu.to_owned()).collect();
            let machine = Machine { gpus, cuda: "12.4".into(), kernel_driver: kernel_driver.map(str::to_owned) };
            assert_eq!(machine.to_string(), expect);
        };
        check(&["NVIDIA H200"], Some("550.1"), "1 x NVIDIA H200, kernel driver 550.1, CUDA 12.4");
        check(&["A", "B", "A"], None, "2 x A, 1 x B, kernel driver of unknown version, CUDA 12.4");
    }

    #[test]
    fn processors_are_counted_and_named() {
        let text = "processor\t: 0\nmodel name\t: Xeon\n\nprocessor\t: 1\nmodel name\t: Xeon\n";
        assert_eq!(processors_in(text), "2 x Xeon");
        assert_eq!(processors_in("processor : 0\n"), "1 x processors of unknown model");
    }

    #[test]
    fn kernel_versions() {
        let check = |text: &str, expect| assert_eq!(kernel_version(text), expect, "{text}");
        check(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n\
             GCC version:  gcc version 12.3.0\n",
            Some("580.95.05"),
        );
        check("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Tue Feb 20", Some("535.161.08"));
        check("", None);
    }
}
