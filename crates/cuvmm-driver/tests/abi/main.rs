//! The driver's ABI as this crate declares it, against two bindings that were generated from the driver's headers
//! and know nothing of each other: `cuda-driver-sys` (CUDA 10.2, where virtual memory began) and `cudarc` (13.2).
//! Their types, constants and signatures are looked at, and none of their functions is ever called.

mod constants;
mod layouts;
mod signatures;
mod versions;

use std::error::Error;

/// The binding of CUDA 10.2 links libcuda in every program but this workspace's.
#[test]
fn nothing_here_needs_libcuda() -> Result<(), Box<dyn Error>> {
    let mapped = std::fs::read_to_string("/proc/self/maps")?;
    let drivers: Vec<_> = mapped.lines().filter(|line| line.contains("libcuda")).collect();
    assert!(drivers.is_empty(), "a test that calls nothing runs with {drivers:?}");
    Ok(())
}
