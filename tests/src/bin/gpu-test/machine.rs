//! The GPUs of this machine.

use std::fs;

use anyhow::{Context, Result, ensure};
use cuvmm_driver::Driver;

/// Prints the GPUs and the driver, and returns how many there are: one at least.
pub(crate) fn gpus() -> Result<usize> {
    let driver = Driver::load().context("no GPU can be used")?;
    let devices = driver.devices();
    ensure!(!devices.is_empty(), "the driver is there, but no GPU: is CUDA_VISIBLE_DEVICES empty?");
    println!("GPUs: {}", devices.len());
    for (ordinal, device) in devices.iter().enumerate() {
        println!("  {ordinal}: {}", device.name()?);
    }
    println!("CUDA version of the driver: {}", driver.version());
    let text = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    println!("kernel driver: {}", kernel_version(&text).unwrap_or("not known"));
    Ok(devices.len())
}

/// The version in the text of `/proc/driver/nvidia/version`: the first number with a dot.
fn kernel_version(text: &str) -> Option<&str> {
    text.split_whitespace().find(|word| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.'))
}

#[cfg(test)]
mod tests {
    use super::*;

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
