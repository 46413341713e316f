//! Weights that are loaded once and read by every GPU: gathered in pinned memory of the host, on the NUMA node of the
//! thread that reads them, copied to the first GPU, and read there by it and its peers.
//!
//! `cargo run -p cuvmm --example weights` runs on the GPUs, and `… -- sim` on two simulated ones.
//!
//! # Safety
//! The staging memory is referred to as a slice once all is written to it, and nobody else has it.

use cuvmm::{
    Access, Device, Driver, Error, GrowthPolicy, HandleKind, Location, Options, StreamRef, VirtualMemoryBuffer,
    VirtualMemoryResource,
};
use cuvmm_sim::{Machine, Simulator};

const MIB: usize = 1 << 20;
const TENSORS: usize = 16;
/// Bytes of one tensor.
const TENSOR: usize = 3 * MIB;

fn main() -> Result<(), Error> {
    let driver = match std::env::args().nth(1).as_deref() {
        Some("sim") => Simulator::new(Machine::h200_pair()).driver()?,
        _ => Driver::load()?,
    };
    let first = driver.device(0)?;
    let staging = stage(&first)?;

    // The first GPU writes the weights, the others read them, and other processes can import them.
    let mut readers = Vec::new();
    for device in driver.devices() {
        if device != first && device.can_access_peer(&first)? {
            readers.push(device);
        }
    }
    let options =
        Options::new().peers(&readers, Access::Read).handle_kind_or(HandleKind::PosixFdAndFabric, HandleKind::PosixFd);
    let resource = VirtualMemoryResource::new(&first, options)?;
    println!("shared as {:?}", resource.handle_kind());
    if let Some(refused) = resource.handle_refused() {
        println!("  because {refused}");
    }
    let weights = resource.allocate(staging.size())?;
    // SAFETY: nobody else has the staging memory, and the copy only reads it.
    let bytes = unsafe { staging.as_slice() }.unwrap_or_default();
    weights.copy_from_host(0, bytes)?;
    // It was needed for the copy alone: the host has its memory back at once.
    let staging = staging.truncate_into(0)?;
    assert_eq!(staging.resource().statistics().physical.now, 0);

    for device in std::iter::once(&first).chain(&readers) {
        // In place of kernels: each GPU reads on a stream of its own.
        let stream = StreamRef::create(device)?;
        let mut last = [0; 4];
        weights.copy_to_host_on(&stream, TENSORS * TENSOR - 4, &mut last)?;
        assert_eq!(last, [TENSORS as u8 - 1; 4]);
        println!("device {} reads {} MiB at {}", device.ordinal(), weights.size() / MIB, weights.address());
        // The work that was queued on it is waited for before the weights go.
        weights.fence(&stream)?;
    }
    weights.close()?;
    println!("closed");
    Ok(())
}

/// Gathers the tensors in memory of the host that the GPU copies from directly. How many there are shows as they come.
fn stage(device: &Device) -> Result<VirtualMemoryBuffer, Error> {
    let options = Options::new().location(Location::HostNumaCurrent).growth(GrowthPolicy::doubling());
    let resource = VirtualMemoryResource::new(device, options)?;
    let mut staging = resource.allocate(0)?;
    for index in 0..TENSORS {
        let tensor = vec![index as u8; TENSOR];
        staging = staging.grow_into((index + 1) * TENSOR)?;
        // The host writes its own memory: no driver call.
        staging.copy_from_host(index * TENSOR, &tensor)?;
    }
    println!("{:?}: {} MiB in {} chunks", resource.location(), staging.size() / MIB, staging.chunks().len());
    Ok(staging)
}
