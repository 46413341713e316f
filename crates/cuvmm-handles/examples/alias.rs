//! Maps the same physical memory at two addresses, side by side: a ring whose end is followed by its beginning, so
//! that work which runs over the end needs no second piece.
//!
//! `cargo run -p cuvmm-handles --example alias`

use std::sync::Arc;

use cuvmm_driver::sys::{CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp};
use cuvmm_handles::{Allocation, Granularity, Mapping, Reservation};
use cuvmm_sim::{Machine, Simulator};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let simulator = Simulator::new(Machine::h200());
    let driver = simulator.driver()?;
    let device = driver.device(0)?;

    let properties = CUmemAllocationProp::pinned(device.location(), CUmemAllocationHandleType::NONE);
    let size = Granularity::minimum(&driver, &properties)?.round_up(3 << 20)?;
    let memory = Arc::new(Allocation::create(&driver, size, &properties)?);
    println!("made {} MiB of memory", memory.size() >> 20);

    let access: Arc<[CUmemAccessDesc]> =
        Arc::new([CUmemAccessDesc { location: device.location(), flags: CUmemAccess_flags::READWRITE }]);
    let both = Reservation::GRANULARITY.round_up(size.checked_add(size)?.bytes())?;
    let range = Arc::new(Reservation::reserve(&driver, both, 0)?);
    println!("reserved {} MiB of addresses at {}", range.size() >> 20, range.address());

    let ring = Mapping::map(&range, 0, memory.clone(), access.clone())?;
    let again = Mapping::map(&range, ring.size(), memory, access)?;
    println!("mapped the memory at {} and again at {}", ring.address(), again.address());
    println!("physical memory in use: {} MiB", simulator.physical_bytes(0) >> 20);

    // Each mapping holds a share of both. The last one to go releases the memory and frees the addresses.
    drop(range);
    ring.close()?;
    again.close()?;
    println!("left: {} mappings, {} reservations", simulator.live().mappings, simulator.live().reservations);
    Ok(())
}
