//! Lists the devices that this process sees, and what each of them can do.
//!
//! `cargo run --example devices -p cuvmm-driver`

use std::error::Error;
use std::process::ExitCode;

use cuvmm_driver::sys::CUmemAllocationHandleType as Kind;
use cuvmm_driver::{Call, Device, Driver, Probe};

fn main() -> ExitCode {
    match list() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            let mut cause = error.source();
            while let Some(error) = cause {
                eprintln!("  because {error}");
                cause = error.source();
            }
            ExitCode::FAILURE
        }
    }
}

fn list() -> Result<(), Box<dyn Error>> {
    let driver = Driver::load()?;
    println!("CUDA {}", driver.version());
    let missing: Vec<Call> = Call::ALL.iter().copied().filter(|call| !driver.raw().provides(*call)).collect();
    if !missing.is_empty() {
        println!("this driver is too old for {missing:?}");
    }
    if driver.device_count() == 0 {
        return Err("the driver works, but this process sees no device (is CUDA_VISIBLE_DEVICES set?)".into());
    }
    for device in driver.devices() {
        describe(&device)?;
    }
    Ok(())
}

fn describe(device: &Device) -> Result<(), cuvmm_driver::Error> {
    println!("device {}: {}", device.ordinal(), device.name()?);
    println!("  identity            {}", device.uuid()?);
    println!("  PCI bus             {}", device.pci_bus_id()?);
    println!("  compute capability  {}", device.compute_capability()?);
    println!("  memory              {} MiB", device.total_memory()? >> 20);
    match device.host_numa_id()? {
        Some(node) => println!("  next to NUMA node   {node}"),
        None => println!("  next to NUMA node   none"),
    }
    println!("  virtual memory      {}", yes(device.supports_virtual_memory()?));
    println!("  RDMA                {}", yes(device.supports_rdma()?));
    println!("  compression         {}", yes(device.supports_compression()?));
    println!("  dma-buf             {}", yes(device.supports_dma_buf()?));
    println!("  file descriptors    {}", found(device.probe(Kind::POSIX_FILE_DESCRIPTOR)));
    println!("  fabric handles      {}", found(device.probe(Kind::FABRIC)));
    for peer in device.driver().devices() {
        if peer.ordinal() != device.ordinal() {
            println!("  reaches device {}    {}", peer.ordinal(), yes(device.can_access_peer(&peer)?));
        }
    }
    Ok(())
}

fn yes(supported: bool) -> &'static str {
    if supported { "yes" } else { "no" }
}

fn found(probe: Probe) -> String {
    match probe {
        Probe::Available => "yes".to_owned(),
        Probe::Refused { error, .. } => format!("no: {error}"),
    }
}
